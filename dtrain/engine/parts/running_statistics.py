"""The running statistics of a model, such as those of BatchNorm: of applied steps only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dtrain.engine.deterministic import keeps_running_statistics
from dtrain.engine.parts.part import Forward, StepPart, StepUnderWay


def running_statistics(model: nn.Module) -> Iterator[Tensor]:
    """Yields the buffers that the norms of ``model`` write in training without counting their writes."""
    for module in filter(keeps_running_statistics, model.modules()):
        yield from module.buffers(recurse=False)


@dataclass(frozen=True)
class _Kept:
    """Statistics of one dtype: the live ones, each 1-D, and all of them as they were, 1-D."""

    live: list[Tensor]
    before: Tensor


class RunningStatistics(StepPart):
    """Keeps the running statistics as they were before the step under way.

    A forward writes them before it is known whether its step is applied. One of a NaN or an overflow would stay in them
    for good, because each new value is a mean with the old one.

    Args:
        model: if it has none, all calls do nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._has_any = any(True for _ in running_statistics(model))
        self._kept: list[_Kept] = []

    def before_forward(self, call: Forward) -> None:
        """Copies the statistics, unless an earlier forward of the step has.

        A forward without gradients outside of a micro-batch is the caller's own, as when statistics are measured again.
        """
        if not self._has_any or not call.belongs_to_step or (self._kept and not call.begins_step):
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in running_statistics(self._model):
            # a write to .data is not counted: the graph of a forward that awaits its backward may hold the buffer
            by_dtype.setdefault(buffer.dtype, []).append(buffer.data.view(-1))
        self._kept = [_Kept(live, torch.cat(live)) for live in by_dtype.values()]

    def after_update(self, step: StepUnderWay) -> None:
        assert step.decision is not None
        self.restore(step.decision.code)

    def end_step(self, step: StepUnderWay) -> None:
        self.restore()  # of a step that was not taken

    def loaded(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Releases the copies: the statistics stay as they are."""
        self._kept = []

    def restore(self, code: Tensor | None = None) -> None:
        """Writes the statistics as they were, and releases the copies; waits for no device.

        Args:
            code: of the decision on the step, 0-dim on their device: 0 leaves them as they are; None: no decision.
        """
        for kept in self._kept:
            values = kept.before if code is None else torch.where(code == 0, torch.cat(kept.live), kept.before)
            torch._foreach_copy_(kept.live, values.split([live.numel() for live in kept.live]))
        self._kept = []
