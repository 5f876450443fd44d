"""Sizes of a batch that change at given attempted steps: batch-size and sequence-length warm-up.

A key that may change takes a number, or a mapping from attempted steps to numbers, ``{0: 16, 1000: 64}``: the number
from the first step on, and the one after 1000 attempted steps. Skipped steps count.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.config.fields import shown
from dtrain.errors import ConfigError

BY_STEP = "a whole number, or a mapping {step: number}"
"""The values of such a key in words."""

BY_STEP_KEYS = ("train.global_batch_size", "train.seq_len")

_STEP = re.compile(r"0|[1-9][0-9]*")


def by_step(values: Mapping[Any, int], key: str) -> dict[int, int]:
    """Returns ``values`` with whole numbers as steps, ascending.

    Args:
        values: sizes by step; steps may be texts, as in JSON.
        key: its name for messages.

    Raises:
        ConfigError: a step is no whole number from 0, none is 0, or a size is not at least 1.
    """
    for step, size in values.items():
        if isinstance(step, bool) or not _STEP.fullmatch(str(step)):
            raise ConfigError(f"{key}={shown(values)}: {shown(step)} is not a step; expected a whole number from 0")
        if size < 1:
            raise ConfigError(f"{key}={size} from step {step} is too small; it must be at least 1")
    sizes = {int(step): size for step, size in values.items()}
    if 0 not in sizes:
        example = shown({0: next(iter(sizes.values()), 1), **sizes})
        raise ConfigError(f"{key}={shown(values)} has no number for step 0, the first; write one, such as {example}")
    return dict(sorted(sizes.items()))


@dataclass(frozen=True)
class BatchPhase:
    """Sizes of the batches from one attempted step on.

    Attributes:
        first_step: attempted steps before the first batch of these sizes.
        global_batch_size: samples in a step over all ranks.
        seq_len: tokens in a row of a micro-batch; a longer sample is cut into rows.
    """

    first_step: int
    global_batch_size: int
    seq_len: int


@dataclass(frozen=True)
class BatchGrowth:
    """Sizes of the batch of each attempted step.

    Attributes:
        phases: by ascending first step, from step 0.
        sample_len: tokens in a sample.
    """

    phases: tuple[BatchPhase, ...]
    sample_len: int

    @staticmethod
    def of(global_batch_size: Any, seq_len: Any, sample_len: int) -> BatchGrowth:
        """Returns the phases.

        Args:
            global_batch_size: a number, or numbers by step.
            seq_len: the same, or None for whole samples.
            sample_len: tokens in a sample.
        """
        sizes = _numbers(global_batch_size)
        lengths = _numbers(sample_len if seq_len is None else seq_len)
        phases: list[BatchPhase] = []
        for step in sorted({*sizes, *lengths}):
            phase = BatchPhase(step, _at(sizes, step), _at(lengths, step))
            if not phases or (phases[-1].global_batch_size, phases[-1].seq_len) != (_at(sizes, step), phase.seq_len):
                phases.append(phase)
        return BatchGrowth(tuple(phases), sample_len)

    def at(self, step: int) -> BatchPhase:
        """Returns the phase of the batch after ``step`` attempted steps."""
        return self.phases[bisect_right(self.phases, step, key=lambda phase: phase.first_step) - 1]

    def between(self, start: int, stop: int) -> Iterator[tuple[int, BatchPhase]]:
        """Yields the number of steps from ``start`` to ``stop``, exclusive, in each phase that has any, and it."""
        ends = [*(phase.first_step for phase in self.phases[1:]), stop]
        for phase, end in zip(self.phases, ends, strict=True):
            count = min(end, stop) - max(phase.first_step, start)
            if count > 0:
                yield count, phase

    def num_tokens(self, start: int, stop: int) -> int:
        """Returns the tokens in the batches from ``start`` attempted steps to ``stop``, exclusive."""
        return sum(count * phase.global_batch_size * self.sample_len for count, phase in self.between(start, stop))

    @property
    def largest(self) -> BatchPhase:
        """The largest batch with the longest rows, which need the most memory; perhaps of no single phase."""
        return BatchPhase(
            0, max(phase.global_batch_size for phase in self.phases), max(phase.seq_len for phase in self.phases)
        )


def _numbers(value: Any) -> Mapping[int, int]:
    return value if isinstance(value, dict) else {0: value}


def _at(numbers: Mapping[int, int], step: int) -> int:
    """Returns the number of the last step up to ``step``."""
    return numbers[max(first for first in numbers if first <= step)]
