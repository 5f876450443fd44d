"""Small messages that precede or carry a collective of CPU ranks: their format, and their way through gloo.

gloo matches collectives by their order alone. Two of one kind and different sizes end the process (an exception in
gloo's own thread), or fill only a part of the receiver's buffer; two of different kinds wait for each other until the
time-out. So the ranks send a message with the collective's number, hash and name first, and no rank starts the
collective before it has received the same message from all.
"""

from __future__ import annotations

import struct
from collections import deque
from contextlib import suppress
from datetime import timedelta
from select import PIPE_BUF
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from dtrain.distributed.schedule import Collective
from dtrain.errors import CommunicationError, DivergenceError, DtrainError

_NAME_BYTES = 180
HEADER = struct.Struct(f"<qqqI{_NAME_BYTES}s")  # number of the message, number and hash of the collective, bytes, name
MAX_PAYLOAD_BYTES = PIPE_BUF - HEADER.size  # longer writes to a pipe are not atomic
MESSAGE_BYTES = 16 * 2**20
"""Bytes of the buffers of a message after which it is sent, although no rank waits for it yet."""
MESSAGE_ENTRIES = 16
"""Largest number of collectives of one message."""
_FAILED = -1  # instead of the number: the sender has failed; the name is that of its error
_FRAME_BYTES = 512  # of each message through gloo
_TAG = 0x64747261  # of point-to-point messages: unlikely to be a user's
_SEND_S = 1.0  # longest wait until the other ranks have this rank's last messages


class Message:
    """A message of this rank.

    Args:
        rank: rank of this process.
        number: 0, 1, ... over all messages.
        what: the collective; equal on all ranks, or they have diverged.
        payload: at most ``MAX_PAYLOAD_BYTES``, the same number on all ranks.

    Attributes:
        payloads: of all ranks, in rank order, once they are received.
    """

    def __init__(self, rank: int, number: int, what: Collective, payload: bytes) -> None:
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a message has at most {MAX_PAYLOAD_BYTES} bytes; got {len(payload)}")
        name = what.entry.encode()
        if len(name) > _NAME_BYTES:  # the end names the method
            name = name[: _NAME_BYTES - 62] + b".." + name[-60:]
        self.header = HEADER.pack(number, what.number, what.hash, len(payload), name)
        self.payload = payload
        self.payloads: list[bytes] | None = None
        self._rank = rank

    def is_complete(self, rank: int, unread: bytes | bytearray) -> bool:
        """Whether ``unread``, the bytes that ``rank`` has sent, begin with its message of this number.

        Raises:
            DivergenceError: they begin with another message.
            DtrainError: the rank has failed.
        """
        size = HEADER.size
        if len(unread) >= size and unread[:size] != self.header:  # before more bytes are waited for, which may not come
            if HEADER.unpack_from(unread)[0] != _FAILED:
                raise _divergence(*sorted([(self._rank, self.header), (rank, bytes(unread[:size]))]))
            failure = find_failure(rank, unread)
            if failure is not None:
                raise failure
            return False
        return len(unread) >= size + len(self.payload)


def _divergence(*sent: tuple[int, bytes]) -> DivergenceError:
    headers = [(rank, *HEADER.unpack(header)) for rank, header in sent]
    is_named = len({name for *_, name in headers}) > 1  # else the numbers tell what differs
    where = [
        f"rank {rank} is at {name.rstrip(bytes(1)).decode(errors='replace')}"
        + ("" if is_named else f" (number {number}, order {order:x}, {nbytes} B)")
        for rank, _, number, order, nbytes, name in headers
    ]
    return DivergenceError(
        f"the ranks have diverged: {', '.join(where)}; every rank must call the same methods of the engine in the same "
        "order, with the same number of micro-batches"
    )


def failure_message(failure: DtrainError) -> bytes:
    """Returns the message of a rank that has failed: at most a frame."""
    reason = str(failure).encode()[: _FRAME_BYTES - HEADER.size]
    return HEADER.pack(_FAILED, 0, 0, len(reason), type(failure).__name__.encode()) + reason


def find_failure(rank: int, unread: bytes | bytearray) -> DtrainError | None:
    """Returns the failure among the messages in ``unread``, which ``rank`` has sent; None if there is none."""
    start = 0
    while len(unread) >= start + HEADER.size:
        number, _, _, nbytes, name = HEADER.unpack_from(unread, start)
        start += HEADER.size
        reason = bytes(unread[start : start + nbytes]).decode(errors="replace")
        start += nbytes
        if number == _FAILED and len(unread) >= start:
            return _failure_of(rank, name.rstrip(bytes(1)).decode(), reason)
    return None


def _failure_of(rank: int, name: str, reason: str) -> DtrainError:
    if name == DivergenceError.__name__:
        return DivergenceError(reason)  # it names the ranks
    return CommunicationError(f"rank {rank} has failed, so this one ends too: {reason}")


