"""Collectives of CPU ranks over gloo, each of which the ranks agree on first.

[Note: agreed collectives] A rank starts a collective of gloo only after all ranks have sent the message that belongs to
it, for the reason in ``distributed.messages``. No rank waits for that when it issues the collective: it starts what all
have agreed on in its next call of the communicator, at the latest in the wait, so reductions still overlap backward.
One message stands for several collectives if it goes through gloo, where it costs as much as a collective. All ranks
send it at the same point: before the first of these is waited for, or by number and size. A small row needs no
collective, because it fits into a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.distributed.communicator import Handle
from dtrain.distributed.messages import (
    MESSAGE_BYTES,
    MESSAGE_ENTRIES,
    GlooMessages,
    Message,
    Messages,
    close_connections,
    require_open,
)
from dtrain.distributed.process_group import ProcessGroup
from dtrain.distributed.schedule import Collective, CollectiveSchedule
from dtrain.errors import DtrainError


class GlooGroup(ProcessGroup):
    """Collectives over ``group``, whose ranks are on CPUs.

    Args:
        group: two or more ranks.
        device: the CPU.
        schedule: shared with the communicators of other axes; None: a new one.

    Attributes:
        messages: those that belong to the collectives.

    Raises:
        CommunicationError: the ranks of ``group`` have failed before.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, schedule: CollectiveSchedule | None = None
    ) -> None:
        require_open(group)
        super().__init__(group, device, schedule)
        self.messages: Messages = GlooMessages(group)
        self._to_start: deque[_AgreedWork] = deque()  # not started yet, in their order
        self._unsent: list[_AgreedWork] = []  # the last of them, without a message
        self.schedule.transports.add(self)

    def gather_rows(self, row: Tensor, *, label: str) -> Tensor:
        if not 0 < row.nbytes <= self.messages.max_payload_bytes:
            return super().gather_rows(row, label=label)
        what = self.schedule.record("gather_rows", label, row)
        self.flush()
        payload = row.detach().contiguous().view(torch.uint8).numpy().tobytes()
        with self.waiting(what):
            payloads = self.messages.receive(self.messages.send(what, payload))
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
        self._start(what, collective, *args, **kwargs).wait()

    def _start(self, what: Collective, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Handle:
        if not self.messages.batches:
            self.flush()  # before its message, because messages are matched by their order
        handle = _AgreedWork(self, what, lambda: collective(*args, group=self.process_group, async_op=True, **kwargs))
        self._to_start.append(handle)
        self._unsent.append(handle)
        total = sum(other.what.nbytes for other in self._unsent)
        # by number and sizes, which are equal on all ranks, so that all send at the same point
        if not self.messages.batches or len(self._unsent) == MESSAGE_ENTRIES or total >= MESSAGE_BYTES:
            self._send_message()
        with self.waiting(what):
            self._start_agreed()
        return handle

    def flush(self) -> None:
        if self._unsent:
            self._send_message()

    def _send_message(self) -> None:
        unsent, self._unsent = self._unsent, []
        what = unsent[-1].what.joined(unsent[0].what)
        with self.waiting(what):
            message = self.messages.send(what)
        for handle in unsent:
            handle.message = message

    def _start_agreed(self) -> None:
        """Starts the collectives that all ranks have agreed on, in their order."""
        while self._to_start:
            message = self._to_start[0].message
            if message is None or not self.messages.has_arrived(message):
                return
            self._start_next()

    def require_started(self, handle: _AgreedWork) -> None:
        """Waits until all ranks have agreed on the collective of ``handle``, and starts it."""
        while handle in self._to_start:
            self._start_next()

    def _start_next(self) -> None:
        self._to_start[0].start()
        self._to_start.popleft()

    def release(self) -> None:
        super().release()
        self.messages.release()

    def close_failed(self, failure: DtrainError) -> None:
        self.messages.close_failed(failure)
        if self.process_group is not None:
            close_connections(self.process_group, failure)

    def failure_of_others(self) -> DtrainError | None:
        return self.messages.failure_of_others()


class _AgreedWork:
    """A collective of gloo: [Note: agreed collectives]."""

    def __init__(self, comm: GlooGroup, what: Collective, start: Callable[[], Any]) -> None:
        self._comm = comm
        self.what = what
        self.message: Message | None = None  # until it is sent
        self._start: Callable[[], Any] | None = start
        self._work: Any = None
        self._is_done = False

    def start(self) -> None:
        assert self._start is not None
        assert self.message is not None
        self._comm.messages.receive(self.message)
        self._work, self._start = self._start(), None

    def wait(self) -> None:
        if self._is_done:
            self._comm.schedule.require_working()
            return
        self._comm.schedule.require_working()
        self._comm.flush()
        with self._comm.waiting(self.what):
            self._comm.require_started(self)
            work, self._work, self._is_done = self._work, None, True
            work.wait()
