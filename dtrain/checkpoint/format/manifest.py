"""The manifest: the content of a checkpoint, with hashes that prove that nothing was added, lost or changed.

Line 1 is the sha256 of the rest; the rest is canonical JSON (sorted keys, no spaces, ASCII, no NaN).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from dtrain.checkpoint.format import hashing
from dtrain.checkpoint.format.checked_file import DamageError, parse_json
from dtrain.checkpoint.format.safetensors_file import DTYPES, NUMBER_LIMIT, dtype_name, is_shape
from dtrain.checkpoint.format.training_state import TrainingState
from dtrain.errors import CheckpointError, ConfigError

FILE = "manifest.json"
FORMAT = "dtrain-checkpoint"
VERSIONS = (1, 2)  # 1: every file is hashed with SHA-256
SIZE_LIMIT = 1 << 30  # bytes
FILE_NAME = re.compile(r"[a-z0-9-]+\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_SAVED_AT = re.compile(r"[0-9T:.+-]{1,40}")
_KEY_SUFFIX = re.compile(r"(@[0-9]+)*")  # follows the tensor's kind and name in a key
_KINDS_ALONE = ("master", "buffer", "frozen")  # the others are states of a master
_FIELDS = {"format": str, "version": int, "step": int, "saved_at": str, "state": dict, "files": list, "tensors": list}


@dataclass(frozen=True)
class FileEntry:
    """A data file: its name in the directory, its size, the name of its hash, and the hex digest of its bytes."""

    name: str
    bytes: int
    hash: str
    digest: str


@dataclass(frozen=True)
class FileInterval:
    """Location of the row-major elements [start, stop) of a tensor: ``key`` in ``file``; a chunk of the manifest."""

    file: str
    key: str
    start: int
    stop: int


@dataclass(frozen=True)
class TensorEntry:
    """A logical tensor; its chunks are sorted and tile it exactly."""

    name: str
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fingerprint: int
    chunks: tuple[FileInterval, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def label(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass(frozen=True)
class Manifest:
    """Content of ``manifest.json``. ``saved_at`` is wall time (ISO 8601, UTC), for people only."""

    step: int
    saved_at: str
    state: Mapping[str, Any]
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]

    @cached_property
    def index(self) -> dict[tuple[str, str], TensorEntry]:
        return {(tensor.kind, tensor.name): tensor for tensor in self.tensors}

    @cached_property
    def by_file(self) -> dict[str, dict[str, tuple[TensorEntry, FileInterval]]]:
        table: dict[str, dict[str, tuple[TensorEntry, FileInterval]]] = {file.name: {} for file in self.files}
        for tensor in self.tensors:
            for chunk in tensor.chunks:
                table[chunk.file][chunk.key] = (tensor, chunk)
        return table

    @cached_property
    def digest(self) -> str:
        """Line 1 of the file: the SHA-256 of the rest."""
        return self.encode().partition(b"\n")[0].decode()

    @property
    def version(self) -> int:
        """Version of the format, the oldest that can hold this manifest."""
        return 1 if all(file.hash == "sha256" for file in self.files) else 2

    @cached_property
    def training(self) -> TrainingState | None:
        """The checked state of the engine that saved it, or None: [Note: training state]."""
        try:
            return TrainingState.of(self.state, step=self.step, num_files=len(self.files))
        except ConfigError as error:
            raise DamageError(FILE, str(error), "state") from None

    def metric(self, name: str) -> float | None:
        """Returns ``state["metrics"][name]``, such as ``val_loss``; None if it is absent."""
        metrics = self.state.get("metrics")
        value = metrics.get(name) if isinstance(metrics, Mapping) else None
        return value if isinstance(value, float) else None

    def encode(self) -> bytes:
        body = canonical_json(
            {
                "format": FORMAT,
                "version": self.version,
                "step": self.step,
                "saved_at": self.saved_at,
                "state": self.state,
                "files": [{"name": file.name, "bytes": file.bytes, file.hash: file.digest} for file in self.files],
                "tensors": [
                    {
                        "name": tensor.name,
                        "kind": tensor.kind,
                        "dtype": dtype_name(tensor.dtype),
                        "shape": list(tensor.shape),
                        "fingerprint": f"{tensor.fingerprint:016x}",
                        "chunks": [vars(chunk) for chunk in tensor.chunks],
                    }
                    for tensor in self.tensors
                ],
            }
        )
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """Parses and checks the bytes of ``manifest.json``: hash, version, every field, names, tiling.

        Raises:
            DamageError: the bytes are not a manifest that this version writes.
        """
        digest, _, body = data.partition(b"\n")  # compared first: nothing else of damaged bytes is parsed
        actual = hashlib.sha256(body).hexdigest()
        if digest != actual.encode():
            raise DamageError(FILE, f"sha256 differs (expected {digest[:64]!r}, got {actual!r})", "manifest-hash")
        raw = parse_json(body, FILE)
        if raw.get("format") != FORMAT or raw.get("version") not in VERSIONS:
            got = f"{raw.get('format')!r} version {raw.get('version')!r}"
            reason = f"expected {FORMAT!r} version 1 or 2, got {got}; read it with the dtrain that wrote it"
            raise DamageError(FILE, reason, "version")
        _check_fields(raw, _FIELDS, "the manifest")
        if not _SAVED_AT.fullmatch(raw["saved_at"]):
            raise _bad(f"saved_at is {raw['saved_at']!r:.80}, which is not a time")
        files = tuple(_file(item) for item in raw["files"])
        names = {file.name for file in files}
        if len(names) != len(files):
            raise _bad("a file is listed twice")
        tensors = tuple(_tensor(item, names) for item in raw["tensors"])
        manifest = Manifest(raw["step"], raw["saved_at"], raw["state"], files, tensors)
        vars(manifest)["digest"] = actual  # already known; encoding again costs as much as parsing
        if manifest.version != raw["version"]:
            raise _bad(f"version is {raw['version']}, expected {manifest.version} for the hashes of these files")
        num_chunks = sum(len(tensor.chunks) for tensor in tensors)
        if len(manifest.index) != len(tensors) or sum(map(len, manifest.by_file.values())) != num_chunks:
            raise _bad("a tensor or a key is listed twice")
        if manifest.training is not None:
            _check_optimizer_states(manifest)
        return manifest


def canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def stored_shape(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Returns the stored shape of a chunk of ``count`` elements: ``shape`` if it is the whole tensor, else flat."""
    return shape if count == math.prod(shape) else (count,)


