"""Trains a case of the fuzz both ways and says where they differ."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

from torch import Tensor

from tests.corpus.fuzz.cases import FuzzCase
from tests.corpus.fuzz.loops import Trained, by_engine, plain, start
from tests.corpus.fuzz.plants import PLANTS
from tests.helpers.ranks import RankFailure, run_ranks

LIMITS = {"bf16": 0.1, "fp8": 0.4}
"""How far the change of all masters in a step may be off, as a share of it."""
DIVERGED = 100.0
"""A loss above which roundings grow from step to step."""


def diverges(case: FuzzCase) -> bool:
    """Whether the training itself blows up, by plain torch."""
    return any(loss > DIVERGED for is_applied, loss, *_ in plain(case.model, case.loop).outcomes if is_applied)


def difference(case: FuzzCase, plant: str = "") -> str:
    """Returns the first difference between plain torch and the places of the case, or "".

    No case is one that dtrain refuses, so an error is a difference too.

    Args:
        case: what is trained.
        plant: the name of a fault that is planted into dtrain meanwhile.
    """
    want, first, masters = plain(case.model, case.loop), 0, _initial(case)
    with tempfile.TemporaryDirectory() as folder:
        for number, place in enumerate(case.places):
            steps = range(first, first + place.steps)
            try:
                results = run_ranks(place.ranks, _train, case, number, steps, Path(folder), plant, timeout=60.0)
            except RankFailure as failure:
                return f"{place}: {failure}"
            for found in _differences(results, want, steps, case, masters):
                return f"{place}: {found}"
            first, masters = steps.stop, results[0].masters[-1]
    return ""


def _train(rank: int, world: int, case: FuzzCase, number: int, steps: range, folder: Path, plant: str) -> Trained:
    place = case.places[number]
    with PLANTS[plant]() if plant else nullcontext():
        # another place begins with other weights, which its load must replace
        options = dict(place.options)
        engine = start(case.model, case.loop, case.precision, number, place.engine, place.stage, **options)
        if number:
            engine.load(folder / "saved")
        found = by_engine(engine, case.model, case.loop, steps, folder)
        if number + 1 < len(case.places):
            engine.save(folder / "saved")
        return found


def _differences(
    results: list[Trained], want: Trained, steps: range, case: FuzzCase, masters: dict[str, Tensor]
) -> Iterator[str]:
    """Yields what differs at a place; it begins with these ``masters``."""
    found = results[0]
    limit = LIMITS.get(case.precision, 1e-3)
    before = want.masters[steps.start - 1] if steps.start else masters
    previous = before
    for index, step in enumerate(steps):
        is_applied, *values = want.outcomes[step]
        for rank, result in enumerate(results):
            if result.outcomes[index] != found.outcomes[index] and not _has_nan(result.outcomes[index]):
                yield f"step {step}: {result.outcomes[index]} on rank {rank}, {found.outcomes[index]} on rank 0"
        if found.outcomes[index][0] != is_applied:
            yield f"step {step}: applied is {found.outcomes[index][0]}, should be {is_applied}"
        elif is_applied:
            for name, got, expected in zip(("loss", "norm", "lr"), found.outcomes[index][1:], values, strict=True):
                if not math.isclose(got, expected, rel_tol=max(limit, 1e-4), abs_tol=1e-5):
                    yield f"step {step}: {name} is {got}, should be {expected}"
        if case.precision == "fp32":
            yield from _differing(found.masters[index], want.masters[step], before, f"step {step}: master of")
        else:
            moved = {name: master - masters[name] for name, master in found.masters[index].items()}
            should = {name: master - previous[name] for name, master in want.masters[step].items()}
            if (off := _distance(moved, should)) > limit * (size := _distance(should)) + 1e-3:
                yield f"step {step}: the masters have moved by another {off:.3g} than they should, of {size:.3g}"
        masters, previous = found.masters[index], want.masters[step]
    if steps.stop < len(case.loop.steps):
        return
    if case.precision == "fp32":
        yield from _differing(found.averages, want.averages, _initial(case), "average of")
    if not math.isclose(found.evaluation, want.evaluation, rel_tol=max(limit, 1e-3), abs_tol=1e-4):
        yield f"loss of the evaluation is {found.evaluation}, should be {want.evaluation}"


def _initial(case: FuzzCase) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in case.model.build().float().named_parameters()}


def _has_nan(outcome: tuple[bool, float, float, float]) -> bool:
    return any(math.isnan(value) for value in outcome)


def _differing(got: dict[str, Tensor], want: dict[str, Tensor], before: dict[str, Tensor], what: str) -> Iterator[str]:
    """Elements off by more than a thousandth of what their tensor has moved, and of rounding."""
    for name, expected in want.items():
        if name not in got:
            yield f"{what} {name} is missing"
            continue
        if not expected.numel():
            continue
        moved = (expected - before[name]).abs().max().item()
        allowed = 1e-3 * moved + 5e-6 * max(expected.abs().max().item(), 0.02)
        off = (got[name] - expected).abs().max().item()
        if not off <= allowed:
            yield f"{what} {name} is off by {off:.3g}, allowed {allowed:.3g}; it moved by {moved:.3g}"


def _distance(some: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None) -> float:
    """The norm of all tensors together, less those of ``others``."""
    parts = (tensor if others is None else tensor - others[name] for name, tensor in some.items())
    return math.sqrt(sum(part.square().sum().item() for part in parts))
