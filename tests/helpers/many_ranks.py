"""The work of one rank among very many, none of which is started."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dtrain.cli.resolve import compose
from dtrain.config.precision import LossScale
from dtrain.distributed.single_rank import SingleRank
from dtrain.engine.vote.finalize import StepFinalizer
from dtrain.engine.vote.skips import SkipCounter
from dtrain.engine.vote.tensors import VoteTensors
from dtrain.planning.devices import find_device
from dtrain.precision.loss_scale import LossScaleState
from dtrain.train.planned import PlannedRun
from tests.helpers.vote_records import rank_records

LLAMA_8B = ("model=llama-8b", "model.vocab_size=128256", "model.recompute=full", "precision=bf16")


def planned_run(num_ranks: int, *keys: str, model: Sequence[str] = LLAMA_8B) -> PlannedRun:
    """Returns a run on GPUs with one sample a rank and step."""
    config = compose([*model, "train.micro_batch_size=1", f"train.global_batch_size={num_ranks}", *keys])
    tokens = torch.zeros(1, config.model.max_seq_len, dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens}
    return PlannedRun(config, find_device("h100-80gb", num_ranks), num_ranks, batch, config.model.vocab_size or 1)


class Texts(SingleRank):
    """One rank among ``world_size``, which have all sent the same text as it has, or ``texts``."""

    def __init__(self, world_size: int, texts: Sequence[str] = ()) -> None:
        super().__init__(torch.device("cpu"))
        self.world_size, self._texts = world_size, list(texts)

    def exchange_text(self, text: str) -> list[str]:
        return self._texts or [text] * self.world_size


def seconds(work: Callable[[], Any], rounds: int = 1) -> float:
    """Returns the median of the processor's seconds."""
    taken = []
    for _ in range(rounds):
        gc.collect()
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return median(taken)


def vote_rows(world_size: int) -> Tensor:
    """Returns the rows of a step that is applied."""
    return torch.tensor([rank_records(step=4).to_row()], dtype=torch.int64).expand(world_size, -1).contiguous()


def vote_host_work(rows: Tensor) -> Callable[[], None]:
    """Returns all that the host does in a step with the ``rows`` of all ranks: the decision and its outcome."""
    scale = LossScaleState.of(LossScale.of("dynamic"))
    finalizer = StepFinalizer(
        Texts(len(rows)), scale, SkipCounter(20), lambda decision: None, "{}", is_synchronous=True
    )
    tensors = VoteTensors()

    def run() -> None:
        _, packed = tensors.decide(rows)
        finalizer.post(packed, ())
        finalizer.finalize_step()
        assert finalizer.outcome().applied

    return run
