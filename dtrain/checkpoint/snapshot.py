"""What a rank hands over to be saved: pieces of logical tensors, and the state that is not a tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint.format.container import require_dtype
from dtrain.errors import CheckpointError

_ALIGNMENT = 64  # bytes, of a piece in a host copy: a line of the cache
_KIND = re.compile(r"[a-z][a-z0-9_]*")
_SECRET_KEY = re.compile(
    r"secret|passw|passphrase|credential|webhook|bearer|(api|access|private|auth|encryption)[_-]?key|(^|[_-])tokens?$",
    re.IGNORECASE,
)
_COUNT_KEY = re.compile(r"tokens?$", re.IGNORECASE)  # `tokens: 4096` is a count, `hf_token: "..."` a secret
_URL_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")


@dataclass(frozen=True)
class TensorShard:
    """An interval of one logical tensor that this rank holds: written by a save, proven after a load.

    Attributes:
        name: of the logical tensor, such as ``blocks.0.attn.qkv.weight``.
        kind: ``master``, ``exp_avg``, ``exp_avg_sq``, ``buffer``, ``frozen`` or another lower-case word.
        shape: of the logical tensor.
        dtype: of the logical tensor.
        start: first element of the interval, row-major.
        stop: one past the last element.
        data: [stop - start], contiguous, on any device.

    Raises:
        CheckpointError: the attributes do not fit each other, or the dtype has no name in a safetensors file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int
    data: Tensor

    def __post_init__(self) -> None:
        label = f"piece {self.kind}:{self.name}"
        if not _KIND.fullmatch(self.kind):
            raise CheckpointError(f"{label}: a kind is a lower-case word such as 'master'; got {self.kind!r}")
        require_dtype(self.dtype, label)
        numel = math.prod(self.shape)
        if not 0 <= self.start <= self.stop <= numel:
            raise CheckpointError(
                f"{label}: [{self.start}, {self.stop}) is no interval of its {numel} elements {list(self.shape)}"
            )
        if self.data.dtype != self.dtype or tuple(self.data.shape) != (self.stop - self.start,):
            raise CheckpointError(
                f"{label}: expected data of shape [{self.stop - self.start}] and {self.dtype}; got "
                f"{list(self.data.shape)} and {self.data.dtype}"
            )
        if not self.data.is_contiguous():
            raise CheckpointError(f"{label}: data is not contiguous; give a slice of a flat buffer or .contiguous()")


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a checkpoint.

    Attributes:
        step: attempted steps; names the directory.
        pieces: what this rank holds. All ranks' pieces together tile every tensor exactly: what several ranks hold
            (buffers, frozen parameters, masters at stage 0) is given by one of them.
        state: plain JSON values (rank 0's is stored): run id, engine, world size, contract, versions, config, counters,
            RNG, data cursor, aliases, metrics, extra. Secrets in ``state["config"]`` are blanked; all else returns as
            it was.
        ready: returns when the pieces may be read.
    """

    step: int
    pieces: tuple[TensorShard, ...]
    state: Mapping[str, Any]
    ready: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        if self.step < 0:
            raise CheckpointError(f"a checkpoint's step counts from 0; got {self.step}")


class HostCopy:
    """Copies snapshots into memory of the host, which is kept from one to the next: only the first pays for new pages.

    Args:
        device: of the pieces; the memory is pinned where it is a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, snapshot: Snapshot) -> None:
        """Makes sure that there is memory for a copy of ``snapshot``.

        Raises:
            RuntimeError: it cannot be had.
        """
        *_, numel = _places(snapshot.pieces)
        if numel > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # let go of before there is more
            self._memory = torch.empty(numel, dtype=torch.uint8, pin_memory=self._on_gpu)

    def take(self, snapshot: Snapshot) -> Snapshot:
        """The same with its pieces on the host, once there is memory for it; it holds until the next one is taken.

        On a GPU the copies are queued on the current stream; ``ready`` of the result waits for them.
        """
        pieces = []
        for piece, start in zip(snapshot.pieces, _places(snapshot.pieces), strict=False):
            data = self._memory[start : start + piece.data.nbytes].view(piece.dtype)
            pieces.append(replace(piece, data=data.copy_(piece.data, non_blocking=True)))
        ready = snapshot.ready
        if self._on_gpu:
            copied: Any = torch.cuda.Event()
            copied.record()
            ready = copied.synchronize
        return replace(snapshot, pieces=tuple(pieces), ready=ready)


def _places(pieces: Sequence[TensorShard]) -> list[int]:
    """Where each piece begins, in bytes, and at last where they end."""
    return list(accumulate((-(-piece.data.nbytes // _ALIGNMENT) * _ALIGNMENT for piece in pieces), initial=0))


def stored_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as the manifest stores it: checked to be plain JSON, with the secrets of ``config`` blanked.

    Raises:
        CheckpointError: a value would not come back as it was; names its path.
    """
    plain = {str(key): _plain(value, f"state[{key!r}]") for key, value in state.items()}
    if "config" in plain:
        plain["config"] = redact(plain["config"])
    return plain


def _plain(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(f"{path} has the key {key!r}; JSON keeps only string keys, so make it one")
        return {key: _plain(item, f"{path}[{key!r}]") for key, item in value.items()}
    raise CheckpointError(
        f"{path} is {value!r} ({type(value).__name__}); a checkpoint's state is plain JSON: finite numbers, strings, "
        "booleans, None, lists and dicts of them"
    )


def redact(value: Any, key: str = "") -> Any:
    """A copy of plain JSON with ``***`` for values under keys that look like secrets, and for users in URLs."""
    if _SECRET_KEY.search(key) and not _harmless(key, value):
        return "***"
    if isinstance(value, dict):
        return {name: redact(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [redact(item) for item in value]
    return _URL_USER.sub("***", value) if isinstance(value, str) else value


def _harmless(key: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return True
    return isinstance(value, int | float) and _COUNT_KEY.search(key) is not None
