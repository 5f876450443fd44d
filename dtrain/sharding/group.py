"""A parameter group: the unit of sharding and communication, which owns its tensors on this rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import ref

from torch import Tensor, nn

from dtrain.checkpoint.snapshot import TensorShard
from dtrain.errors import UsageError
from dtrain.optim.average import EMA
from dtrain.optim.matrix import MatrixShard
from dtrain.optim.rule import MatrixRule, UpdateSlice
from dtrain.parameters.compute_shard import ALL_OWNERS, COMPUTE, ComputeShard
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.parameters.optimizer_plan import OptimizerPlan
from dtrain.parameters.running_backward import require_running
from dtrain.parameters.user_hooks import hook_last
from dtrain.precision.float8.cast import E4M3
from dtrain.precision.remainder import Numbers, RemainderPair, read
from dtrain.sharding.gradients import FlatGradient, Sending
from dtrain.sharding.layout import ArenaSegment, FlatLayout, ShardInterval
from dtrain.sharding.offload import ReplicaStaging
from dtrain.sharding.replicas import Replica

MASTER, MAIN_GRAD = "master", "main_grad"


@dataclass(frozen=True)
class HeldRange:
    """Elements ``start`` to ``start + len(values)`` of a segment, which this rank holds in ``values``."""

    start: int
    values: Numbers


@dataclass(frozen=True)
class FlatBuffer:
    """The trained parameters of one group with one replica dtype.

    Attributes:
        segment: the range of the flat buffer whose masters this rank holds.
        replica: the compute replica.
        master: FP32 [segment.numel]; an FP32 replica is its storage, a BF16 replica may be a half of it.
        states: the optimizer's states by name, of the parameters that have them.
        gradient: the gradient; its main grad is [segment.numel].
        staging: if master, states and main grad lie in the host's memory: what the replica is copied from.
    """

    segment: ArenaSegment
    replica: Replica
    master: Numbers
    states: Mapping[str, HeldRange]
    gradient: FlatGradient
    staging: ReplicaStaging | None = None

    @property
    def layout(self) -> FlatLayout:
        return self.segment.layout

    def update_slices(self, plan: OptimizerPlan) -> list[UpdateSlice]:
        """Returns the segment, cut where the update class changes."""
        return [self._slice(plan, number, start, stop) for number, start, stop in self.segment.class_ranges()]

    def matrix_shards(self, plan: OptimizerPlan) -> Iterator[MatrixShard]:
        """Yields what this rank holds of the parameters whose rule needs whole matrices."""
        for interval in self.segment.intervals():
            spec, low = interval.spec, interval.offset
            if isinstance(plan.rule_of(spec.update_class), MatrixRule):
                part = self._slice(plan, spec.update_class, low, low + interval.stop - interval.start)
                yield MatrixShard(spec.name, spec.shape, interval.start, part)

    def _slice(self, plan: OptimizerPlan, number: int, start: int, stop: int) -> UpdateSlice:
        """Returns elements ``start`` to ``stop`` of the segment, of update class ``number``."""
        key = zlib.crc32(self.layout.name.encode())  # equal at every stage and world size, as the offsets are
        return UpdateSlice(
            plan.classes[number],
            origin=(key, self.segment.start + start),
            master=self.master[start:stop],
            main_grad=self.gradient.main_grad[start:stop],
            states=tuple(self._state(spec.name, start, stop) for spec in plan.rule_of(number).states),
            replica=None if self._cast_target is None else self._cast_target[start:stop],
            average=self._state(EMA.name, start, stop) if EMA.name in self.states else None,
            parameters=self.segment.ranges(start, stop),
        )

    def _state(self, kind: str, start: int, stop: int) -> Tensor:
        held = self.states[kind]
        values = held.values[start - held.start : stop - held.start]
        assert isinstance(values, Tensor)
        return values

    @property
    def _cast_target(self) -> Tensor | None:
        """The replica to which the update casts; None for FP8, cast after it, and if it is the master's storage."""
        if self.staging is not None:
            return self.staging.view(self.segment.numel, self.layout.dtype)
        return None if self.layout.dtype == E4M3 or self.shares_replica else self.replica.local[0]

    @property
    def shares_replica(self) -> bool:
        """Whether the replica is the master's storage, or a half of it, so that it is written with the master."""
        return self.replica.shares_master or isinstance(self.master, RemainderPair)

    def cast_master(self) -> None:
        if self._cast_target is not None:
            self._cast_target.copy_(read(self.master))

    def compute_shards(self, rank: int, sources: Sequence[Numbers], *, by_owner: bool) -> Iterator[ComputeShard]:
        """Yields the compute replica between steps; no part that is a master.

        Args:
            rank: this one.
            sources: what the copies of the replica are cast from, each of the segment's length.
            by_owner: cut what all ranks hold where another rank's master begins; else it is whole, and this rank's own
                part, with its source, follows.
        """
        replica, layout = self.replica, self.layout
        ranges = [] if self.shares_replica else [(rank, self.segment.start, self.segment.stop)]
        if replica.is_gathered and by_owner:
            ranges = [(owner, *layout.shard(owner)) for owner in range(layout.world_size)]
        elif replica.is_gathered:
            ranges = [(ALL_OWNERS, 0, layout.numel), *ranges]
        wholes = replica.copies if replica.is_gathered else replica.local
        for number, (whole, source) in enumerate(zip(wholes, sources, strict=True)):
            for owner, low, high in ranges:
                values = whole[low:high] if replica.is_gathered else whole
                has_source = owner == rank and not self.shares_replica
                for interval in layout.intervals(low, high):
                    own = slice(interval.offset, interval.offset + interval.stop - interval.start)
                    yield ComputeShard(
                        interval.spec.name,
                        f"{COMPUTE} (columns)" if number else COMPUTE,
                        interval.start,
                        values[own],
                        owner,
                        read(source[own]) if has_source else None,
                        replica.is_gathered and (by_owner or owner == ALL_OWNERS),
                        self.shares_replica,
                    )

    def held(self, kind: str) -> HeldRange:
        """Returns what this rank holds of the master, the main grad or a state."""
        if kind in (MASTER, MAIN_GRAD):
            return HeldRange(0, self.master if kind == MASTER else self.gradient.main_grad)
        return self.states[kind]

    def local_shards(self, kind: str) -> Iterator[TensorShard]:
        """Yields all of ``kind`` that lies on this rank."""
        return self._shards(kind, self.segment.start, self.segment.stop)

    def owned_shards(self, kind: str, rank: int) -> Iterator[TensorShard]:
        """Yields the shard that ``rank`` saves, so that all ranks cover each element once at every stage."""
        return self._shards(kind, *self.layout.shard(rank))

    def _shards(self, kind: str, start: int, stop: int) -> Iterator[TensorShard]:
        """Yields ``kind`` of the parameters between ``start`` and ``stop`` of the flat buffer."""
        held = self.held(kind)
        first = self.segment.start + held.start
        low, high = max(start, first), min(stop, first + held.values.numel())
        for interval in self.layout.intervals(low, high):
            yield tensor_shard(kind, interval, held.values[low - first :])


