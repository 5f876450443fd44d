"""The exceptions that dtrain raises on purpose.

A message states what was expected, what was found (names, shapes, ranks, values) and what to do. The class decides the
exit code of the command line.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class DtrainError(Exception):
    """Base class of all errors that dtrain raises on purpose; the command line exits with ``exit_code``."""

    exit_code = 1


class ConfigError(DtrainError):
    """A configuration is invalid or cannot be satisfied; raised before any process group exists if possible."""

    exit_code = 2


class ContractError(DtrainError):
    """A live tensor does not have the dtype or placement that the precision contract states."""


class ModelError(DtrainError):
    """The model cannot be trained: a parameter is on ``meta`` or has an unsupported dtype, or nothing is trainable."""


class UsageError(DtrainError):
    """The engine was called out of order (``step`` without ``backward``, or ``backward`` twice on a micro-batch)."""


class DivergenceError(DtrainError):
    """The ranks have diverged in config, step, data or order of collectives; nothing was updated."""


@dataclass(frozen=True)
class Corruption:
    """A tensor whose bits are not those that training wrote or computes.

    Attributes:
        ranks: those that hold it; several if their copies differ and nothing tells which of them is right.
        tensor: name of the parameter or buffer.
        kind: ``master``, an optimizer state such as ``exp_avg``, ``compute replica``, ``frozen``, ``buffer``, or of a
            repeated micro-batch ``loss``, ``output`` or ``gradient``.
        reason: the two things that differ.
    """

    ranks: tuple[int, ...]
    tensor: str
    kind: str
    reason: str

    def __str__(self) -> str:
        ranks = " or rank ".join(map(str, self.ranks))
        return f"{self.kind} of '{self.tensor}' on rank {ranks} ({self.reason})"


class CorruptionError(DtrainError):
    """Memory or arithmetic of a rank gave wrong bits; every rank raises the same one. Nothing was updated or saved.

    Attributes:
        corruptions: each ``Corruption`` that was found.
    """

    def __init__(self, message: str, corruptions: Sequence[Corruption] = ()) -> None:
        super().__init__(message)
        self.corruptions = tuple(corruptions)

    @classmethod
    def of_state(cls, step: int, corruptions: Sequence[Corruption]) -> CorruptionError:
        """Returns the error of an audit after ``step`` attempted steps, which found at least one corruption."""
        first, *others = corruptions
        more = f", and {len(others)} more: {'; '.join(map(str, others[:_LISTED]))}" if others else ""
        return cls(
            f"step {step}: the audit found changed bits: {first}{more}. Load the last checkpoint; this state is not "
            f"saved. The likely cause is the memory of that machine; the same shows if a program writes weights "
            f"through parameter.data, which dtrain cannot notice",
            corruptions,
        )


class CommunicationError(DtrainError):
    """A collective failed because another rank died, hangs, or issued a different collective."""


class LaunchError(DtrainError):
    """A rank started by this command exited before its work was done."""


class RestartError(DtrainError):
    """A run has failed too often without a newer checkpoint, so it does not start again."""


class NonFiniteError(DtrainError):
    """Too many consecutive steps were skipped; the message contains the diagnosis.

    Attributes:
        outcome: the ``dtrain.StepOutcome`` of the last skipped step.
    """

    def __init__(self, message: str, outcome: object = None) -> None:
        super().__init__(message)
        self.outcome = outcome


class BenchError(DtrainError):
    """A benchmark case failed in its process, or a results file could not be read."""


class RankError(DtrainError):
    """A rank process started by dtrain failed; the message contains the end of its stderr."""


class ParityError(DtrainError):
    """The engines could not be compared because the reference run failed."""


class ProbeError(DtrainError):
    """The number formats could not be compared because FP32, their reference, failed."""


class CheckpointError(DtrainError):
    """A checkpoint could not be written, or no valid one could be read; the message names the file."""


class DataError(DtrainError):
    """Training data is damaged, or is not what its index states; the message names the file and the place."""


class OutOfMemoryError(DtrainError):
    """A rank has no memory left; the message shows the plan of its memory and changes that make the run fit."""


class StorageError(DtrainError):
    """A file of a run could not be written because its disk is full or faulty; the message names the file."""


DISK_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Error numbers of a disk that is full or faulty, which are no mistake in the command."""


def is_disk_fault(error: BaseException) -> bool:
    """Returns whether an operation has failed because the disk is full or faulty."""
    return isinstance(error, OSError) and error.errno in DISK_FAULTS


def disk_fault(error: OSError, path: object = None) -> StorageError:
    """Returns the error for a disk fault; ``path`` is the file, if ``error`` does not name one."""
    file = error.filename or path or "a file of the run"
    fix = "check the disk" if error.errno == errno.EIO else "free some space"
    return StorageError(f"{file} cannot be written: {error.strerror} (errno {error.errno}); {fix}, or use another disk")


def directory_error(key: str, path: object, error: OSError) -> DtrainError:
    """Returns the error for a directory, named on the command line as ``key=path``, that cannot be created."""
    if is_disk_fault(error):
        return disk_fault(error, path)
    return ConfigError(f"{key}={path} cannot be created: {error.strerror}; choose another")


def one_line(reason: object) -> str:
    """Returns a text in one line; of an exception its type and message, of at most 400 characters."""
    if isinstance(reason, BaseException):
        return " ".join(f"{type(reason).__name__}: {reason}".split())[:400]
    return " ".join(str(reason).split())


_LISTED = 20  # names in a message: a model may have thousands of modules


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns the hint ``; did you mean 'x'?`` with the closest valid name, or the list of valid names."""
    names = sorted(set(valid))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    shown = names[:_LISTED] + ["..."] * (len(names) > _LISTED)
    return f"; valid: {', '.join(shown)}" if names else ""
