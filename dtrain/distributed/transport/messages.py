"""Small messages that precede or carry a collective of CPU ranks: their format.

gloo matches collectives by their order alone. Two of one kind and different sizes end the process (an exception in
gloo's own thread), or fill only a part of the receiver's buffer; two of different kinds wait for each other until the
time-out. So the ranks send a message with the collective's number, hash and name first, and no rank starts the
collective before it has received the same message from all.
"""

from __future__ import annotations

import struct
from select import PIPE_BUF

from dtrain.distributed.schedule import Collective
from dtrain.errors import CommunicationError, DivergenceError, DtrainError

_NAME_BYTES = 180
HEADER = struct.Struct(f"<qqqI{_NAME_BYTES}s")  # number of the message, number and hash of the collective, bytes, name
MAX_PAYLOAD_BYTES = PIPE_BUF - HEADER.size  # longer writes to a pipe are not atomic
_FAILED = -1  # instead of the number: the sender has failed; the name is that of its error
_REASON_BYTES = 1500  # of a failure


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
    """Returns the message of a rank that has failed."""
    reason = str(failure).encode()[:_REASON_BYTES]
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