def tensor_shard(kind: str, interval: ShardInterval, values: Numbers) -> TensorShard:
    """Returns ``interval``, whose offset counts from the beginning of ``values``."""
    spec, own = interval.spec, values[interval.offset : interval.offset + interval.stop - interval.start]
    return TensorShard(spec.name, kind, spec.shape, own.dtype, interval.start, interval.stop, own)


_MAX_WAITING = 1 << 16
"""A group's gradients are taken once they have this many elements, which still lie in a core's cache."""


class GradientListener(Protocol):
    """The method of ``dtrain.sharding.model.ShardedModel`` that a group calls."""

    def gradients_taken(self, group: ParameterGroup, grads: Sequence[tuple[int, Tensor]]) -> None:
        """Follows up on ``grads``, which ``group`` has taken, each with the number of its trained parameter."""


class ParameterGroup:
    """The parameters of one unit of sharding, or of the root group, with all their tensors on this rank.

    Args:
        name: name of the unit's module; empty for the root group.
        buffers: its trained parameters.
        frozen: compute replicas of its frozen parameters, if these are sharded.

    Attributes:
        replicas: those of ``buffers``, then ``frozen``.
        takes_gradients: whether a backward of the engine is running; [Note: another engine's backward].
        is_complete: whether the gradient of this micro-batch is complete, with zeros for what was missing.
        num_forwards: forwards of the unit that are running.
        is_unsharding: whether the all-gather of the replicas has started, or is done.
        is_ready: whether the replicas are unsharded.
    """

    def __init__(self, name: str, buffers: Sequence[FlatBuffer], frozen: Sequence[Replica]) -> None:
        self.name = name
        self.buffers = buffers
        self.replicas = [*(buffer.replica for buffer in buffers), *frozen]
        # (sending, slot) of each trained parameter by its number; backward is expected to reach the last slot first
        self._slots = [(one.gradient.sending, n) for one in buffers for n in range(len(one.layout.slots))[::-1]]
        self._missing: set[int] = set()
        self._waiting: list[tuple[int, Tensor]] = []  # gradients of this micro-batch, with their numbers
        self._num_waiting = 0  # elements
        self._listener: Callable[[], GradientListener | None] = lambda: None
        self._weight: Weight | None = None  # of the micro-batch
        self._is_first = True  # of the step's micro-batches
        self.takes_gradients = False
        self.is_complete = True
        self.num_forwards = 0
        self.is_unsharding = False
        self.is_ready = False

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for replica in self.replicas for name, p in replica.views.parameters.items()}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name, in the order of their numbers."""
        return {name: p for buffer in self.buffers for name, p in reversed(buffer.replica.views.parameters.items())}

    @property
    def num_trained(self) -> int:
        return len(self._slots)

    # -- replicas: only sharded ones are unsharded and resharded -----------------------------------------------------

    @property
    def may_be_read(self) -> bool:
        """Whether the forward may read the parameters.

        A unit's may be read only while its own forward runs, even if prefetch or a previous use has unsharded them.
        """
        return self.is_ready and (not self.name or self.num_forwards > 0)

    def start_unshard(self) -> None:
        """Starts the all-gathers of the replicas, once; all ranks call in the same order."""
        if not self.is_unsharding:
            self.is_unsharding = True
            for replica in self.replicas:
                replica.start_unshard()

    def unshard(self) -> None:
        """Makes the parameters readable; waits for the all-gathers."""
        self.start_unshard()  # if no prefetch has
        if not self.is_ready:
            self.is_ready = True
            for replica in self.replicas:
                replica.unshard()

    def reshard(self) -> None:
        """Frees the unsharded replicas."""
        self.is_unsharding = self.is_ready = False
        for replica in self.replicas:
            replica.reshard()

    # -- gradients ---------------------------------------------------------------------------------------------------

    @property
    def num_missing(self) -> int:
        """Number of trained parameters that have given no gradient in this micro-batch."""
        return len(self._missing)

    def install_hooks(self, listener: GradientListener) -> None:
        """Takes the parameters' gradients from now on; ``listener`` is called after each batch of them."""
        # a parameter that refers to its group would be a cycle, which frees late
        own, self._listener = ref(self), ref(listener)

        def install(number: int, name: str, parameter: nn.Parameter) -> None:
            def on_gradient(parameter: Tensor) -> None:
                group = own()
                grad, parameter.grad = parameter.grad, None  # else autograd would add the next one to it
                if group is None or not group.takes_gradients:
                    require_running(name)
                elif grad is not None:  # a user's autograd function may return None; the gradient is then zero
                    group.accumulate(number, grad)

            hook_last(parameter, on_gradient)

        for number, (name, parameter) in enumerate(self.trained.items()):
            install(number, name, parameter)

    def begin_micro_batch(self, weight: Weight, *, is_first: bool) -> None:
        """Begins a micro-batch with ``weight``, the step's first or a later one."""
        self._weight, self._is_first = weight, is_first
        self._missing = set(range(len(self._slots)))
        self._waiting, self._num_waiting = [], 0  # a failed backward may have left some
        self.is_complete = False

    def accumulate(self, number: int, grad: Tensor) -> None:
        """Takes the gradient of trained parameter ``number`` from this micro-batch, small ones several at a time.

        Raises:
            UsageError: the parameter has given a gradient in this micro-batch before.
        """
        if number not in self._missing:
            name = list(self.trained)[number]
            raise UsageError(
                f"'{name}' got a second gradient in one micro-batch; reentrant activation checkpointing does this, use "
                f"torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        self._missing.discard(number)
        self._waiting.append((number, grad))
        self._num_waiting += grad.numel()
        if not self._missing or self._num_waiting >= _MAX_WAITING:
            self.take_waiting()

    def take_waiting(self) -> None:
        """Takes the gradients that wait, with one call for each flat buffer."""
        taken, self._waiting, self._num_waiting = self._waiting, [], 0
        if not taken:
            return
        assert self._weight is not None
        received: dict[Sending, tuple[list[int], list[Tensor]]] = {}
        for number, grad in taken:
            sending, slot = self._slots[number]
            slots, grads = received.setdefault(sending, ([], []))
            slots.append(slot)
            grads.append(grad)
        for sending, (slots, grads) in received.items():
            sending.receive(slots, grads, self._weight, is_first=self._is_first)
        if (listener := self._listener()) is not None:
            listener.gradients_taken(self, taken)

    def parts(self, number: int) -> Sequence[Tensor]:
        """Returns the gradient of trained parameter ``number`` as it is reduced, in one part or several."""
        sending, slot = self._slots[number]
        return sending.parts(slot)

    def complete(self) -> None:
        """Takes what waits, and zeros for the missing gradients."""
        self.take_waiting()
        for sending, slot in (self._slots[number] for number in self._missing):
            sending.receive_zeros(slot, is_first=self._is_first)
        self.is_complete = True
