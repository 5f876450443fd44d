"""Input of a save: this rank's shards of logical tensors, and the state that is not a tensor."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint.format.manifest import canonical_json
from dtrain.checkpoint.format.safetensors_file import require_dtype
from dtrain.errors import CheckpointError
from dtrain.precision.remainder import Numbers, read, write
from dtrain.redaction.redact import redact

_ALIGNMENT = 64  # bytes; alignment of a shard in the host copy: one cache line
_KIND = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class TensorShard:
    """An interval of one logical tensor that this rank holds; a save writes it, a load checks its fingerprint.

    Attributes:
        name: name of the logical tensor, such as ``blocks.0.attn.qkv.weight``.
        kind: ``master``, the name of an optimizer state, ``buffer``, ``frozen`` or another lower-case word.
        shape: shape of the logical tensor.
        dtype: dtype of the logical tensor.
        start: first row-major element of the interval.
        stop: one past the last element.
        values: [stop - start], contiguous, on any device: the live tensor, or the live pair of FP32 numbers.

    Raises:
        CheckpointError: the attributes are inconsistent, or safetensors does not support the dtype.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int
    values: Numbers

    @property
    def data(self) -> Tensor:
        """The elements: the live tensor; those of a pair are formed at each access, so that a write to them is lost."""
        return read(self.values)

    @property
    def device(self) -> torch.device:
        """Device of the elements."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, in their own dtype."""
        return (self.stop - self.start) * self.dtype.itemsize

    def write(self, values: Tensor) -> None:
        """Overwrites the live elements with ``values`` [stop - start]."""
        write(self.values, values)

    def part(self, start: int, stop: int) -> TensorShard:
        """Returns elements ``start`` to ``stop`` of the logical tensor, which lie in this shard."""
        return replace(self, start=start, stop=stop, values=self.values[start - self.start : stop - self.start])

    def __post_init__(self) -> None:
        label = f"shard {self.kind}:{self.name}"
        if not _KIND.fullmatch(self.kind):
            raise CheckpointError(f"{label}: a kind is a lower-case word such as 'master'; got {self.kind!r}")
        require_dtype(self.dtype, label)
        numel = math.prod(self.shape)
        if not 0 <= self.start <= self.stop <= numel:
            raise CheckpointError(
                f"{label}: [{self.start}, {self.stop}) is not an interval of its {numel} elements {list(self.shape)}"
            )
        values = self.values if isinstance(self.values, Tensor) else self.values.remainder
        if self.values.dtype != self.dtype or tuple(values.shape) != (self.stop - self.start,):
            raise CheckpointError(
                f"{label}: expected data of shape [{self.stop - self.start}] and {self.dtype}; got "
                f"{list(values.shape)} and {self.values.dtype}"
            )
        if not values.is_contiguous():
            raise CheckpointError(f"{label}: data is not contiguous; give a slice of a flat buffer or .contiguous()")


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a checkpoint.

    Attributes:
        step: number of attempted steps; names the directory.
        shards: this rank's shards. The shards of all ranks tile every tensor exactly, so a tensor that several ranks
            hold (buffers, frozen parameters, masters at stage 0) comes from one of them.
        state: plain JSON values (rank 0's is stored): run id, engine, world size, contract, versions, config, counters,
            RNG, data cursor, aliases, metrics, extra. Secrets in ``state["config"]`` and
            ``state["optimizer"]`` are redacted; all else is stored unchanged.
        ready: blocks until the shards may be read.
        expected: fingerprints that shards must have when they are written, by kind, name and first element; the save
            fails if one has another.
        num_files: number of ranks that write a file, the first ones; the others have no shards. None: all ranks.
    """

    step: int
    shards: tuple[TensorShard, ...]
    state: Mapping[str, Any]
    ready: Callable[[], None] = lambda: None
    expected: Mapping[tuple[str, str, int], int] = field(default_factory=dict)
    num_files: int | None = None

    def unexpected(self, written: Iterable[tuple[str, str, int, int]]) -> list[tuple[str, str]]:
        """Returns the kind and the name of each shard that was written with another fingerprint than expected.

        ``written``: kind, name, first element and fingerprint of each.
        """
        return [
            (kind, name)
            for kind, name, start, fingerprint in written
            if self.expected.get((kind, name, start), fingerprint) != fingerprint
        ]

    def __post_init__(self) -> None:
        if self.step < 0:
            raise CheckpointError(f"a checkpoint's step is 0 or more; got {self.step}")


class HostCopy:
    """Copies snapshots into host memory that is kept between saves and pinned if ``device`` is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._blocks: list[Tensor] = []  # uint8, of one size

    def reserve(self, snapshot: Snapshot) -> None:
        """Allocates memory for a copy of ``snapshot`` if the present memory is too small."""
        nbytes = [shard.nbytes for shard in snapshot.shards]
        block = _pinned_block(nbytes) if self._on_gpu else sum(map(_aligned, nbytes))
        count = 1 + max((number for number, _ in _places(nbytes, block)), default=0)
        if len(self._blocks) < count or self._block_bytes < block:  # else kept: the first copy into new pages is slow
            self._blocks = []  # freed before the larger allocation
            self._blocks = [torch.empty(block, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(count)]

    @property
    def _block_bytes(self) -> int:
        return self._blocks[0].numel() if self._blocks else 0

    def take(self, snapshot: Snapshot) -> Snapshot:
        """Returns ``snapshot`` with its shards on the host; call ``reserve`` first. Valid until the next call.

        On a GPU the copies are queued on the current stream, and ``ready`` of the result waits for them.
        """
        places = _places([shard.nbytes for shard in snapshot.shards], self._block_bytes)
        shards = []
        for shard, (number, start) in zip(snapshot.shards, places, strict=True):
            data = self._blocks[number][start : start + shard.nbytes].view(shard.dtype)
            shards.append(replace(shard, values=data.copy_(shard.data, non_blocking=True)))
        ready = snapshot.ready
        if self._on_gpu:
            copied: Any = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self._device))

            def ready() -> None:
                with torch.cuda.device(self._device):  # a saving thread would open a context on the first GPU
                    copied.synchronize()

        return replace(snapshot, shards=tuple(shards), ready=ready)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _pinned_block(nbytes: Sequence[int]) -> int:
    """Returns the bytes of the blocks for shards of ``nbytes``, a power of two.

    torch rounds an allocation of pinned memory up to one. So a single block could take twice the memory of the shards;
    about sixteen take little more.
    """
    needed = max(_aligned(max(nbytes, default=0)), sum(map(_aligned, nbytes)) // 16, 1)
    return 1 << (needed - 1).bit_length()


def _places(nbytes: Sequence[int], block: int) -> list[tuple[int, int]]:
    """Returns the block of each shard in the host copy, the first with room for it, and its first byte there."""
    used = [0]
    places = []
    for size in map(_aligned, nbytes):
        number = next((number for number, total in enumerate(used) if total + size <= block), len(used))
        used += [0] * (number == len(used))
        places.append((number, used[number]))
        used[number] += size
    return places


def stored_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state as the manifest stores it: plain JSON, without the secrets of the settings.

    ``config_hash`` is that of the settings without secrets, so that it gives nothing away to who guesses one.

    Raises:
        CheckpointError: a value would not survive a JSON round trip; names its path.
    """
    plain = {str(key): _plain(value, f"state[{key!r}]") for key, value in state.items()}
    for name in ("config", "optimizer"):
        if name in plain:
            plain[name] = redact(plain[name])
    if "config" in plain:
        plain["config_hash"] = hashlib.sha256(canonical_json(plain["config"])).hexdigest()
    return plain


def _plain(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:  # json.dumps would turn an integer key into a string silently
            if not isinstance(key, str):
                raise CheckpointError(f"{path} has the key {key!r}; JSON keeps only string keys, so make it one")
        return {key: _plain(item, f"{path}[{key!r}]") for key, item in value.items()}
    raise CheckpointError(
        f"{path} is {value!r} ({type(value).__name__}); a checkpoint's state is plain JSON: finite numbers, strings, "
        "booleans, None, lists and dicts of them"
    )
