"""One matrix of engine, stage, precision, ranks and variant, in which a feature is a function of about 40 lines.

A check is a function of a ``Trial`` in a module of ``tests/engines/checks``. It runs on every rank of a case, and
asserts; what it returns must be equal on all ranks. ``check`` says on which axes it depends.
"""

from __future__ import annotations

import importlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from torch import nn

import dtrain
from dtrain.config.capabilities import CAPABILITIES
from tests.engines import helpers
from tests.helpers.ranks import run_ranks

ENGINES = tuple(CAPABILITIES)


@dataclass(frozen=True)
class Case:
    """A point of the matrix.

    Attributes:
        variant: the name of one of the check's sets of options.
        source: the case whose checkpoint is loaded, if the check begins with one.
    """

    engine: str
    stage: int
    precision: str = "fp32"
    ranks: int = 2
    variant: str = ""
    source: Case | None = None

    def __str__(self) -> str:
        ranks = "1rank" if self.ranks == 1 else f"{self.ranks}ranks"
        words = [self.variant, self.engine, str(self.stage), self.precision, ranks]
        if self.source is not None:
            words.append(f"from-{self.source.engine}-{self.source.stage}-on-{self.source.ranks}")
        return "-".join(filter(None, words))

    @property
    def exists(self) -> bool:
        """Whether the engine has the stage and the precision, here on a CPU, and that of the source too."""
        if self.source is not None and not replace(self.source, precision=self.precision).exists:
            return False
        engine = CAPABILITIES[self.engine]
        has = engine.supports("zero_stage", self.stage) and engine.supports("precision", self.precision)
        return has and (self.engine, self.precision) != ("deepspeed", "fp16")

    @property
    def values(self) -> list[Any]:
        """Its value on each axis: an engine with its stage, and the others."""
        axes = {name: getattr(self, name) for name in ("precision", "ranks", "variant", "source")}
        return [(self.engine, self.stage), *axes.items()]


def every_value(case: Case) -> set[Any]:
    """What a default run has seen once: each engine, ``native`` with and without sharded weights, each other value."""
    _, *others = case.values
    return {(case.engine, case.engine == "native" and case.stage == 3), *others}


def every_pair(case: Case) -> set[Any]:
    """What an exhaustive run has seen once: each stage on each number of ranks, each engine with each other value."""
    place, *others = case.values
    return {(place if axis == "ranks" else case.engine, axis, value) for axis, value in others}


def covering(
    cases: Sequence[Case], parts: Callable[[Case], set[Any]], others: Counter[Any], chosen: Sequence[Case] = ()
) -> list[Case]:
    """Adds to those that are chosen until they have all parts.

    It is always the case that adds most, of equals that of the rarest values, and on the first number of ranks.
    ``others`` is how often other checks have used a stage, so that they alternate over the stages of an engine.
    """
    chosen = list(chosen)
    parts_of = {case: parts(case) for case in cases}
    missing = set().union(*parts_of.values()).difference(*(parts_of[case] for case in chosen))
    balanced = {case: [value for value in case.values if value[0] != "ranks"] for case in cases}
    uses = Counter(value for case in chosen for value in balanced[case])
    uses.update(others)
    while missing:
        best = max(cases, key=lambda case: (len(missing & parts_of[case]), -sum(uses[v] for v in balanced[case])))
        missing -= parts_of[best]
        uses.update(balanced[best])
        chosen.append(best)
    return chosen


@dataclass
class Trial:
    """A case on one of its ranks.

    Attributes:
        folder: shared by all ranks, empty at first; a source has the folder of its target.
        saved: what the source has returned.
    """

    case: Case
    rank: int
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    saved: Any = None

    @property
    def ranks(self) -> int:
        return self.case.ranks

    def start(self, **options: Any) -> Any:
        """The odd model under the engine of the case, with the options of its variant and these."""
        options = {"precision": self.case.precision, **self.options, **options}
        return helpers.start(self.case.engine, self.case.stage, **options)

    def engine(self, model: nn.Module, **options: Any) -> Any:
        """The engine of the case for ``model``, with these options."""
        case = {"engine": self.case.engine, "zero_stage": self.case.stage, "precision": self.case.precision, "seed": 0}
        return dtrain.initialize(model, **case | options)