def check_tiling(label: str, numel: int, intervals: Iterable[tuple[int, int, str]]) -> None:
    """Checks that (start, stop, owner) intervals, sorted by start, cover [0, numel) without gap or overlap.

    Raises:
        CheckpointError: names the first gap or overlap and the owners of the adjacent intervals.
    """
    position, before = 0, "the start"
    for start, stop, owner in intervals:
        if start > position:
            raise CheckpointError(
                f"{label}: no rank or file holds elements {position} to {start} (between {before} and {owner})"
            )
        if start < position:
            raise CheckpointError(f"{label}: both {before} and {owner} hold elements {start} to {min(stop, position)}")
        position, before = stop, owner
    if position < numel:
        raise CheckpointError(f"{label}: no rank or file holds elements {position} to {numel} (after {before})")
    if position > numel:
        raise CheckpointError(f"{label}: {before} holds elements up to {position} of {numel}")


def _bad(reason: str) -> DamageError:
    return DamageError(FILE, reason, "manifest")


def _check_fields(raw: Any, fields: Mapping[str, type], label: str) -> None:
    if not isinstance(raw, dict) or set(raw) != set(fields):
        got = sorted(raw) if isinstance(raw, dict) else raw
        raise _bad(f"{label}: expected the fields {sorted(fields)}, got {got!r:.200}")
    for name, kind in fields.items():
        # not isinstance: True is an int
        if type(raw[name]) is not kind or (kind is int and not 0 <= raw[name] < NUMBER_LIMIT):
            raise _bad(f"{label}: {name} is {raw[name]!r:.200}, expected {kind.__name__}")


def _check_optimizer_states(manifest: Manifest) -> None:
    """Checks that each optimizer state, and the moving average, has the shape of its master."""
    for tensor in manifest.tensors:
        if tensor.kind in _KINDS_ALONE:
            continue
        master = manifest.index.get(("master", tensor.name))
        if master is None or master.shape != tensor.shape:
            got = "there is none" if master is None else f"got {list(master.shape)}"
            raise _bad(f"{tensor.label}: expected a master of its shape {list(tensor.shape)}, {got}")


def _file(raw: Any) -> FileEntry:
    others = sorted(set(raw) - {"name", "bytes"}) if isinstance(raw, dict) else []
    name = others[0] if len(others) == 1 else "sha256"
    if name not in hashing.NAMES:
        known = ", ".join(sorted(hashing.NAMES))
        raise _bad(f"unknown hash {name!r:.80} of a file (known: {known}); read it with the dtrain that wrote it")
    _check_fields(raw, {"name": str, "bytes": int, name: str}, "a file's entry")
    if not FILE_NAME.fullmatch(raw["name"]):
        raise _bad(f"{raw['name']!r} is not the name of a data file (expected {FILE_NAME.pattern})")
    if not _DIGEST.fullmatch(raw[name]):
        raise _bad(f"{raw['name']}: {raw[name]!r:.80} is not a digest of {name}")
    return FileEntry(raw["name"], raw["bytes"], name, raw[name])


def _tensor(raw: Any, files: set[str]) -> TensorEntry:
    fields = {"name": str, "kind": str, "dtype": str, "shape": list, "fingerprint": str, "chunks": list}
    _check_fields(raw, fields, "a tensor's entry")
    label = f"{raw['kind']}:{raw['name']}"
    dtype = DTYPES.get(raw["dtype"])
    if dtype is None or not is_shape(raw["shape"]) or not _FINGERPRINT.fullmatch(raw["fingerprint"]):
        raise _bad(
            f"{label:.200} has dtype {raw['dtype']!r:.80}, shape {raw['shape']!r:.200}, fingerprint "
            f"{raw['fingerprint']!r:.80}"
        )
    chunks = []
    for item in raw["chunks"]:
        _check_fields(item, {"file": str, "key": str, "start": int, "stop": int}, f"a chunk of {label}")
        chunk = FileInterval(**item)
        if chunk.file not in files or chunk.stop <= chunk.start:
            raise _bad(f"{label} has a chunk [{chunk.start}, {chunk.stop}) in {chunk.file!r:.80}, which is impossible")
        # the file hashes cover the keys, so this check binds each value to its tensor's name
        if not (chunk.key.startswith(label) and _KEY_SUFFIX.fullmatch(chunk.key, len(label))):
            raise _bad(f"{label} has a chunk under {chunk.key!r:.200}, which is another tensor's key")
        chunks.append(chunk)
    shape = tuple(raw["shape"])
    try:
        check_tiling(label, math.prod(shape), [(chunk.start, chunk.stop, chunk.file) for chunk in chunks])
    except CheckpointError as error:
        raise DamageError(FILE, str(error), "tiling") from None
    return TensorEntry(raw["name"], raw["kind"], dtype, shape, int(raw["fingerprint"], 16), tuple(chunks))
