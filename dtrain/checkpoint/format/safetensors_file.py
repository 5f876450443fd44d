"""Reading and writing of safetensors headers, with every field checked before it is used.

A file is 8 bytes of little-endian header length, a JSON header padded with spaces to a multiple of 8, then the data of
all tensors without gaps. Format: https://github.com/huggingface/safetensors (README, 'Format').
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtrain.checkpoint.format.checked_file import DamageError, parse_json, read_bytes
from dtrain.errors import CheckpointError

HEADER_LIMIT = 100_000_000  # bytes; the safetensors library's own cap
NUMBER_LIMIT = 1 << 63  # of numbers read from a file: no file is that large, and longer integers are slow to print
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file stores it: dtype, stored shape, and bytes [begin, end) from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def dtype_name(dtype: torch.dtype) -> str:
    return _NAMES[dtype]


def require_dtype(dtype: torch.dtype, label: str) -> None:
    """Raises ``CheckpointError`` unless safetensors supports the dtype."""
    if dtype not in _NAMES:
        names = ", ".join(sorted(str(known).removeprefix("torch.") for known in _NAMES))
        raise CheckpointError(f"{label}: {dtype} cannot be saved; use one of {names}")


def encode_header(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """Returns the length field and padded header of a file that holds the given (key, dtype, shape) in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, dtype, shape in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(
            f"{len(tensors)} shards need a header of {len(text)} bytes; at most {HEADER_LIMIT} are read"
        )
    return len(text).to_bytes(8, "little") + text


def read_header(descriptor: int, file: str, size: int) -> dict[str, StoredTensor]:
    """Reads the header of an open file of ``size`` bytes and checks that its tensors tile the data section exactly.

    Raises:
        DamageError: the header is not valid safetensors.
    """
    if size < 8:
        raise DamageError(file, f"{size} bytes are too few for a safetensors file", "header")
    length = int.from_bytes(read_bytes(descriptor, file, 0, 8), "little")
    if length > min(HEADER_LIMIT, size - 8):
        raise DamageError(file, f"a header of {length} bytes does not fit (file {size}, cap {HEADER_LIMIT})", "header")
    header = parse_json(read_bytes(descriptor, file, 8, length), file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise DamageError(file, "the header's __metadata__ is not an object", "header")
    stored = {key: _stored_tensor(file, key, value, 8 + length) for key, value in header.items()}
    position = 8 + length
    for key, tensor in sorted(stored.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            raise DamageError(file, f"{key} begins at byte {tensor.begin}, expected {position}", "header")
        position = tensor.end
    if position != size:
        raise DamageError(file, f"its tensors end at byte {position} of {size}", "header")
    return stored


def _stored_tensor(file: str, key: str, value: Any, base: int) -> StoredTensor:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise DamageError(file, f"the header's entry of {key} is not dtype, shape, data_offsets", "header")
    dtype = DTYPES.get(str(value["dtype"]))
    if dtype is None:
        raise DamageError(file, f"{key} has the unknown dtype {value['dtype']!r:.200}", "header")
    shape, offsets = value["shape"], value["data_offsets"]
    if not is_shape(shape) or not is_natural_list(offsets) or len(offsets) != 2:
        raise DamageError(file, f"{key} has the shape {shape!r:.200} and the offsets {offsets!r:.200}", "header")
    begin, end = offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise DamageError(file, f"{key}: {value['dtype']} {shape} does not fill bytes {begin} to {end}", "header")
    return StoredTensor(dtype, tuple(shape), base + begin, base + end)


def is_natural_list(value: Any) -> bool:
    """Whether a JSON value is a list of integers in [0, ``NUMBER_LIMIT``)."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < NUMBER_LIMIT for item in value)


def is_shape(value: Any) -> bool:
    """Whether a JSON value is a tensor shape with fewer than ``NUMBER_LIMIT`` elements."""
    if not is_natural_list(value):
        return False
    # math.prod would first build an integer of any length
    numel = int(0 not in value)
    for size in value:
        numel *= size
        if numel >= NUMBER_LIMIT:
            return False
    return True
