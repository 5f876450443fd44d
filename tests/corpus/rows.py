"""The rows of the corpus: a published fault of another trainer, or an assertion of its tests, with a check of ours.

A row is a check of the matrix of engines (``tests/engines/matrix.py``) with a source. The check asserts what is right.
An engine that does not do it must refuse it by name, with the words that the row states; so the table of
``docs/trust/silent-faults.md`` follows from the rows, and is true if their tests pass.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, Literal

import pytest

from dtrain.errors import DtrainError
from tests.engines.matrix import CHECKS, Case, Trial, check

Run = Callable[[Trial], Any]


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        source: the repository with the number of the thread, or with the file and test of an assertion.
        says: the fault, or what is asserted, in one sentence.
        peers: which trainers have or had the fault, and in which versions if the thread says so.
        check: the name of the check in the matrix.
        refused: words of the error by engine (``fsdp2``), or by engine and stage (``native-3``).
        skipped: why an engine is left out, by the same keys.
    """

    kind: Literal["fault", "assertion"]
    source: str
    says: str
    peers: str = ""
    check: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    def outcome(self, case: Case) -> str:
        """``right``, or ``refused: `` with words of the message."""
        message = _of(self.refused, case)
        return "right" if message is None else f"refused: {message}"


ROWS: list[Row] = []


def fault(source: str, says: str, *, peers: str, **options: Any) -> Callable[[Run], Run]:
    """Makes a row of a function or of a check of the matrix.

    Args:
        source: as in ``Row``; ``says`` and ``peers`` too.
        options: ``refused`` and ``skipped`` as in ``Row``, and the axes of ``check``, by default all engines with all
            their stages on 1, 2 and 3 ranks. A check keeps its own axes, a row its refusals too.
    """
    return partial(_row, Row("fault", source, says, peers), **options)


def assertion(source: str, says: str, **options: Any) -> Callable[[Run], Run]:
    """As ``fault``, for what a test of another trainer asserts."""
    return partial(_row, Row("assertion", source, says), **options)


def _row(
    row: Row,
    run: Run,
    *,
    refused: Mapping[str, str] = {},
    skipped: Mapping[str, str] = {},
    ranks: Sequence[int] = (2, 1, 3),
    unless: Callable[[Case], bool] = lambda case: False,
    **axes: Any,
) -> Run:
    name = run.__name__
    row = replace(row, check=name, refused=refused, skipped=skipped)
    if name in CHECKS:
        assert not axes, "the check has its axes"
        same = next((other for other in ROWS if other.check == name), row)
        ROWS.append(replace(row, refused=same.refused, skipped=same.skipped))
        return run
    ROWS.append(row)

    @wraps(run)
    def required(trial: Trial) -> Any:
        message = _of(refused, trial.case)
        if message is None:
            return run(trial)
        with pytest.raises(DtrainError, match=re.escape(message)):
            run(trial)
        return None

    def leaves_out(case: Case) -> bool:
        return unless(case) or _of(skipped, case) is not None

    turn = len(ROWS) % len(ranks)  # so that the first numbers of ranks, which a default run takes, differ
    return check(ranks=(*ranks[turn:], *ranks[:turn]), unless=leaves_out, **axes)(required)


def _of(words: Mapping[str, str], case: Case) -> str | None:
    return words.get(f"{case.engine}-{case.stage}", words.get(case.engine))


def import_all(package: str) -> None:
    """Imports the modules of a package, each of which registers its rows."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
