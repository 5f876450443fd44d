"""A measured step of several ranks: counts depend neither on the ranks nor on the stage."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from dtrain.precision.report import PrecisionReport
from tests.engines import float8_model
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, forward_backward, start

pytestmark = pytest.mark.processes

NUM_MICRO_BATCHES = 4
STEPS = 2


def measure(engine: Any, run: Run, step: int) -> PrecisionReport:
    with engine.measure_precision(["blocks.0"]) as measurement:
        forward_backward(engine, run, step)
        engine.step()
    report: PrecisionReport | None = measurement.report()
    assert report is not None
    return report


def train(rank: int, world: int, name: str, stages: list[int], options: dict[str, Any]) -> list[PrecisionReport]:
    """Takes two steps at each stage; returns the reports of the second."""
    reports = []
    for stage in stages:
        run = Run("transformer", accumulation=NUM_MICRO_BATCHES // world, options={"zero_stage": stage, **options})
        engine = start(run, engine=name)
        reports.append([measure(engine, run, step) for step in range(STEPS)][-1])
    return reports


def reproducible(rank: int, world: int) -> list[PrecisionReport]:
    return train(rank, world, "native", [0, 1, 2, 3], {"precision": "bf16", "reproducible": True})


def test_counts_do_not_depend_on_ranks_and_stages() -> None:
    reports = [report for world in (1, 2) for report in run_ranks(world, reproducible)[0]]
    first = exact(reports[0])
    assert len(reports) == 8
    assert all(exact(report) == first for report in reports[1:])


def exact(report: PrecisionReport) -> list[dict[str, Any]]:
    """All but norms, whose last bits depend on the sharding."""
    rows = [asdict(own) for own in (*report.parameters, *report.activations)]
    for row in rows:
        if row.get("update"):
            del row["update"]["ratio"]
    return rows


def float8(rank: int, world: int) -> list[PrecisionReport]:
    found = []
    for stage in (1, 3):
        engine = float8_model.start("native", stage, reproducible=True)
        with engine.measure_precision() as measurement:
            float8_model.train_step(engine)
        report = measurement.report()
        assert report is not None
        found.append(report)
    return found


def test_operands_of_float8_are_measured_once_over_all_ranks() -> None:
    reports = [report for world in (1, 2) for report in run_ranks(world, float8)[0]]
    for report in reports[1:]:
        for own, expected in zip(report.float8, reports[0].float8, strict=True):
            assert (own.module, own.product) == (expected.module, expected.product)
            assert own.sqnr_db == pytest.approx(expected.sqnr_db, abs=1e-6)
            assert own.operands == tuple(
                type(one)(one.operand, one.format, pytest.approx(one.sqnr_db), one.underflow, one.saturated)
                for one in expected.operands
            )
