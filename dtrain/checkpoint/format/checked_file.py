"""Reading of files that anyone may have written: regular files only, strict JSON, no fewer bytes than asked for.

Imports no torch, so that ``dtrain watch`` reads a lease at once.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dtrain.errors import CheckpointError

_MESSAGE_LIMIT = 1000  # characters


class DamageError(CheckpointError):
    """A checkpoint that must not be used. Quoted file content is shortened and stripped of control characters.

    Args:
        file: the damaged file, relative to the checkpoint's directory.
        reason: what was expected and what was found.
        tag: one hyphenated word for the name of the quarantined directory.
    """

    def __init__(self, file: str, reason: str, tag: str) -> None:
        self.file = _printable(file)
        self.reason = _printable(reason)
        self.tag = tag
        super().__init__(f"{self.file}: {self.reason}")


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "\ufffd" for char in text[:_MESSAGE_LIMIT])


def parse_json(data: bytes, file: str) -> dict[str, Any]:
    """Parses a JSON object strictly (UTF-8, finite numbers, no duplicate key); raises ``DamageError``."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key appears twice")
        return result

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):  # such as 1e400
            raise ValueError(f"{number} is not JSON")
        return float(number)

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=finite, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise DamageError(file, f"not readable as JSON ({error})", "json") from None
    if not isinstance(value, dict):
        raise DamageError(file, f"expected a JSON object, got {type(value).__name__}", "json")
    return value


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, int]]:
    """Opens a regular file (no link, no device) for reading; yields its descriptor and size.

    Raises:
        DamageError: the path does not exist or is not a regular file.
        OSError: the file cannot be opened.
    """
    try:
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            raise DamageError(path.name, f"not a regular file ({stat.filemode(mode)})", "not-regular")
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise DamageError(path.name, "missing", "missing") from None
    try:
        yield descriptor, os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def read_into(descriptor: int, file: str, offset: int, target: memoryview) -> None:
    """Fills ``target`` with the file's bytes from ``offset`` on; raises ``DamageError`` if the file is too short."""
    while target:
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise DamageError(file, f"ends at byte {offset}, {len(target)} bytes too early", "size")
        target, offset = target[count:], offset + count


def read_bytes(descriptor: int, file: str, offset: int, count: int) -> bytes:
    """Returns ``count`` bytes of the file from ``offset`` on; raises as ``read_into`` does."""
    data = bytearray(count)
    read_into(descriptor, file, offset, memoryview(data))
    return bytes(data)
