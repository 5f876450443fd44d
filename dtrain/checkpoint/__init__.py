"""Checkpoints: sharded safetensors files, one manifest, and one directory rename as the commit.

The package is below the engines and does not depend on them: a rank saves shards of logical tensors and reads intervals
of logical tensors back. ``docs/reference/checkpoint-format.md`` describes the format.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.checkpoint.async_saver import AsyncSaver
    from dtrain.checkpoint.commit import save
    from dtrain.checkpoint.directory import NoCheckpointError
    from dtrain.checkpoint.huggingface.exporter import export
    from dtrain.checkpoint.huggingface.importer import import_hf
    from dtrain.checkpoint.inspection import CheckpointStatus, VerificationReport, list_checkpoints, verify
    from dtrain.checkpoint.read_targets import ReadTarget
    from dtrain.checkpoint.reader import CheckpointReader, open_newest
    from dtrain.checkpoint.retention import Retention
    from dtrain.checkpoint.snapshot import Snapshot, TensorShard

__all__ = [
    "AsyncSaver",
    "CheckpointReader",
    "CheckpointStatus",
    "NoCheckpointError",
    "ReadTarget",
    "Retention",
    "Snapshot",
    "TensorShard",
    "VerificationReport",
    "export",
    "import_hf",
    "list_checkpoints",
    "open_newest",
    "save",
    "verify",
]

# resolved at first use (PEP 562): importing torch takes seconds, and the command line must report a mistake at once
_MODULES = {
    "directory": ("NoCheckpointError",),
    "huggingface.exporter": ("export",),
    "huggingface.importer": ("import_hf",),
    "read_targets": ("ReadTarget",),
    "reader": ("CheckpointReader", "open_newest"),
    "inspection": ("CheckpointStatus", "VerificationReport", "list_checkpoints", "verify"),
    "retention": ("Retention",),
    "async_saver": ("AsyncSaver",),
    "snapshot": ("TensorShard", "Snapshot"),
    "commit": ("save",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return globals().setdefault(name, getattr(import_module(f"{__name__}.{module}"), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
