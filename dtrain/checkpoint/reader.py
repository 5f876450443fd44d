"""Loading: the ranks agree on the newest checkpoint that verifies, read what they need, and prove what they got."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint.directory import NoCheckpointError, committed, is_single, of_run, quarantine, quarantined
from dtrain.checkpoint.format.container import DamageError, StoredTensor, read_into
from dtrain.checkpoint.format.fingerprint import MASK, fingerprints
from dtrain.checkpoint.format.integrity import (
    check_files,
    check_fingerprints,
    load_manifest,
    open_file,
    read_stored_tensors,
    scan_file,
)
from dtrain.checkpoint.format.manifest import FileEntry, Manifest, TensorEntry, check_tiling
from dtrain.checkpoint.read_targets import PartialRead, ReadTarget, fill, partial_reads
from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.consensus import describe, on_every_rank, on_rank_0
from dtrain.distributed.logging import logger
from dtrain.errors import CheckpointError, nearest


class CheckpointReader:
    """One verified checkpoint; what is read of it is checked again by :meth:`check_fingerprints` once it is placed.

    Attributes:
        path: its directory.
        step: attempted steps when it was saved.
        state: what the snapshot's state was, plain JSON.
        tensors: every logical tensor: name, kind, dtype, shape.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.step = manifest.step
        self.state: Mapping[str, Any] = manifest.state
        self.tensors: tuple[TensorEntry, ...] = manifest.tensors
        self._manifest = manifest
        self._files = {file.name: file for file in manifest.files}
        self._spans: dict[str, dict[str, StoredTensor]] = {}

    def require_kinds(self, known: Iterable[str]) -> None:
        """Refuses a checkpoint that holds more than the caller knows how to restore.

        Raises:
            CheckpointError: a tensor's kind is not among ``known``.
        """
        valid = set(known)
        for tensor in self.tensors:
            if tensor.kind not in valid:
                raise CheckpointError(
                    f"{self.path} holds {tensor.label}, of a kind that is not known here (known: "
                    f"{', '.join(sorted(valid))}); load it with the dtrain that wrote it"
                )

    def read(self, kind: str, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements [start, stop) of a tensor in row-major order, as saved; reads no other bytes.

        Args:
            kind: of the tensor.
            name: of the tensor.
            start: first element.
            stop: one past the last; the tensor's end by default.

        Returns:
            [stop - start] on the CPU, in the saved dtype.

        Raises:
            CheckpointError: no such tensor or interval, or the file changed since it was verified.
        """
        entry = self._entry(kind, name)
        stop = entry.numel if stop is None else stop
        self._require_interval(entry, start, stop)
        result = torch.empty(stop - start, dtype=entry.dtype)
        self.read_into([ReadTarget(kind, name, start, result)])
        return result

    def read_into(self, places: Iterable[ReadTarget]) -> None:
        """Fills each place's tensor and reads no other bytes; opens a file once, however many places lie in it.

        Bytes go straight into contiguous CPU memory of the saved dtype. For any other tensor they pass through at most
        4 MiB of staging memory, and are cast where the dtypes differ.

        Raises:
            CheckpointError: no such tensor or interval, or a file changed since it was verified.
        """
        wanted: dict[str, list[PartialRead]] = {}
        for place in places:
            entry = self._entry(place.kind, place.name)
            self._require_interval(entry, place.start, place.start + place.data.numel())
            for segment in partial_reads(entry, place.start, place.data.detach()):
                wanted.setdefault(segment.chunk.file, []).append(segment)
        for name, held in wanted.items():
            self._read_file(self._files[name], held)

    def _entry(self, kind: str, name: str) -> TensorEntry:
        entry = self._manifest.index.get((kind, name))
        if entry is None:
            hint = nearest(name, (tensor.name for tensor in self.tensors if tensor.kind == kind))
            raise CheckpointError(f"{self.path} holds no {kind}:{name}{hint}")
        return entry

    def _require_interval(self, entry: TensorEntry, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= entry.numel:
            raise CheckpointError(
                f"{self.path}: [{start}, {stop}) is no interval of {entry.label} ({entry.numel} elements)"
            )

    def _read_file(self, file: FileEntry, held: Iterable[PartialRead]) -> None:
        try:
            descriptor, _ = open_file(self.path, file)
            try:
                if file.name not in self._spans:
                    self._spans[file.name] = read_stored_tensors(descriptor, self._manifest, file)
                begins = {key: span.begin for key, span in self._spans[file.name].items()}
                for segment in sorted(held, key=lambda segment: begins[segment.chunk.key] + segment.offset):
                    begin = begins[segment.chunk.key]

                    def read(offset: int, target: memoryview, begin: int = begin) -> None:
                        read_into(descriptor, file.name, begin + offset, target)

                    fill(segment, read)
            finally:
                os.close(descriptor)
        except DamageError as damage:
            raise CheckpointError(f"{self.path / damage.file} changed while it was read: {damage.reason}") from damage
        except OSError as error:
            raise CheckpointError(f"{self.path / file.name} cannot be read: {describe(error)}") from error

    def check_fingerprints(self, pieces: Iterable[TensorShard], comm: Communicator) -> None:
        """Proves that what the ranks now hold is what was saved; collective, on any device and at any world size.

        Args:
            pieces: what this rank holds, from the live tensors; all ranks' pieces together tile every tensor of each
                kind among them once (what several ranks hold is given by one of them).
            comm: the ranks that loaded.

        Raises:
            CheckpointError: on every rank; names the tensor that differs, is not covered or is not in the checkpoint.
        """
        what = f"checking what was loaded from {self.path}"
        reports = on_every_rank(comm, what, lambda: self._measure(pieces), CheckpointError)
        held: dict[tuple[str, str], list[tuple[int, int, int, int]]] = {}
        for rank, report in enumerate(reports):
            for kind, name, start, stop, part in report:
                held.setdefault((kind, name), []).append((start, stop, rank, part))
        kinds = {kind for kind, _ in held}
        for entry in self.tensors:
            if entry.kind in kinds:
                self._compare(entry, sorted(held.get((entry.kind, entry.name), [])))

    def _measure(self, pieces: Iterable[TensorShard]) -> list[list[Any]]:
        """Of each piece: kind, name, start, stop, fingerprint."""
        held: list[list[Any]] = []

        def checked() -> Iterator[tuple[Tensor, int]]:
            for piece in pieces:
                entry = self._entry(piece.kind, piece.name)
                if (piece.dtype, piece.shape) != (entry.dtype, entry.shape):
                    raise CheckpointError(
                        f"{entry.label} was saved as {entry.dtype} {list(entry.shape)}, "
                        f"and is now {piece.dtype} {list(piece.shape)}"
                    )
                held.append([piece.kind, piece.name, piece.start, piece.stop])
                yield piece.data, piece.start

        parts = list(fingerprints(checked()))
        return [[*interval, part] for interval, part in zip(held, parts, strict=True)]

    def _compare(self, entry: TensorEntry, held: Sequence[tuple[int, int, int, int]]) -> None:
        intervals = [(start, stop, f"rank {rank}") for start, stop, rank, _ in held if start < stop]
        check_tiling(f"after loading {self.path}, {entry.label}", entry.numel, intervals)
        total = sum(part for *_, part in held) & MASK
        if total != entry.fingerprint:
            raise CheckpointError(
                f"after loading {self.path}, {entry.label} differs from what was saved (fingerprint {total:016x}, "
                f"expected {entry.fingerprint:016x}); load again, and check these hosts' memory"
            )


def open_newest(path: Path, comm: Communicator) -> CheckpointReader:
    """Opens the newest checkpoint that verifies; collective, and all ranks open the same one.

    One that is damaged is named in a warning and renamed to ``bad-step-...`` when all ranks are done with it; one that
    merely cannot be read (permissions, a failing mount) is named and left as it is. Every file is read to its end, by
    one rank each.

    Args:
        path: a run directory, a directory of checkpoints, or one checkpoint, which is then used or refused alone.
        comm: the ranks that load.

    Raises:
        NoCheckpointError: there is no checkpoint at all, good or bad.
        CheckpointError: none verifies, or the one asked for does not; names file and reason.
    """
    path = Path(path)
    what = f"opening {path}"
    if on_rank_0(comm, what, lambda: is_single(path), CheckpointError):
        outcome = _inspect(path.resolve(), comm)
        if isinstance(outcome, _Refusal):
            raise CheckpointError(f"{path} cannot be used: {outcome}; name another one, or their directory")
        return outcome
    names = on_rank_0(comm, what, lambda: [str(item) for item in reversed(committed(of_run(path)))], CheckpointError)
    refusals = []
    for candidate in map(Path, names):
        outcome = _inspect(candidate, comm)
        if not isinstance(outcome, _Refusal):
            return outcome
        refusals.append(f"{candidate.name}: {outcome}")
        if comm.rank == 0:
            _set_aside(candidate, outcome)
    set_aside = on_rank_0(comm, what, lambda: [item.name for item in quarantined(of_run(path))], CheckpointError)
    if not names and not set_aside:
        raise NoCheckpointError(f"there is no checkpoint in {path}")
    reasons = "; ".join(refusals or set_aside)
    raise CheckpointError(f"no checkpoint in {path} verifies ({reasons}); restore one, or start in another directory")


@dataclass(frozen=True)
class _Refusal:
    """Why a checkpoint is not used; ``why`` is a word for its new name, empty where it merely could not be read."""

    file: str
    reason: str
    why: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


def _inspect(path: Path, comm: Communicator) -> CheckpointReader | _Refusal:
    """All checks of one checkpoint, its files dealt out to the ranks; the same outcome on every rank."""
    loaded: list[Manifest] = []

    def inspect() -> dict[str, Any]:
        try:
            manifest = load_manifest(path)
            loaded.append(manifest)
            if comm.rank == 0:
                check_files(path, manifest)
            share = manifest.files[comm.rank :: comm.world_size]
            parts = [list(scan_file(path, manifest, file).items()) for file in share]
        except DamageError as damage:
            return {"file": damage.file, "reason": damage.reason, "why": damage.why}
        except OSError as error:
            return {"file": ".", "reason": f"rank {comm.rank} cannot read it: {describe(error)}", "why": ""}
        return {"digest": manifest.digest, "parts": parts}

    reports = on_every_rank(comm, f"verifying {path}", inspect, CheckpointError)
    refusals = [_Refusal(**report) for report in reports if "reason" in report]
    if refusals:
        return next((refusal for refusal in refusals if refusal.why), refusals[0])
    for rank, report in enumerate(reports):
        if report["digest"] != reports[0]["digest"]:
            raise CheckpointError(
                f"{path} is not the same directory on ranks 0 and {rank} (manifests {reports[0]['digest'][:12]} and "
                f"{report['digest'][:12]}); checkpoints lie on a file system that all ranks share"
            )
    try:
        check_fingerprints(loaded[0], (dict(part) for report in reports for part in report["parts"]))
    except DamageError as damage:
        return _Refusal(damage.file, damage.reason, damage.why)
    if comm.rank == 0:
        logger.info("checkpoint: using %s (saved %s)", path, loaded[0].saved_at)
    return CheckpointReader(path, loaded[0])


def _set_aside(path: Path, refusal: _Refusal) -> None:
    logger.warning("checkpoint %s refused: %s", path, refusal)
    if refusal.why:
        try:
            quarantine(path, refusal.why)
        except OSError as error:  # a load works from a read-only file system too
            logger.warning("checkpoint %s could not be set aside: %s", path, describe(error))
