"""Every error dtrain raises on purpose.

Each message says what was expected, what was got (names, shapes, ranks, values) and what to do about it, so that the
traceback is never the only help. The class decides the exit code of the command line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DtrainError(Exception):
    """Base of all errors raised by dtrain on purpose."""

    exit_code = 1


class ConfigError(DtrainError):
    """A configuration that cannot be honoured; raised before any process group exists wherever possible."""

    exit_code = 2


class ContractError(DtrainError):
    """A live tensor does not have the dtype or placement that the precision contract states."""


class ModelError(DtrainError):
    """The model cannot be trained as it stands (a parameter on ``meta``, an unsupported dtype, no parameter at all)."""


class UsageError(DtrainError):
    """The engine was called out of order (``step`` without ``backward``, a second ``backward`` on one micro-batch)."""


class DivergenceError(DtrainError):
    """The ranks no longer do the same thing (config, step, data or order of collectives); nothing was updated."""


class CommunicationError(DtrainError):
    """A collective failed: another rank has died, hangs, or issued another collective."""


class LaunchError(DtrainError):
    """A rank that this command has started ended before its work was done."""


class NonFiniteError(DtrainError):
    """Too many consecutive steps were skipped; the message carries the diagnosis.

    Attributes:
        outcome: the :class:`dtrain.StepOutcome` of the last of them.
    """

    def __init__(self, message: str, outcome: object = None) -> None:
        super().__init__(message)
        self.outcome = outcome


class BenchError(DtrainError):
    """A measurement could not be taken: a contender's process failed, or a results file cannot be read."""


class RankError(DtrainError):
    """A process that dtrain started as a rank failed; the message has its last words."""


class ParityError(DtrainError):
    """Engines could not be compared: what they are compared with failed itself."""


class CheckpointError(DtrainError):
    """A checkpoint could not be written, or none that verifies could be read; names the file at fault."""


_LISTED = 20  # names in a message: the modules of a model may be thousands


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint ``; did you mean 'x'?`` with the valid name closest to ``name``, or the list of valid names."""
    names = sorted(set(valid))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    shown = names[:_LISTED] + ["..."] * (len(names) > _LISTED)
    return f"; valid: {', '.join(shown)}" if names else ""
