"""The batches of a benchmark case."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from dtrain.config.schema import RunConfig
from dtrain.data import BatchLoader, Dataset, load_dataset
from dtrain.measure.worker import Rank
from dtrain.models import vocabulary
from dtrain.tasks import Task, num_targets
from dtrain.train.validation import to_device

_RANDOM_BATCHES = 4

Batch = dict[str, Tensor]


class Batches:
    """The batches of one rank, endless.

    Args:
        source: ``bench.data``: ``loader``, ``device`` or ``random``.

    Attributes:
        task: of the data, or the vocabulary of random tokens.
        weight: share of the last batch's targets that count; the host reads nothing of the device for it.
    """

    def __init__(self, config: RunConfig, rank: Rank, device: torch.device, source: str) -> None:
        self._config, self._rank, self._device, self.source = config, rank, device, source
        self._dataset: Dataset | None = None
        self.task: Task | int
        if source == "random" and config.model.vocab_size is not None:
            self.task = config.model.vocab_size
        else:
            self._dataset = load_dataset(config.data, config.model.max_seq_len)
            self.task = self._dataset.task
        self.weight = 1.0
        self._ready: deque[tuple[Batch, float]] = deque()
        self.resize(config.train.micro_batch_size)

    def resize(self, micro_batch: int) -> None:
        """Makes further batches of ``micro_batch`` sequences."""
        self._ready.clear()  # first: the old ones need not stay in memory
        self._micro_batch = micro_batch
        if self.source == "random":
            self._ready.extend((self._random(seed), 1.0) for seed in range(_RANDOM_BATCHES))
            return
        assert self._dataset is not None
        self._loader = BatchLoader(
            self._dataset.train,
            seed=self._config.seed,
            micro_batch_size=micro_batch,
            num_micro_batches=1,
            rank=self._rank.rank,
            world_size=self._rank.ranks,
        )

    def prepare(self, count: int) -> None:
        """Puts the next ``count`` batches on the device, if they should lie there before their step."""
        while self.source == "device" and len(self._ready) < count:
            batch, weight = self._load()
            self._ready.append((to_device(batch, self._device), weight))

    def __next__(self) -> Batch:
        batch, self.weight = self._ready.popleft() if self._ready else self._load()
        if self.source == "random":
            self._ready.append((batch, self.weight))
        return batch

    def _load(self) -> tuple[Batch, float]:
        (batch,) = next(self._loader)
        return batch, num_targets(batch["targets"]) / (self._micro_batch * self._config.targets_per_sample)

    def _random(self, seed: int) -> Batch:
        model = self._config.model
        vocab_size = vocabulary(model, self.task)
        generator = torch.Generator(self._device).manual_seed(self._rank.rank * _RANDOM_BATCHES + seed)
        shape = (self._micro_batch, model.max_seq_len + 1)
        tokens = torch.randint(vocab_size, shape, generator=generator, device=self._device)
        return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
