"""Collectives of a fake process group, recorded; and a check that each is waited for before its buffers are used.

torch's fake backend answers at once. Here an asynchronous collective is in flight until its ``wait``: an operation that
reads what it writes, or writes what it reads or writes, raises ``MissingWait``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtrain.distributed.communicator import Communicator
from dtrain.distributed.schedule import CollectiveSchedule
from dtrain.distributed.transport import process_group
from dtrain.distributed.transport.choose import make_communicator
from dtrain.distributed.transport.process_group import ProcessGroup
from dtrain.distributed.transport.single_rank import SingleRank
from tests.fake.device import DEVICE, QuickMode


class MissingWait(AssertionError):
    """A buffer of a collective in flight was used, or the collective was never waited for."""


class Collective(NamedTuple):
    """One entry of the schedule: as ``CollectiveSchedule.record`` got it."""

    op: str
    label: str
    numel: int
    dtype: torch.dtype


class _Range(NamedTuple):
    """Bytes ``start`` to ``stop`` that a tensor lies in."""

    start: int
    stop: int

    @staticmethod
    def of(tensor: Tensor) -> _Range:
        start = tensor.data_ptr()
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return _Range(start, start + (extent + 1) * tensor.itemsize if tensor.numel() else start)

    def overlaps(self, other: _Range) -> bool:
        return self.start < other.stop and other.start < self.stop


class _Work:
    """An asynchronous collective until it is waited for."""

    def __init__(self, name: str, written: Tensor, read: Tensor, in_flight: list[_Work]) -> None:
        self.name = f"{name} of {written.numel()} x {written.dtype}"
        self.written, self.read = _Range.of(written), _Range.of(read)
        self._kept = (written, read)  # their memory is not given to others meanwhile
        self._in_flight = in_flight
        in_flight.append(self)

    def wait(self, timeout: Any = None) -> bool:
        if self in self._in_flight:
            self._in_flight.remove(self)
        return True

    def is_completed(self) -> bool:
        return self not in self._in_flight


class _Watch(QuickMode):
    """Compares the memory of each operation with that of the collectives in flight."""

    def __init__(self, in_flight: list[_Work]) -> None:
        super().__init__()
        self._in_flight = in_flight

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._in_flight and not touches_no_values(func):
            values = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
            for argument in func._schema.arguments:
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in _tensors(values.get(argument.name)):
                    _require_idle(self._in_flight, str(func), _Range.of(tensor), is_written)
        if func.overloadpacket is torch.ops.aten._fused_adamw_:  # has no kernel for tensors without values
            return None
        return func(*args, **(kwargs or {}))


def _require_idle(in_flight: Sequence[_Work], name: str, used: _Range, is_written: bool) -> None:
    for work in in_flight:
        if used.overlaps(work.written) or (is_written and used.overlaps(work.read)):
            verb = "writes" if is_written else "reads"
            raise MissingWait(f"{name} {verb} a buffer of {work.name}, which is in flight; wait for it first")


def touches_no_values(func: Any) -> bool:
    """Whether ``func`` reads and writes no element: a view, an allocation, or a question about a tensor."""
    returns = [value.alias_info for value in func._schema.returns]
    shares = any(alias is not None and not alias.is_write for alias in returns)
    return shares or func.namespace in ("prim", "c10d") or func.overloadpacket.__name__ in _ALLOCATIONS


_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "_unsafe_view"}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield from (item for item in value if isinstance(item, Tensor))


class Collectives:
    """Records the ranks' collectives.

    Attributes:
        issued: those that the communicator recorded, in their order.
        sent: functions of those that reached the backend.
        in_flight: asynchronous ones that were not waited for.
    """

    def __init__(self) -> None:
        self.issued: list[Collective] = []
        self.sent: list[str] = []
        self.in_flight: list[_Work] = []

    def clear(self) -> None:
        self.issued.clear()
        self.sent.clear()

    def require_waited(self) -> None:
        """Raises ``MissingWait`` if a collective is in flight."""
        if self.in_flight:
            raise MissingWait(f"not waited for before the vote: {', '.join(work.name for work in self.in_flight)}")

    def require_idle(self, name: str, used: Tensor | int) -> None:
        """Raises ``MissingWait`` if a collective in flight writes the tensor or address that kernel ``name`` uses."""
        place = _Range(used, used + 1) if isinstance(used, int) else _Range.of(used)
        _require_idle(self.in_flight, name, place, False)

    def replaced(self, name: str, function: Callable[..., Any], scale: tuple[int, int]) -> Callable[..., Any]:
        """Returns ``function``, recorded; its output and input have sizes in the ratio ``scale``: 0 is the ranks."""

        def collective(output: Tensor, *inputs: Any, async_op: bool = False, **kwargs: Any) -> Any:
            source = inputs[0] if inputs and isinstance(inputs[0], Tensor) else output
            for tensor in (output, source):
                assert tensor.device == DEVICE, f"{name} of a tensor on {tensor.device}"
                assert tensor.is_contiguous(), f"{name} of a tensor with strides {tensor.stride()}"
            assert output.dtype == source.dtype, f"{name} of {source.dtype} into {output.dtype}"
            whole = dist.get_world_size(kwargs.get("group"))
            sizes = (output.numel() * (scale[1] or whole), source.numel() * (scale[0] or whole))
            if splits := [value for value in inputs[1:] if isinstance(value, list)]:  # of an uneven all-to-all
                assert sizes == tuple(map(sum, splits)), f"{name}: {splits} of {source.shape} to {output.shape}"
            else:
                assert sizes[0] == sizes[1], f"{name}: {source.shape} to {output.shape}"
            if output is not source and name != "all_gather":  # whose input may lie in its own place
                assert not _Range.of(output).overlaps(_Range.of(source)) or name == "reduce_scatter"
            self.sent.append(name)
            function(output, *inputs, async_op=False, **kwargs)  # torch's own checks
            return _Work(name, output, source, self.in_flight) if async_op else None

        return collective


class RecordingSchedule(CollectiveSchedule):
    def __init__(self, collectives: Collectives) -> None:
        super().__init__()
        self._collectives = collectives

    def record(self, op: str, label: str, tensor: Tensor) -> str:
        self._collectives.issued.append(Collective(op, label, tensor.numel(), tensor.dtype))
        if label == "vote":  # [Note: buffer reuse] in dtrain.distributed.communicator
            self._collectives.require_waited()
        return super().record(op, label, tensor)


class FakeRanks(ProcessGroup):
    """The communicator of one rank among many that do what it does."""

    def exchange_text(self, text: str) -> list[str]:
        """Returns the text of every rank: set-up reads it on the host, and all ranks say the same here."""
        return [text] * self.world_size


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[tuple[Communicator, Collectives]]:
    """Inside, this process is one rank of ``world_size``; to be entered inside ``tests.fake.device.fake_cuda``."""
    found = Collectives()
    shards, whole = 1, 0
    replaced = [
        (process_group, "all_gather_single", "all_gather", (whole, shards)),
        (process_group, "reduce_scatter_single", "reduce_scatter", (shards, whole)),
        (dist, "all_to_all_single", "all_to_all", (1, 1)),
        (dist, "all_reduce", "all_reduce", (1, 1)),
        (dist, "broadcast", "broadcast", (1, 1)),
    ]
    with contextlib.ExitStack() as stack:
        schedule = RecordingSchedule(found)
        comm: Communicator = SingleRank(DEVICE, schedule)
        if world_size > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
            stack.callback(dist.destroy_process_group)
            assert dist.group.WORLD is not None
            comm = FakeRanks(dist.group.WORLD, DEVICE, make_communicator, schedule)
        for module, name, op, scale in replaced:
            stack.enter_context(mock.patch.object(module, name, found.replaced(op, getattr(module, name), scale)))
        stack.enter_context(_Watch(found.in_flight))
        yield comm, found
