"""Leaves a parameter alone in a step in which no rank has a gradient of it, as torch's optimizers do.

Each rank's vote has a bit for each parameter that a backward of the step has given a gradient. A parameter without one
on all ranks keeps its master, optimizer states and average. Its next update has the bias correction of the updates that
it has had. A rank that has a gradient of each parameter knows that none is to be left alone: it updates as without this
part. Else the other ranks' bits are read on the device, so the host does not wait.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from dtrain.distributed.communicator import Communicator
from dtrain.distributed.logging import logger
from dtrain.engine.outcome import StepOutcome
from dtrain.engine.parts.part import StepPart
from dtrain.engine.request import StepOptions
from dtrain.engine.run_state import RunState
from dtrain.engine.vote.decide import Decision, DecodedDecision
from dtrain.optim.rule import UpdateScalars
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.precision.fake import is_fake

_NUM_LISTED = 8  # in the warning


def whole_modules(names: Collection[str], everyone: Sequence[str]) -> list[str]:
    """Returns the outermost modules that have parameters called ``names`` and no others, then the parameters beside."""
    others = {"", *(name[:end] for name in everyone if name not in names for end in _ends(name))}
    found = (next((name[:end] for end in _ends(name) if name[:end] not in others), name) for name in names)
    return list(dict.fromkeys(found))


def _ends(name: str) -> list[int]:
    """Returns where the names of the modules around a parameter end, the outermost first."""
    return [place for place, letter in enumerate(name) if letter == "."]


class MissedUpdates(StepPart):
    """Counts the updates that each parameter has missed.

    Args:
        names: of the trained parameters, numbered as in ``monitor``.
        monitor: knows of which parameters this rank has a gradient.
        run: has the counts.
        comm: the ranks.
        options: say whether a parameter without a gradient is left alone; else its gradient is zero.

    Attributes:
        num_words: number of ``words``.
    """

    def __init__(
        self,
        names: Sequence[str],
        monitor: GradientMonitor,
        run: RunState,
        comm: Communicator,
        options: StepOptions,
    ) -> None:
        self._names, self._monitor, self._run, self._comm = names, monitor, run, comm
        self._has_warned = False
        self.num_words = -(-len(names) // 64) if options.missing_grad == "skip" else 0

    @property
    def _missing(self) -> list[int]:
        if not self.num_words or len(self._monitor.received) == len(self._names):
            return []
        return sorted({*range(len(self._names))} - self._monitor.received)

    @property
    def names(self) -> list[str]:
        """The parameters without a gradient on this rank, which may be left alone."""
        return [self._names[number] for number in self._missing]

    def words(self) -> list[int]:
        """Returns words of 64 bits; bit ``n`` of all says whether this rank has a gradient of parameter ``n``."""
        received, number = self._monitor.received, len(self._names)
        if not self.num_words:
            return []
        bits = (1 << number) - 1 if len(received) == number else sum(1 << one for one in received)
        return list(struct.unpack(f"<{self.num_words}q", bits.to_bytes(8 * self.num_words, "little")))

    def finalized(self, outcome: StepOutcome, decision: DecodedDecision) -> None:
        """Counts the parameters that an applied step left alone."""
        missed = self._run.missed_updates
        names = [self._names[number] for number in decision.missing(len(self._names))] if outcome.applied else ()
        for name in names:
            missed[name] = missed.get(name, 0) + 1
        if outcome.applied and not self._has_warned:
            self._has_warned = True
            if names and self._comm.rank == 0:
                listed = ", ".join(f"'{one}'" for one in whole_modules(names, self._names)[:_NUM_LISTED])
                logger.warning(
                    "%d of %d parameters got no gradient on any rank in the first step, and keep their values until "
                    "they get one: %s%s",
                    *(len(names), len(self._names), listed, ", ..." if len(names) > _NUM_LISTED else ""),
                )

    def set_apart(self, scalars: UpdateScalars, decision: Decision) -> UpdateScalars:
        """Returns ``scalars`` with those of the parameters that they do not fit."""
        missed, numbers = self._run.missed_updates, self._missing
        if not missed and not numbers:
            return scalars
        by_count = {count: replace(scalars, step=scalars.step - count, sent=None) for count in {*missed.values()}}
        others: dict[str, UpdateScalars | None] = {name: by_count[count] for name, count in missed.items()}
        is_missing, names = decision.missing(numbers), self.names
        if is_missing.device.type == "cpu" and not is_fake(is_missing):
            others |= {name: None for name, is_alone in zip(names, is_missing.tolist(), strict=True) if is_alone}
            return replace(scalars, others=others)
        # in pairs, because a kernel is compiled for addresses that are multiples of 16 bytes
        found_inf = torch.where(is_missing, 1.0, scalars.found_inf).repeat_interleave(2)[::2]
        for name, own in zip(names, found_inf.unbind(), strict=True):
            others[name] = replace(others.get(name) or scalars, found_inf=own)
        return replace(scalars, others=others)
