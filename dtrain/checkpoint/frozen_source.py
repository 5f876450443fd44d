"""The folder that frozen weights come from, named in checkpoints instead of copied into each."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, replace
from functools import partial
from pathlib import Path

from dtrain.config.fields import CheckedRecord, setting
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.consensus import describe, on_rank_0_for_long
from dtrain.errors import ConfigError

_BLOCK = 16 << 20  # bytes hashed at a time
_PAUSE = 1 << 30  # bytes, of about a second, after which the other ranks are kept waiting
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FrozenSource(CheckedRecord):
    """The folder with the safetensors files of all frozen weights of a model.

    With it a checkpoint holds the SHA-256 of those files, and no frozen weights: they are given to ``initialize`` as
    they are in the folder, each time. A load refuses a checkpoint that was trained over others.

    Attributes:
        path: the folder, absolute in a checkpoint; it may have moved.
        sha256: of all its safetensors files, as ``sha256sum *.safetensors | sha256sum`` gives it; None:
            ``dtrain.initialize`` computes it.
    """

    path: str = setting(MISSING, "", is_path=True)
    sha256: str | None = setting(None, "")

    def _check(self) -> None:
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256):
            raise ConfigError(f"{self._entry('sha256')}; expected 64 hex digits, or null")

    def hashed(self, comm: Communicator) -> FrozenSource:
        """Returns the record with an absolute path and its hash, which rank 0 computes; all ranks call.

        Raises:
            ConfigError: the folder has no safetensors files, or they cannot be read.
        """
        path, digest = Path(self.path).absolute(), self.sha256
        if digest is None:
            digest = on_rank_0_for_long(comm, "", partial(digest_of, path), ConfigError, expected=(ConfigError,))
        return replace(self, path=str(path), sha256=digest)

    def __str__(self) -> str:
        return f"{self.path} (sha256 {(self.sha256 or '')[:12]})"


def digest_of(folder: Path, keep_waiting: Callable[[], None] = lambda: None) -> str:
    """Returns what ``sha256sum *.safetensors | sha256sum`` prints in ``folder``; calls ``keep_waiting`` meanwhile.

    Raises:
        ConfigError: the folder has no safetensors files, or they cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"), key=lambda file: file.name.encode())
    if not files:
        raise ConfigError(f"{folder} holds no *.safetensors; give the folder of the frozen weights")
    total, done = hashlib.sha256(), 0
    try:
        for file in files:
            own = hashlib.sha256()
            with open(file, "rb", buffering=0) as opened:
                while block := opened.read(_BLOCK):
                    own.update(block)
                    done += len(block)
                    if done > _PAUSE:
                        done = 0
                        keep_waiting()
            total.update(f"{own.hexdigest()}  {file.name}\n".encode())
    except OSError as error:
        raise ConfigError(f"the frozen weights of {folder} cannot be read: {describe(error)}") from error
    return total.hexdigest()
