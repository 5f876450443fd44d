"""Collectives of CPU ranks over gloo, each of which the ranks agree on first.

[Note: agreed collectives] A rank starts a collective of gloo only after all ranks have sent the message that belongs to
it, for the reason in ``transport.messages``. It sends its own message when the collective is issued. If those of the
others have not come by then, it starts the collective in a later call of the communicator, at the latest in the wait.
So reductions still overlap backward. A small row needs no collective, because it fits into a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.distributed import processes
from dtrain.distributed.communicator import Handle
from dtrain.distributed.schedule import Collective, CollectiveSchedule
from dtrain.distributed.transport.connections import Connections
from dtrain.distributed.transport.messages import MAX_PAYLOAD_BYTES, Message
from dtrain.distributed.transport.own_groups import end_connections
from dtrain.distributed.transport.pipes import Pipes
from dtrain.distributed.transport.process_group import Choose, ProcessGroup
from dtrain.distributed.transport.shared_memory import try_on_every_rank
from dtrain.distributed.transport.sockets import Sockets
from dtrain.errors import CommunicationError, DtrainError


class GlooGroup(ProcessGroup):
    """Collectives over ``group``, whose ranks are on CPUs; all its ranks call.

    Args:
        group: two or more ranks.
        device: the CPU.
        choose: makes the communicators of the axes and the sibling.
        schedule: shared with the communicators of other axes; None: a new one.
        messages: of another communicator over ``group``; None: new connections.

    Attributes:
        messages: the connections for the messages.

    Raises:
        CommunicationError: the ranks of ``group`` have failed before, or cannot connect to each other.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        choose: Choose,
        schedule: CollectiveSchedule | None = None,
        messages: Connections | None = None,
    ) -> None:
        _require_open(group)
        super().__init__(group, device, choose, schedule)
        self.messages = messages or self._open_connections(group, device)
        self._to_start: deque[_AgreedWork] = deque()  # not started yet, in their order
        self.schedule.transports.add(self)

    def _open_connections(self, group: dist.ProcessGroup, device: torch.device) -> Connections:
        # nothing can be agreed on yet; not in the shared schedule, because the groups of an axis may differ in the
        # kinds of connections that they try
        exchange_text = ProcessGroup(group, device, self._choose).exchange_text
        hosts, reason = try_on_every_rank(processes.host_identity, exchange_text)
        is_one_host = not reason and hosts[0] is not None and all(host == hosts[0] for host in hosts)
        for kind in (Pipes, Sockets) if is_one_host else (Sockets,):
            timeout = group._get_backend(device).options._timeout
            connections = kind(self.rank, self.world_size, timeout, self.ranks)
            connections.open(exchange_text)
            reason = connections.unsupported_reason
            if not reason:
                return connections
        raise CommunicationError(
            f"the ranks cannot connect to each other as gloo does ({reason}); set GLOO_SOCKET_IFNAME to the network "
            "interface that connects their hosts"
        )

    def _gather(self, what: Collective, row: Tensor) -> Tensor:
        if not 0 < row.nbytes <= MAX_PAYLOAD_BYTES:
            return super()._gather(what, row)
        self.flush()
        payload = row.detach().contiguous().view(torch.uint8).numpy().tobytes()
        with self.waiting(what):
            # without the order so far: the vote, a row too, compares it and names the first collective that differs
            payloads = self.messages.receive(self.messages.send(Collective(0, what.entry), payload))
        return torch.frombuffer(bytearray().join(payloads), dtype=row.dtype).view(self.world_size, row.numel())

    def agree(self, op: str, label: str, tensor: Tensor) -> None:
        what = self.schedule.record(op, label, tensor)
        self.flush()
        with self.waiting(what):
            message = self.messages.send(what)
            while self._to_start:  # gloo matches the library's collectives with these by their order
                self._start_next()
            self.messages.receive(message)

    def _call(self, what: Collective, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._start(what, collective, *args, **kwargs).wait()

    def _start(self, what: Collective, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Handle:
        self.flush()  # before its message, because messages are matched by their order
        with self.waiting(what):
            message = self.messages.send(what)
            start = lambda: collective(*args, group=self.process_group, async_op=True, **kwargs)  # noqa: E731
            handle = _AgreedWork(self, what, message, start)
            self._to_start.append(handle)
            while self._to_start and self.messages.has_arrived(self._to_start[0].message):
                self._start_next()
        return handle

    def require_started(self, handle: _AgreedWork) -> None:
        """Waits until all ranks have agreed on the collective of ``handle``, and starts it."""
        while handle in self._to_start:
            self._start_next()

    def _start_next(self) -> None:
        self.messages.receive(self._to_start[0].message)
        self._to_start[0].start()
        self._to_start.popleft()

    def release(self) -> None:
        super().release()
        self.messages.release()

    def close_failed(self, failure: DtrainError) -> None:
        self.messages.close_failed(failure)
        if self.process_group is not None:
            _failures[self.process_group] = failure
            end_connections(self.process_group)

    def failure_of_others(self) -> DtrainError | None:
        return self.messages.failure_of_others()

    def ended_ranks(self) -> set[int]:
        if self.process_group is None:
            return set()
        return {self.ranks[rank] for rank in self.messages.ended_ranks()}


class _AgreedWork:
    """A collective of gloo: [Note: agreed collectives]."""

    def __init__(self, comm: GlooGroup, what: Collective, message: Message, start: Callable[[], Any]) -> None:
        self._comm = comm
        self._what = what
        self.message = message
        self._start: Callable[[], Any] | None = start
        self._work: Any = None
        self._is_done = False

    def start(self) -> None:
        """Starts it; all ranks have agreed on it."""
        assert self._start is not None
        self._work, self._start = self._start(), None

    def wait(self) -> None:
        self._comm.schedule.require_working()
        if self._is_done:
            return
        self._comm.flush()
        with self._comm.waiting(self._what):
            self._comm.require_started(self)
            work, self._work, self._is_done = self._work, None, True
            work.wait()


_failures: WeakKeyDictionary[dist.ProcessGroup, DtrainError] = WeakKeyDictionary()


def _require_open(group: dist.ProcessGroup) -> None:
    """Raises ``CommunicationError`` if the connections of ``group`` were closed after a failure."""
    failure = _failures.get(group)
    if failure is not None:
        raise CommunicationError(
            f"the process group was closed when its ranks failed, so start the processes again; the failure: {failure}"
        )
