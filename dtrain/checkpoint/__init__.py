"""Checkpoints: sharded safetensors files, one manifest, and one directory rename as the commit.

The package sits below the engines and knows nothing of them: a rank hands it pieces of logical tensors, and reads
intervals of logical tensors back. The format and its guarantees are described in ``docs/checkpoints.md``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.checkpoint.commit import save
    from dtrain.checkpoint.directory import NoCheckpointError
    from dtrain.checkpoint.huggingface.exporter import export
    from dtrain.checkpoint.huggingface.importer import import_hf
    from dtrain.checkpoint.read_targets import ReadTarget
    from dtrain.checkpoint.reader import CheckpointReader, open_newest
    from dtrain.checkpoint.report import CheckpointReport, Report, list_checkpoints, verify
    from dtrain.checkpoint.retention import Retention
    from dtrain.checkpoint.saver import Saver
    from dtrain.checkpoint.snapshot import Snapshot, TensorShard

__all__ = [
    "CheckpointReader",
    "CheckpointReport",
    "NoCheckpointError",
    "ReadTarget",
    "Report",
    "Retention",
    "Saver",
    "Snapshot",
    "TensorShard",
    "export",
    "import_hf",
    "list_checkpoints",
    "open_newest",
    "save",
    "verify",
]

# resolved at first use (PEP 562): torch takes seconds to import, and the command line must answer a mistake at once
_HOMES = {
    "directory": ("NoCheckpointError",),
    "huggingface.exporter": ("export",),
    "huggingface.importer": ("import_hf",),
    "read_targets": ("ReadTarget",),
    "reader": ("CheckpointReader", "open_newest"),
    "report": ("CheckpointReport", "Report", "list_checkpoints", "verify"),
    "retention": ("Retention",),
    "saver": ("Saver",),
    "snapshot": ("TensorShard", "Snapshot"),
    "commit": ("save",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return globals().setdefault(name, getattr(import_module(f"{__name__}.{home}"), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