class Messages(Protocol):
    """Messages from each rank to each other rank; every rank sends those of the same collectives in one order."""

    max_payload_bytes: int
    batches: bool  # whether one message for several collectives is cheaper than the earlier start of the first

    def send(self, what: Collective, payload: bytes = b"") -> Message:
        """Sends ``payload`` to all other ranks, as a part of ``what``."""

    def receive(self, message: Message) -> list[bytes]:
        """Returns the payloads of all ranks, in rank order, that were sent as ``message`` was."""

    def has_arrived(self, message: Message) -> bool:
        """Whether all ranks have sent it; it may wait for any but the newest message."""

    def close_failed(self, failure: DtrainError) -> None:
        """Sends ``failure`` to the other ranks and ends the connections."""

    def failure_of_others(self) -> DtrainError | None:
        """Returns the failure that another rank has sent, if any has."""

    def release(self) -> None:
        """Ends the use; nothing may be in flight."""


class GlooMessages(Messages):
    """Messages through gloo: point to point and all of one size, so that any two of them can meet.

    Args:
        group: two or more ranks.
    """

    max_payload_bytes = _FRAME_BYTES - HEADER.size
    batches = True
    _is_closed = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = ref(group)  # its threads end with its last reference
        self._rank = dist.get_rank(group)
        self._others = [rank for rank in range(dist.get_world_size(group)) if rank != self._rank]
        self._num_sent = 0
        self._in_flight: deque[tuple[Message, list[tuple[int, Tensor, Any, Any]]]] = deque()

    def send(self, what: Collective, payload: bytes = b"") -> Message:
        message = Message(self._rank, self._num_sent, what, payload)
        self._num_sent += 1
        frame = torch.frombuffer(bytearray((message.header + payload).ljust(_FRAME_BYTES, b"\0")), dtype=torch.uint8)
        group, works = self._live_group(), []
        for rank in self._others:
            received = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
            # first the receive: a rank whose message has come has memory for this one's
            works.append((rank, received, group.recv([received], rank, _TAG), group.send([frame], rank, _TAG)))
        self._in_flight.append((message, works))
        return message

    def receive(self, message: Message) -> list[bytes]:
        while message.payloads is None:
            self._receive_oldest()
        return message.payloads

    def has_arrived(self, message: Message) -> bool:
        if message.payloads is None and message is not self._in_flight[-1][0]:  # gloo does not say whether it has
            self.receive(message)
        return message.payloads is not None

    def _receive_oldest(self) -> None:
        message, works = self._in_flight[0]
        payloads = {self._rank: message.payload}
        for rank, received, incoming, _ in works:
            incoming.wait()
            frame = received.numpy().tobytes()
            message.is_complete(rank, frame)
            payloads[rank] = frame[HEADER.size : HEADER.size + len(message.payload)]
        for *_, outgoing in works:  # a rank that ends now must not take its message along
            outgoing.wait()
        message.payloads = [payloads[rank] for rank in sorted(payloads)]
        self._in_flight.popleft()

    def close_failed(self, failure: DtrainError) -> None:
        if self._is_closed:
            return
        with suppress(RuntimeError):
            self._store().set(f"{_STORE_KEY}{self._rank}", f"{type(failure).__name__}: {failure}")
        # the others have posted a receive for each message that they wait for
        with suppress(RuntimeError):
            for _, works in self._in_flight:
                for *_, outgoing in works:
                    outgoing.wait(timedelta(seconds=_SEND_S))
        self._is_closed = True

    def failure_of_others(self) -> DtrainError | None:
        with suppress(RuntimeError):
            store = self._store()
            for rank in self._others:
                if store.check([f"{_STORE_KEY}{rank}"]):
                    name, _, reason = store.get(f"{_STORE_KEY}{rank}").decode().partition(": ")
                    return _failure_of(rank, name, reason)
        return None

    def release(self) -> None:
        self._is_closed = True

    def _store(self) -> distributed_c10d.Store:
        return distributed_c10d._get_process_group_store(self._live_group())

    def _live_group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None or self._is_closed:
            raise RuntimeError("the process group was released")
        return group


_STORE_KEY = "dtrain/failed/"
_closed: WeakKeyDictionary[dist.ProcessGroup, DtrainError] = WeakKeyDictionary()


def close_connections(group: dist.ProcessGroup, failure: DtrainError) -> None:
    """Ends gloo's connections of ``group``, so that all that wait for this rank fail; gloo's own ``abort`` does not."""
    _closed[group] = failure
    nothing = torch.empty(1, dtype=torch.uint8)
    with suppress(RuntimeError):  # a receive that times out breaks all pairs of its context
        group.recv([nothing], (dist.get_rank(group) + 1) % dist.get_world_size(group), _TAG + 1).wait(
            timedelta(milliseconds=1)
        )


def require_open(group: dist.ProcessGroup) -> None:
    """Raises ``CommunicationError`` if the connections of ``group`` were closed after a failure."""
    failure = _closed.get(group)
    if failure is not None:
        raise CommunicationError(
            f"the process group was closed when its ranks failed, so start the processes again; the failure: {failure}"
        )
