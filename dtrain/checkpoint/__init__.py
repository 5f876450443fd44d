"""Checkpoints: sharded safetensors files, one manifest, and one directory rename as the commit.

The package sits below the engines and knows nothing of them: a rank hands it pieces of logical tensors, and reads
intervals of logical tensors back. The format and its guarantees are described in ``docs/checkpoints.md``.
"""

from dtrain.checkpoint.directory import NoCheckpointError
from dtrain.checkpoint.reader import CheckpointReader, open_newest
from dtrain.checkpoint.report import CheckpointReport, Report, list_checkpoints, verify
from dtrain.checkpoint.snapshot import Piece, Snapshot
from dtrain.checkpoint.writer import save

__all__ = [
    "CheckpointReader",
    "CheckpointReport",
    "NoCheckpointError",
    "Piece",
    "Report",
    "Snapshot",
    "list_checkpoints",
    "open_newest",
    "save",
    "verify",
]
