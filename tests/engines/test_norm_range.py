"""Weights of 1e-25 and 1e25 change nothing: norm, clipping and update keep their bits under every engine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.engines.helpers import STAGES, batch, start, state_digests
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

WORLD = 2
WEIGHTS = (1.0, 2.0**-83, 2.0**83)  # powers of two: they round nothing


def _trained(
    rank: int, world: int, cases: list[tuple[str, int]], weights: Sequence[float]
) -> list[list[tuple[list[float], dict[str, str]]]]:
    found = []
    for name, stage in cases:
        runs = []
        for weight in weights:
            engine, norms = start(name, stage, precision="fp32"), []
            for step in range(2):
                for number in engine.accumulate(range(1)):
                    engine.backward(engine(tokens=batch(world * (step + number) + rank)), weight=weight)
                outcome = engine.step()
                assert outcome.applied, f"{name} {stage} {weight}: {outcome}"
                assert outcome.grad_norm > 0.05, "clipping is active"
                norms.append(outcome.grad_norm)
            runs.append((norms, state_digests(engine)))
        found.append(runs)
    return found


def _check(cases: list[tuple[str, int]], weights: Sequence[float] = WEIGHTS) -> None:
    for case, runs in zip(cases, run_ranks(WORLD, _trained, cases, weights)[0], strict=True):
        for weight, run in zip(weights, runs, strict=True):
            assert run == runs[0], f"{case} {weight}"


def test_engines_of_torch() -> None:
    _check([(name, stage) for name, stage in STAGES if name != "deepspeed"])


@pytest.mark.deepspeed
def test_deepspeed() -> None:
    _check([("deepspeed", stage) for stage in (0, 1, 3)], WEIGHTS[:2])
