"""The order in which the groups' gradients are reduced during backward, the same on all ranks.

[Note: order of waits] Backends match collectives by their order, and a wait may send a ready message first. So all
ranks wait for reductions in the order in which they started them, which is the same on all ranks. A gradient's arrival
never triggers a wait, because ranks whose graphs differ receive their gradients in different orders. A rank waits only
when it starts a group, and at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.sharding.gradients import ReductionQueue
from dtrain.sharding.group import ParameterGroup


class GradientReducer:
    """Completes the groups' gradients of a micro-batch and starts their reductions, in one order on all ranks.

    A group is reduced when its own gradients and those of all groups before it are complete, so ranks whose graphs
    differ (unused parameters, data-dependent branches) still issue the same collectives.

    Args:
        groups: the groups with trained parameters, in the order in which backward is expected to complete them.
        queue: the reductions in flight.

    Attributes:
        groups: see above.
        queue: see above.
        monitor: records whether the gradients are finite.
    """

    def __init__(self, groups: Sequence[ParameterGroup], queue: ReductionQueue) -> None:
        self.groups = groups
        self.queue = queue
        # number of each group's first parameter in the order of backward
        first_numbers = list(accumulate((len(group.trained) for group in groups), initial=0))
        self._first_numbers = dict(zip(groups, first_numbers, strict=False))
        self.monitor = GradientMonitor(first_numbers[-1])
        self._micro_batch = 0
        self._is_first = True  # no backward of this step before this one
        self._reduces = False  # in this micro-batch
        self._next = 0  # group to be reduced
        self._is_finished = True

    def begin_micro_batch(self, weight: Weight, *, number: int, last: bool) -> None:
        """Begins micro-batch ``number`` with ``weight``; accumulated sums are reduced after the ``last``."""
        self._is_first, self._is_finished = self._is_finished, False
        self.queue.begin_micro_batch(weight, is_first=self._is_first)
        self._micro_batch = number
        self._reduces = last or self.queue.exchange is not None
        self._next = 0
        for group in self.groups:
            group.begin_micro_batch(weight, is_first=self._is_first)

    def receive(self, group: ParameterGroup, grad: Tensor) -> None:
        """Records ``grad``, which ``group`` has taken, and reduces the groups that may start."""
        self.monitor.record_magnitude(grad)  # of the gradient itself, before weights, rounding and sums
        if not group.num_missing:
            self._complete(group)
        # the next in the fixed order, not the one just completed: other ranks may complete others first
        while self._reduces and self._next < len(self.groups) and self.groups[self._next].is_complete:
            self._reduce_next()

    def end_micro_batch(self) -> None:
        """Reduces the groups that backward left incomplete; missing gradients are zero."""
        for group in self.groups:
            if not group.is_complete:
                self._complete(group)
        while self._reduces and self._next < len(self.groups):
            self._reduce_next()

    def _complete(self, group: ParameterGroup) -> None:
        number = self._first_numbers[group]
        for grads in group.complete():
            # backward reaches the last parameter first
            self.monitor.record_finiteness(self._micro_batch, number, grads[::-1])
            number += len(grads)

    def _reduce_next(self) -> None:
        self.groups[self._next].reduce(self.queue)
        self._next += 1

    def finish(self) -> None:
        """Completes the main grads of this step; a second call does nothing."""
        if self._is_finished:
            return
        self._is_finished = True
        if not self._reduces:  # the batch ended early, so no micro-batch was marked as the last
            self._reduces = True
            self.end_micro_batch()
        self.queue.finish()
        # all are started before the first wait, which sends their ready messages together
        gathers = [buffer.gradient.start_gather() for group in self.groups for buffer in group.buffers]
        for handle in gathers:
            if handle is not None:
                handle.wait()
