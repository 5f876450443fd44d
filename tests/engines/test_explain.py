"""Two ranks explain a skipped step together: the culprit is rank 1's, and every rank learns its origin."""

from __future__ import annotations

from typing import Any

import pytest

import dtrain
from dtrain.engine.outcome import Culprit
from tests.helpers import planted_faults as planted
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

FAULTS = {"module": ("output", "square"), "root": ("input gradient", "root")}


def explain_all(rank: int, world: int, engines: list[Any]) -> list[tuple[Culprit, bool]]:
    """The culprit of each engine and fault, and whether everything else is as without the explanation."""
    results = []
    for options in engines:
        for fault in FAULTS:
            culprits, bits = [], []
            for explains in (True, False):
                engine = planted.start(fault, engine=options)
                engine.explain_skips = explains
                outcomes = planted.train(engine)
                culprits.append(planted.culprit_of(outcomes))
                bits.append(planted.bits(engine, outcomes))
            assert culprits[1].origin is None
            results.append((culprits[0], bits[0] == bits[1]))
    return results


def check(engines: list[Any]) -> None:
    first, second = run_ranks(2, explain_all, engines)
    assert first == second, "all ranks learn the same"
    cases = [(options, fault) for options in engines for fault in FAULTS]
    for (options, fault), (culprit, is_unchanged) in zip(cases, first, strict=True):
        case = f"{options}: {fault}"
        assert is_unchanged, case
        assert (culprit.rank, culprit.micro_batch) == planted.BAD[1:], case
        assert culprit.origin is not None, case
        searched = fault != "root" or options.name in ("native", "ddp")
        want = FAULTS[fault] if searched else ("", "")
        assert (culprit.origin.place, culprit.origin.module) == want, case


def test_engines_of_torch() -> None:
    check([*(dtrain.Native(zero_stage=stage) for stage in (0, 2, 3)), dtrain.DDP(), dtrain.FSDP2(zero_stage=3)])


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [3])
def test_deepspeed(stage: int) -> None:
    check([dtrain.DeepSpeed(zero_stage=stage)])
