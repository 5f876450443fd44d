"""The reductions of the groups' gradients during backward, in one order on all ranks.

[Note: order of waits] Backends match collectives by their order, and a wait may send a ready message first. So all
ranks wait for reductions in the order in which they started them, which is the same on all ranks. The arrival of a
gradient never decides what is waited for, because ranks whose graphs differ receive their gradients in different
orders. A rank waits only when it starts a group, and at the end of the step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from torch import Tensor

from dtrain.distributed.communicator import GradientExchange
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.sharding.gradients import FlatGradient
from dtrain.sharding.group import ParameterGroup
from dtrain.sharding.rounded_gradients import StepNoise

_IN_FLIGHT = 2  # reductions of the last micro-batch on a GPU, if their sums follow


@dataclass
class ReducedStep:
    """Holds the counters of a step and of its current micro-batch."""

    weights: list[Tensor] = field(default_factory=list)  # [world_size] of each micro-batch that was exchanged
    num_complete: int = 0  # gradients
    first_of_last: float = math.inf  # number of the first reduction of the step's last micro-batch
    is_finished: bool = False
    # -- the micro-batch
    number: int = 0
    is_last: bool = False
    reduces: bool = False
    next_group: int = 0  # to be reduced


class GradientReducer:
    """Completes the groups' gradients of a micro-batch, and starts and finishes their reductions.

    A group is reduced when its own gradients and those of all groups before it are complete, so ranks whose graphs
    differ (unused parameters, data-dependent branches) still issue the same collectives.

    Args:
        groups: the groups with trained parameters, in the order in which backward is expected to complete them.
        exchange: sends the gradients of each micro-batch; None: only a rank's sum over its micro-batches is reduced.
        noise: of the sums that are rounded.
        completes_early: whether sums over replicas start during the last backward, at the cost of waits there; all
            ranks must then mark the same micro-batch as the last.

    Attributes:
        groups, exchange: see above.
        monitor: records whether the gradients are finite.
        step: the counters of this step, or of the last one until a new one begins.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        exchange: GradientExchange | None,
        noise: StepNoise | None = None,
        *,
        completes_early: bool = False,
    ) -> None:
        self.groups = groups
        self.exchange = exchange
        self._noise = noise
        # number of each group's first parameter in the order of backward
        first_numbers = list(accumulate((group.num_trained for group in groups), initial=0))
        self._first_numbers = dict(zip(groups, first_numbers, strict=False))
        self.monitor = GradientMonitor(first_numbers[-1])
        self._gradients = [buffer.gradient for group in groups for buffer in group.buffers]
        self._completes_early = completes_early
        self.step = ReducedStep(is_finished=True)
        self._num_started = 0  # reductions of all steps
        self._in_flight: deque[FlatGradient] = deque()

    def begin_micro_batch(self, weight: Weight, *, number: int, last: bool, step: int = 1) -> None:
        """Begins micro-batch ``number`` of ``step`` with ``weight``; accumulated sums are reduced in the last one."""
        if self._noise is not None:
            self._noise.begin(step)
        is_first = self.step.is_finished
        reduced = ReducedStep() if is_first else self.step
        if last:
            reduced.first_of_last = self._num_started
        reduces = last or self.exchange is not None
        self.step = replace(reduced, number=number, is_last=last, reduces=reduces, next_group=0)
        if self.exchange is not None:
            self.exchange.begin(weight.value)
        for group in self.groups:
            group.begin_micro_batch(weight, is_first=is_first)

    def receive(self, group: ParameterGroup, grads: Sequence[tuple[int, Tensor]]) -> None:
        """Records ``grads`` of ``group``, pairs of number and gradient, and reduces the groups that may start."""
        first, monitor = self._first_numbers[group], self.monitor
        monitor.receive(*[first + number for number, _ in grads])
        if monitor.records_magnitude or monitor.magnitudes is not None:
            for number, grad in grads:  # the gradients themselves, before weights, rounding and sums
                monitor.record_magnitude(first + number, grad)
        if monitor.keeps_sums:  # now, while they are in the cache
            is_whole = len(grads) == group.num_trained
            if not (is_whole and monitor.are_finite([one.gradient.sending.buffer for one in group.buffers])):
                for number, _ in grads:
                    for part in group.parts(number):
                        monitor.record_finiteness(self.step.number, first + number, part)
        if not group.num_missing:
            self._complete(group)
        # the next in the fixed order, not the one just completed: other ranks may complete others first
        step = self.step
        while step.reduces and step.next_group < len(self.groups) and self.groups[step.next_group].is_complete:
            self._reduce_next()

    def end_micro_batch(self) -> None:
        """Reduces the groups that backward left incomplete; missing gradients are zero."""
        for group in self.groups:
            if not group.is_complete:
                self._complete(group)
        while self.step.reduces and self.step.next_group < len(self.groups):
            self._reduce_next()

    def _complete(self, group: ParameterGroup) -> None:
        group.complete()
        number = self._first_numbers[group]
        for buffer in group.buffers if self.monitor.found is not None else ():
            parts = [buffer.gradient.sending.parts(slot) for slot in range(len(buffer.layout.slots))[::-1]]
            self.monitor.search(self.step.number, [(n, part) for n, own in enumerate(parts, number) for part in own])
            number += len(parts)

    def _reduce_next(self) -> None:
        for buffer in self.groups[self.step.next_group].buffers:
            # by numbers that are equal on all ranks, so all wait for the same ones here
            oldest = -1 if self.exchange is None else self.exchange.finish_first()
            while self._in_flight and self._num_started - len(self._in_flight) <= oldest:
                self._finish_oldest()
            buffer.gradient.reduce()
            self._in_flight.append(buffer.gradient)
            self._num_started += 1
            while self._completes_early and self.step.is_last and len(self._in_flight) > _IN_FLIGHT:
                self._finish_oldest()  # so that its sum over the replicas starts
        self.step.next_group += 1

    def _finish_oldest(self) -> None:
        number = self._num_started - len(self._in_flight)
        gradient = self._in_flight.popleft()
        weights = gradient.finish_reduction(is_last=self.step.is_last)
        if weights is not None and number % len(self._gradients) == 0:  # the same for all gradients of a micro-batch
            self.step.weights.append(weights)
        if self._completes_early and number >= self.step.first_of_last:
            gradient.complete()
            self.step.num_complete += 1

    def finish(self) -> None:
        """Completes the main grads of this step; a second call does nothing."""
        step = self.step
        if step.is_finished:
            return
        step.is_finished = True
        if not step.reduces:  # the batch ended early, so no micro-batch was marked as the last
            step.reduces = True
            self.end_micro_batch()
        while self._in_flight:
            self._finish_oldest()
        for gradient in self._gradients[step.num_complete :]:
            gradient.complete()
        # all are started before the first wait, which sends their ready messages together
        gathers = [gradient.start_gather() for gradient in self._gradients]
        for handle in gathers:
            if handle is not None:
                handle.wait()