@dataclass(frozen=True)
class Check:
    """A registered function and all its cases; the rest is as for ``check``."""

    run: Callable[[Trial], Any]
    cases: list[Case]
    variants: Mapping[str, Mapping[str, Any]]
    source: Callable[[Trial], Any] | None
    equals: Callable[[Case], Case] | None

    def require(self, case: Case) -> None:
        """Runs the case, and compares what it returns with the case that it must equal."""
        found = _outcome(self, case)
        if self.equals is not None:
            want = _reference(self.run.__name__, self.equals(case))
            assert found == want, f"not as {self.equals(case)}: {_differing(found, want)}"


CHECKS: dict[str, Check] = {}


def check(
    *,
    engines: Sequence[str] = ENGINES,
    stages: Sequence[int] = (0, 1, 2, 3),
    precisions: Sequence[str] = ("fp32",),
    ranks: Sequence[int] = (2,),
    variants: Mapping[str, Mapping[str, Any]] = {"": {}},
    sources: Sequence[Case] = (),
    source: Callable[[Trial], Any] | None = None,
    equals: Callable[[Case], Case] | None = None,
    unless: Callable[[Case], bool] = lambda case: False,
) -> Callable[[Callable[[Trial], Any]], Callable[[Trial], Any]]:
    """Registers a function for the product of the axes.

    A default run takes the few cases of ``every_value``; an exhaustive run adds those of ``every_pair``.

    Args:
        engines: those that have the feature.
        stages: those on which it may depend; an engine takes the ones that it has.
        precisions: those on which it may depend.
        ranks: numbers of ranks, first the one on which most is decided.
        variants: options of ``Trial.start`` by name.
        sources: cases of which each leaves a checkpoint; they get the target's precision and variant.
        source: the function that a source runs.
        equals: gives the case whose result must be equal.
        unless: tells a case that there is not.
    """

    def register(run: Callable[[Trial], Any]) -> Callable[[Trial], Any]:
        axes = product(engines, stages, precisions, ranks, variants, sources or (None,))
        found = (Case(*point) for point in axes)
        cases = [case for case in found if case.exists and not unless(case)]
        assert run.__name__ not in CHECKS
        CHECKS[run.__name__] = Check(run, cases, variants, source, equals)
        return run

    return register


def one_case(case: Case) -> set[Any]:
    """What a run has seen once that takes one case of a check, by turns of another engine and stage."""
    return {""}


Parts = Callable[[Case], set[Any]]


def tiers(
    package: str,
    default_parts: Parts = every_value,
    exhaustive_parts: Parts = every_pair,
    used: Mapping[tuple[str, int], int] = {},
) -> Iterator[tuple[str, Case, bool]]:
    """Yields the name of each check of ``package``, its cases, and whether only an exhaustive run takes the case.

    A default run sees all ``default_parts`` once, an exhaustive run besides all ``exhaustive_parts``. ``used`` is how
    often an engine and stage count as used at first, so that slow ones have fewer turns.
    """
    uses: Counter[Any] = Counter(used)
    for name, check in CHECKS.items():
        if not check.run.__module__.startswith(package):
            continue
        default = covering(check.cases, default_parts, uses)
        for place, case in enumerate(covering(check.cases, exhaustive_parts, uses, default)):
            yield name, case, place >= len(default)
        uses.update(case.values[0] for case in default)


def _run(rank: int, world: int, module: str, name: str, case: Case, folder: Path, saved: Any, is_source: bool) -> Any:
    importlib.import_module(module)  # registers it, in a resident process too
    check = CHECKS[name]
    run: Any = check.source if is_source else check.run
    return run(Trial(case, rank, folder, check.variants[case.variant], saved))


def _outcome(check: Check, case: Case) -> Any:
    """What the check returns, on all ranks the same."""
    place, saved = (check.run.__module__, check.run.__name__), None
    with tempfile.TemporaryDirectory() as folder:
        if case.source is not None:
            source = replace(case.source, precision=case.precision, variant=case.variant)
            saved = run_ranks(source.ranks, _run, *place, source, Path(folder), None, True)[0]
        first, *others = run_ranks(case.ranks, _run, *place, case, Path(folder), saved, False)
    for other in others:
        assert first == other, f"the ranks disagree: {_differing(first, other)}"
    return first


@cache
def _reference(name: str, case: Case) -> Any:
    return _outcome(CHECKS[name], case)


def _differing(some: Any, others: Any) -> Any:
    """The keys of two dictionaries whose values differ; else both."""
    if isinstance(some, dict) and isinstance(others, dict):
        return sorted(str(key) for key in {*some, *others} if some.get(key) != others.get(key))
    return some, others
