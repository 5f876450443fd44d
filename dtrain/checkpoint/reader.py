"""Loading: the ranks agree on the newest checkpoint that verifies, read their intervals, and check fingerprints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint.directory import (
    NoCheckpointError,
    checkpoints_dir,
    committed_checkpoints,
    is_single_checkpoint,
    quarantine,
    quarantined_checkpoints,
)
from dtrain.checkpoint.format.checked_file import DamageError, read_into
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
from dtrain.checkpoint.format.safetensors_file import StoredTensor
from dtrain.checkpoint.names import plain_names
from dtrain.checkpoint.read_targets import PartialRead, ReadTarget, fill, partial_reads
from dtrain.checkpoint.shared_folder import is_unseen, reopen_folders, until_seen
from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.consensus import describe, on_every_rank, on_rank_0
from dtrain.distributed.logging import logger
from dtrain.errors import CheckpointError, nearest
from dtrain.local_paths import local_path


class CheckpointReader:
    """Reads a verified checkpoint; call ``check_fingerprints`` on the loaded tensors after reading.

    Attributes:
        path: its directory.
        step: number of attempted steps at the save.
        state: the snapshot's state, plain JSON.
        training: the state of the engine that saved it, checked; None: no engine did.
        tensors: all logical tensors with name, kind, dtype and shape.
    """

    def __init__(self, path: Path, manifest: Manifest, comm: Communicator | None = None) -> None:
        self.path = path
        self._comm = comm  # the ranks that read it, one of which has verified each file; None: this process alone
        self.step = manifest.step
        self.state: Mapping[str, Any] = manifest.state
        self.tensors: tuple[TensorEntry, ...] = manifest.tensors
        self.training = manifest.training
        self._manifest = manifest
        self._index = manifest.index
        self._files = {file.name: file for file in manifest.files}
        self._stored: dict[str, dict[str, StoredTensor]] = {}

    def take_names(self, names: Iterable[str]) -> None:
        """Gives the tensors the ``names`` of a model, in which other wrappers may stand than in the saved ones."""
        own = {plain: name for name, plain in plain_names(names).items()}
        saved = plain_names({tensor.name for tensor in self.tensors})
        self.tensors = tuple(replace(t, name=own.get(saved[t.name], t.name)) for t in self.tensors)
        self._index = {(tensor.kind, tensor.name): tensor for tensor in self.tensors}

    def require_kinds(self, known: Iterable[str]) -> None:
        """Raises ``CheckpointError`` if the checkpoint holds a kind of tensor that is not among ``known``."""
        valid = set(known)
        for tensor in self.tensors:
            if tensor.kind not in valid:
                raise CheckpointError(
                    f"{self.path} holds {tensor.label}, of a kind that this run does not know (known: "
                    f"{', '.join(sorted(valid))}); load it with the optimizer (ema: ema.decay) and dtrain that wrote it"
                )

    def read(self, kind: str, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Returns the row-major elements [start, stop) of ``name``, of a ``kind`` such as ``master``; reads no others.

        Returns:
            [stop - start] on the CPU, in the saved dtype; ``stop`` is the tensor's end by default.

        Raises:
            CheckpointError: no such tensor or interval, or the file changed since it was verified.
        """
        entry = self._entry(kind, name)
        stop = entry.numel if stop is None else stop
        self._require_interval(entry, start, stop)
        result = torch.empty(stop - start, dtype=entry.dtype)
        self.read_into([ReadTarget(kind, name, start, result)])
        return result

    def read_into(self, targets: Iterable[ReadTarget]) -> None:
        """Fills all targets; reads no other bytes and opens each file once.

        Contiguous CPU memory of the saved dtype is read into directly. For any other tensor the bytes pass through a
        staging buffer of at most 4 MiB and are cast if the dtypes differ.

        Raises:
            CheckpointError: no such tensor or interval, or a file changed since it was verified.
        """
        by_file: dict[str, list[PartialRead]] = {}
        for target in targets:
            entry = self._entry(target.kind, target.name)
            self._require_interval(entry, target.start, target.start + target.data.numel())
            for part in partial_reads(entry, target.start, target.data.detach()):
                by_file.setdefault(part.chunk.file, []).append(part)
        for name, parts in by_file.items():
            self._read_file(self._files[name], parts)

    def _entry(self, kind: str, name: str) -> TensorEntry:
        entry = self._index.get((kind, name))
        if entry is None:
            hint = nearest(name, (tensor.name for tensor in self.tensors if tensor.kind == kind))
            raise CheckpointError(f"{self.path} holds no {kind}:{name}{hint}")
        return entry

    def _require_interval(self, entry: TensorEntry, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= entry.numel:
            raise CheckpointError(
                f"{self.path}: [{start}, {stop}) is not an interval of {entry.label} ({entry.numel} elements)"
            )

    def _read_file(self, file: FileEntry, parts: Iterable[PartialRead]) -> None:
        try:
            with ExitStack() as opened:
                descriptor = self._open(file, opened)
                if file.name not in self._stored:
                    self._stored[file.name] = read_stored_tensors(descriptor, self._manifest, file)
                # read in file order, whatever the order of the targets
                begins = {key: stored.begin for key, stored in self._stored[file.name].items()}
                for part in sorted(parts, key=lambda part: begins[part.chunk.key] + part.offset):
                    begin = begins[part.chunk.key]

                    def read(offset: int, target: memoryview, begin: int = begin) -> None:
                        if self._comm is not None:
                            self._comm.schedule.progress.advance()
                        read_into(descriptor, file.name, begin + offset, target)

                    fill(part, read)
        except DamageError as damage:
            raise CheckpointError(f"{self.path / damage.file} changed while it was read: {damage.reason}") from damage
        except OSError as error:
            raise CheckpointError(f"{self.path / file.name} cannot be read: {describe(error)}") from error

    def _open(self, file: FileEntry, opened: ExitStack) -> int:
        def enter() -> int:
            return opened.enter_context(open_file(self.path, file))

        comm = self._comm
        if comm is None or comm.world_size == 1:
            return enter()
        claim = f"another rank has read with {file.name}"
        return until_seen(enter, self.path, f"rank {comm.rank}", claim, comm.schedule.progress.advance)

    def check_fingerprints(self, shards: Iterable[TensorShard], comm: Communicator) -> None:
        """Checks the loaded tensors against the saved fingerprints; collective, any device and world size.

        Args:
            shards: this rank's shards of the live tensors. The shards of all ranks tile every tensor of each kind among
                them, so a tensor that several ranks hold comes from one of them.
            comm: the ranks that loaded.

        Raises:
            CheckpointError: on every rank; names the tensor that differs, is not covered or is not in the checkpoint.
        """
        what = f"checking what was loaded from {self.path}"
        reports = on_every_rank(comm, what, lambda: self._fingerprints(shards), CheckpointError)
        loaded: dict[tuple[str, str], list[tuple[int, int, int, int]]] = {}
        for rank, report in enumerate(reports):
            for kind, name, start, stop, part in report:
                loaded.setdefault((kind, name), []).append((start, stop, rank, part))
        kinds = {kind for kind, _ in loaded}
        for entry in self.tensors:
            if entry.kind in kinds:
                self._compare(entry, sorted(loaded.get((entry.kind, entry.name), [])))

    def _fingerprints(self, shards: Iterable[TensorShard]) -> list[list[Any]]:
        # rows of [kind, name, start, stop, fingerprint]
        labels: list[list[Any]] = []

        def checked() -> Iterator[tuple[Tensor, int]]:
            for shard in shards:
                entry = self._entry(shard.kind, shard.name)
                if (shard.dtype, shard.shape) != (entry.dtype, entry.shape):
                    raise CheckpointError(
                        f"{entry.label} was saved as {entry.dtype} {list(entry.shape)}, "
                        f"and is now {shard.dtype} {list(shard.shape)}"
                    )
                labels.append([shard.kind, shard.name, shard.start, shard.stop])
                yield shard.data, shard.start

        parts = list(fingerprints(checked()))
        return [[*label, part] for label, part in zip(labels, parts, strict=True)]

    def _compare(self, entry: TensorEntry, parts: Sequence[tuple[int, int, int, int]]) -> None:
        intervals = [(start, stop, f"rank {rank}") for start, stop, rank, _ in parts if start < stop]
        check_tiling(f"after loading {self.path}, {entry.label}", entry.numel, intervals)
        total = sum(part for *_, part in parts) & MASK
        if total != entry.fingerprint:
            raise CheckpointError(
                f"after loading {self.path}, {entry.label} differs from what was saved (fingerprint {total:016x}, "
                f"expected {entry.fingerprint:016x}); load again, and check these hosts' memory"
            )


def open_newest(path: Path, comm: Communicator) -> CheckpointReader:
    """Opens the newest checkpoint that verifies; collective, and all ranks open the same one.

    A damaged checkpoint causes a warning and is renamed to ``bad-step-...`` after all ranks have closed it. One that
    merely cannot be read (permissions, a failing mount) causes a warning and keeps its name. Every file is read
    completely, by one rank.

    Args:
        path: a run directory, a directory of checkpoints, or one checkpoint; no other one is tried for the latter.
        comm: the ranks that load.

    Raises:
        NoCheckpointError: no checkpoint exists, neither good nor damaged.
        CheckpointError: none verifies, or the requested one does not; names file and reason.
    """
    path = local_path(path, "the path of checkpoints")
    reopen_folders(path)
    what = f"opening {path}"
    if on_rank_0(comm, what, lambda: is_single_checkpoint(path), CheckpointError):
        outcome = _inspect(path.resolve(), comm)
        if isinstance(outcome, DamageError):
            raise CheckpointError(f"{path} cannot be used: {outcome}; name another one, or their directory")
        return outcome
    directory = checkpoints_dir(path)
    names = on_rank_0(
        comm, what, lambda: [str(item) for item in reversed(committed_checkpoints(directory))], CheckpointError
    )
    refusals = []
    for candidate in map(Path, names):
        outcome = _inspect(candidate, comm)
        if not isinstance(outcome, DamageError):
            return outcome
        refusals.append(f"{candidate.name}: {outcome}")
        if comm.rank == 0:  # all ranks have closed its files: _inspect has exchanged their reports
            _quarantine(candidate, outcome)
    damaged = on_rank_0(comm, what, lambda: [item.name for item in quarantined_checkpoints(directory)], CheckpointError)
    if not names and not damaged:
        raise NoCheckpointError(f"there is no checkpoint in {path}")
    reasons = "; ".join(refusals or damaged)
    raise CheckpointError(f"no checkpoint in {path} verifies ({reasons}); restore one, or start in another directory")


def _inspect(path: Path, comm: Communicator) -> CheckpointReader | DamageError:
    """Runs all checks of one checkpoint, its files split over the ranks; returns the same result on every rank.

    A ``DamageError`` is returned if the checkpoint must not be used. Its tag is empty if it merely cannot be read.
    """
    loaded: list[Manifest] = []
    what = f"verifying {path}"

    def inspect() -> dict[str, Any]:
        manifest = load_manifest(path)
        loaded[:] = [manifest]
        if comm.rank == 0:
            check_files(path, manifest)
        share = manifest.files[comm.rank :: comm.world_size]
        advance = comm.schedule.progress.advance
        parts = [list(scan_file(path, manifest, file, before_block=advance).items()) for file in share]
        return {"digest": manifest.digest, "parts": parts}

    def report(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return read()
        except DamageError as damage:
            refusal, unseen = {"file": damage.file, "reason": damage.reason, "tag": damage.tag}, is_unseen(damage)
        except OSError as error:
            reason = f"rank {comm.rank} cannot read it: {describe(error)}"
            refusal, unseen = {"file": ".", "reason": reason, "tag": ""}, is_unseen(error)
        return {"refusal": refusal, "unseen": unseen}

    reopen_folders(path)
    reports = on_every_rank(comm, what, lambda: report(inspect), CheckpointError)
    if "refusal" not in reports[0] and any(other.get("unseen") for other in reports):
        own: dict[str, Any] = reports[comm.rank]

        def look_again() -> dict[str, Any]:  # [Note: cached names]
            if not own.get("unseen"):
                return own
            return report(
                lambda: until_seen(inspect, path, f"rank {comm.rank}", "rank 0 reads", comm.schedule.progress.advance)
            )

        reports = on_every_rank(comm, what, look_again, CheckpointError)
    refusals = [DamageError(**other["refusal"]) for other in reports if "refusal" in other]
    if refusals:  # damage that one rank has proved counts more than a file that another one cannot read
        return next((refusal for refusal in refusals if refusal.tag), refusals[0])
    for rank, other in enumerate(reports):
        if other["digest"] != reports[0]["digest"]:
            raise CheckpointError(
                f"{path} is not the same directory on ranks 0 and {rank} (manifests {reports[0]['digest'][:12]} and "
                f"{other['digest'][:12]}); checkpoints must be on a file system that all ranks share"
            )
    try:
        check_fingerprints(loaded[0], (dict(part) for other in reports for part in other["parts"]))
    except DamageError as damage:
        return damage
    if comm.rank == 0:
        logger.info("checkpoint: using %s (saved %s)", path, loaded[0].saved_at)
    return CheckpointReader(path, loaded[0], comm)


def _quarantine(path: Path, refusal: DamageError) -> None:
    logger.warning("checkpoint %s refused: %s", path, refusal)
    if refusal.tag:
        try:
            quarantine(path, refusal.tag)
        except OSError as error:  # a load works from a read-only file system too
            logger.warning("checkpoint %s could not be quarantined: %s", path, describe(error))
