"""Hashes of data files. A manifest names the hash of each file, so a checkpoint outlives the choice of the save.

BLAKE3 is several times as fast as SHA-256, also on CPUs with instructions for the latter. Where its package is missing,
saves use SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

from dtrain.errors import CheckpointError

try:
    import blake3
except ImportError:
    _blake3 = None
else:
    _blake3 = blake3.blake3


class Digest(Protocol):
    """A hash of the bytes of all updates; an update releases the GIL."""

    def update(self, data: memoryview, /) -> Any: ...

    def hexdigest(self) -> str: ...


# both have digests of 64 hex digits; None: the package is not installed
_CONSTRUCTORS: dict[str, Callable[[bytes], Digest] | None] = {"sha256": hashlib.sha256, "blake3": _blake3}
NAMES = frozenset(_CONSTRUCTORS)


def preferred() -> str:
    """Returns the name of the hash that saves use."""
    return "blake3" if _CONSTRUCTORS["blake3"] else "sha256"


def new_digest(name: str, first: bytes) -> Digest:
    """Returns the hash called ``name``, one of ``NAMES``, of ``first``; further bytes may follow.

    Raises:
        CheckpointError: its package is not installed.
    """
    constructor = _CONSTRUCTORS[name]
    if constructor is None:
        raise CheckpointError(f"the data is hashed with {name}, whose package is missing here: pip install {name}")
    return constructor(first)
