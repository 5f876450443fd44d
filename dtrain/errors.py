"""The exceptions that dtrain raises on purpose.

A message states what was expected, what was found (names, shapes, ranks, values) and what to do. The class decides the
exit code of the command line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DtrainError(Exception):
    """Base class of all errors that dtrain raises on purpose."""

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


class CommunicationError(DtrainError):
    """A collective failed because another rank died, hangs, or issued a different collective."""


class LaunchError(DtrainError):
    """A rank started by this command exited before its work was done."""


class NonFiniteError(DtrainError):
    """Too many consecutive steps were skipped; the message contains the diagnosis.

    Attributes:
        outcome: the :class:`dtrain.StepOutcome` of the last skipped step.
    """

    def __init__(self, message: str, outcome: object = None) -> None:
        super().__init__(message)
        self.outcome = outcome


class BenchError(DtrainError):
    """A benchmark case failed in its process, or a results file could not be read."""


class AcceptError(DtrainError):
    """The acceptance of a machine failed: its device could not be described or profiled."""


class RankError(DtrainError):
    """A rank process started by dtrain failed; the message contains the end of its stderr."""


class ParityError(DtrainError):
    """The engines could not be compared because the reference run failed."""


class ProbeError(DtrainError):
    """The number formats could not be compared because FP32, their reference, failed."""


class CheckpointError(DtrainError):
    """A checkpoint could not be written, or no valid one could be read; the message names the file."""


_LISTED = 20  # names in a message: a model may have thousands of modules


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns the hint ``; did you mean 'x'?`` with the closest valid name, or the list of valid names."""
    names = sorted(set(valid))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    shown = names[:_LISTED] + ["..."] * (len(names) > _LISTED)
    return f"; valid: {', '.join(shown)}" if names else ""
