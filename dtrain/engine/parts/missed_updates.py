"""Leaves a parameter alone in a step in which no rank has a gradient of it, as torch's optimizers do.

Each rank's vote has a bit for each parameter that a backward of the step has given a gradient. A parameter without one
on all ranks keeps its master, optimizer states and average. Its next update has the bias correction of the updates that
it has had. A rank that has a gradient of each parameter knows that none is to be left alone: it updates as without this
part. Else the other ranks' bits are read on the device, so the host does not wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from dtrain.engine.outcome import StepOutcome
from dtrain.engine.parts.part import StepPart
from dtrain.engine.run_state import RunState
from dtrain.engine.vote.decide import Decision, DecodedDecision
from dtrain.optim.rule import UpdateScalars
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.precision.fake import is_fake


class MissedUpdates(StepPart):
    """Counts the updates that each parameter has missed.

    Args:
        names: of the trained parameters, numbered as in ``monitor``.
        monitor: knows of which parameters this rank has a gradient.
        run: has the counts.
        leaves_alone: whether a parameter without a gradient is left alone; else its gradient is zero.
    """

    def __init__(self, names: Sequence[str], monitor: GradientMonitor, run: RunState, *, leaves_alone: bool) -> None:
        self._names, self._monitor, self._run = names, monitor, run
        self._leaves_alone = leaves_alone

    def finalized(self, outcome: StepOutcome, decision: DecodedDecision) -> None:
        """Counts the parameters that an applied step left alone."""
        missed = self._run.missed_updates
        for number in decision.missing(len(self._names)) if outcome.applied else ():
            name = self._names[number]
            missed[name] = missed.get(name, 0) + 1

    def apart(self, scalars: UpdateScalars, decision: Decision) -> Mapping[str, UpdateScalars | None]:
        """Returns the scalars of the parameters that ``scalars`` do not fit, as :attr:`UpdateScalars.others`."""
        missed = self._run.missed_updates
        numbers = (~self._monitor.received).nonzero()[0].tolist() if self._leaves_alone else []
        if not missed and not numbers:
            return {}
        by_count = {count: replace(scalars, step=scalars.step - count) for count in {*missed.values()}}
        found: dict[str, UpdateScalars | None] = {name: by_count[count] for name, count in missed.items()}
        if not numbers:
            return found
        is_missing, names = decision.missing(numbers), [self._names[number] for number in numbers]
        if is_missing.device.type == "cpu" and not is_fake(is_missing):
            return found | {name: None for name, alone in zip(names, is_missing.tolist(), strict=True) if alone}
        # in pairs, because a kernel is compiled for addresses that are multiples of 16 bytes
        found_inf = torch.where(is_missing, 1.0, scalars.found_inf).repeat_interleave(2)[::2]
        for name, own in zip(names, found_inf.unbind(), strict=True):
            found[name] = replace(found.get(name) or scalars, found_inf=own)
        return found
