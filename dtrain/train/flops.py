"""Model FLOPs of the steps of a run, whose batches may change."""

from __future__ import annotations

from collections.abc import Mapping

from dtrain.config.growth import BatchGrowth
from dtrain.config.schema import RunConfig
from dtrain.data import Dataset
from dtrain.data.token_samples import mean_context
from dtrain.models import train_flops_per_token


def flops_by_seq_len(config: RunConfig, dataset: Dataset) -> Mapping[int, tuple[int, int]] | None:
    """Returns the FLOPs of ``train_flops_per_token`` for each length of rows; None if they are not known."""
    found: dict[int, tuple[int, int]] = {}
    for phase in config.batch_growth.phases:
        length = phase.seq_len
        if dataset.mean_context is None:
            context: float = length
        elif length == config.model.max_seq_len:
            context = dataset.mean_context
        else:
            context = mean_context(dataset.train, length)
        flops = train_flops_per_token(config.model, dataset.task.num_outputs, context)
        if flops is None:
            return None
        found[length] = flops
    return found


def flops_between(
    growth: BatchGrowth, by_seq_len: Mapping[int, tuple[int, int]], start: int, stop: int
) -> tuple[int, int]:
    """Returns the FLOPs of all ranks from ``start`` attempted steps to ``stop``, exclusive, by both conventions."""
    causal = full = 0
    for count, phase in growth.between(start, stop):
        tokens, (of_half, of_all) = count * phase.global_batch_size * growth.sample_len, by_seq_len[phase.seq_len]
        causal, full = causal + tokens * of_half, full + tokens * of_all
    return causal, full
