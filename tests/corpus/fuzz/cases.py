"""What a case of the fuzz is, and how hypothesis draws one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from tests.corpus.fuzz.loops import Loop, Step
from tests.corpus.fuzz.models import KINDS, SMOOTH, Model, Part

PLACES = [*[("native", stage) for stage in (0, 1, 2, 3) * 2], ("fsdp2", 2), ("fsdp2", 3), ("ddp", 0)]
SLOW = [("deepspeed", stage) for stage in (0, 1, 2, 3)]  # ten times as slow to start


OPTIONS: list[tuple[str, Any]] = [("reproducible", True), ("offload", "cpu")]
SHARDED: list[tuple[str, Any]] = [("prefetch", 0), ("prefetch", 2), ("reshard_after_forward", False)]
"""Options of ``native``, and those of its stage 3."""


@dataclass(frozen=True)
class Place:
    """Where a case trains, with the number of its steps there; the next place loads what it has saved.

    Attributes:
        options: of the engine's record.
    """

    engine: str = "native"
    stage: int = 0
    ranks: int = 1
    steps: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def shares_modules(self) -> bool:
        """Whether all ranks must run the same modules: each forward or backward is a collective."""
        return self.stage >= (2 if self.engine in ("fsdp2", "deepspeed") else 3)


@dataclass(frozen=True)
class FuzzCase:
    """A model, a loop, and one or two places that train it in turn."""

    model: Model = field(default_factory=Model)
    loop: Loop = field(default_factory=Loop)
    places: tuple[Place, ...] = (Place(),)
    precision: str = "fp32"

    def takes_writes(self, step: int) -> bool:
        """Whether the place of a step takes over what is written outside of ``modify_weights``."""
        for place in self.places:
            if step < place.steps:
                return place.stage < 3 and place.engine != "fsdp2" and self.precision == "fp32"
            step -= place.steps
        raise IndexError(step)


def _indices() -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(0, 3)


@st.composite
def models(draw: Any, precision: str) -> Model:
    kinds = st.sampled_from(KINDS if precision == "fp32" else SMOOTH)
    part = st.builds(
        Part,
        kind=kinds,
        inner=st.sampled_from((1, 2, 3, 5) if precision == "fp32" else (16,)),
        frozen=st.sampled_from(("", "", "", "all", "weight")),
        again=_indices() if draw(st.booleans()) else st.none(),
        tied=_indices(),
    )
    return Model(
        dim=draw(st.sampled_from((1, 2, 3, 4, 5, 8) if precision == "fp32" else (16,))),
        parts=tuple(draw(st.lists(part, min_size=1, max_size=5))),
        tokens=draw(st.booleans()),
        tied_head=draw(st.booleans()),
        container=draw(st.sampled_from(("ModuleList", "Sequential", "attributes"))),
        unused=draw(st.booleans()),
        dtype=draw(st.sampled_from(("float32", "float32", "bfloat16"))),
    )


@st.composite
def _steps(draw: Any, shares_modules: bool, is_smooth: bool) -> Step:
    num = draw(st.sampled_from((2, 4, 6)))
    weights = draw(st.lists(st.sampled_from((1, 2, 3, 5, 0)), min_size=num, max_size=num))
    if not any(weights):
        weights[-1] = 1
    uses = draw(st.lists(st.integers(0, 2), min_size=1, max_size=1 if shares_modules else 3))
    bad = None
    if is_smooth and draw(st.sampled_from((False, False, False, True))):
        index = draw(st.sampled_from([index for index, weight in enumerate(weights) if weight]))
        bad = index, draw(st.sampled_from(("loss", "gradient")))
    actions = ("", "", "", "eval", "write", "write in place", "rollback", "average")
    overrides = st.tuples(st.sampled_from((0.5, 2.0)), st.sampled_from((0.5, 2.0)))
    return Step(
        weights=tuple(weights),
        uses=tuple(uses),
        bad=bad,
        before=draw(st.sampled_from(actions)),
        overrides=draw(st.none() | st.none() | overrides),
    )


@st.composite
def _places(draw: Any, kinds: Sequence[tuple[str, int]]) -> Place:
    engine, stage = draw(st.sampled_from(kinds))
    options: tuple[tuple[str, Any], ...] = ()
    if engine == "native" and draw(st.booleans()):
        options = (draw(st.sampled_from(OPTIONS + SHARDED * (stage == 3))),)
    return Place(engine, stage, draw(st.sampled_from((1, 2))), draw(st.integers(1, 2)), options)


@st.composite
def cases(draw: Any, precisions: tuple[str, ...] = ("fp32", "fp32", "fp32", "bf16", "fp8")) -> FuzzCase:
    """Draws a case; the simplest is one Linear for one step on one rank of ``native``."""
    precision = draw(st.sampled_from(precisions))
    kinds = PLACES if precision == "fp8" or draw(st.integers(0, 7)) else SLOW
    places = tuple(draw(st.lists(_places(kinds), min_size=1, max_size=2)))
    shares_modules = any(place.shares_modules for place in places)
    steps = _steps(shares_modules, True)
    loop = Loop(
        steps=tuple(draw(steps) for place in places for _ in range(place.steps)),
        optimizer=draw(st.sampled_from(("sgd", "adamw"))) if precision == "fp32" else "sgd",
        schedule=draw(st.sampled_from(("constant", "linear", "cosine"))),
        clip=draw(st.sampled_from((None, 0.1, 1.0, 100.0))),
        loss_scale=draw(st.sampled_from((None, 4.0))),
        ema=draw(st.booleans()),
    )
    return _made_possible(FuzzCase(draw(models(precision)), loop, places, precision))


def _made_possible(case: FuzzCase) -> FuzzCase:
    """Takes out what dtrain refuses by name, so that an error is a finding."""
    steps = [
        replace(step, before="write") if step.before == "write in place" and not case.takes_writes(index) else step
        for index, step in enumerate(case.loop.steps)
    ]
    places = [
        replace(place, options=()) if place.options == (OPTIONS[1],) and not _offloads(case, place) else place
        for place in case.places
    ]
    case = replace(case, loop=replace(case.loop, steps=tuple(steps)), places=tuple(places))
    if any((place.engine, place.stage) == ("deepspeed", 3) for place in places):
        # neither parameters without dimensions nor without elements
        parts = [replace(part, inner=3) if part.kind == "scale" else part for part in case.model.parts]
        return replace(case, model=replace(case.model, parts=tuple(parts), unused=False))
    return case


def _offloads(case: FuzzCase, place: Place) -> bool:
    return place.stage > 0 and case.precision != "fp8"
