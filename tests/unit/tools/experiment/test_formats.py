"""BF16, FP16 and FP8 against FP32's noise, on the tasks of the trainer."""

from __future__ import annotations

from dataclasses import replace
from math import hypot
from statistics import stdev

import pytest

from dtrain.tools.experiment.formats import (
    PRECISIONS,
    FormatCurves,
    FormatsResult,
    TaskComparison,
    draw,
    finding,
    run,
    tables,
)
from dtrain.tools.experiment.tasks import TASKS, ProductShares, SmallTask, TaskCurve


def shorter(task: SmallTask, steps: int, every: int, *more: str) -> SmallTask:
    words = ("launch.device=cpu", f"train.steps={steps}", f"train.eval_every={every}", "train.eval_batches=4")
    return replace(task, overrides=(*task.overrides, *words, *more))


def curves(precision: str, *losses: list[float]) -> FormatCurves:
    return FormatCurves(precision, [TaskCurve(item, None, 1) for item in losses])


def compared(bf16: FormatCurves) -> TaskComparison:
    fp32, same = [[5.0, 1.0], [6.0, 3.0]], [[5.0, 1.0], [6.0, 3.0]]
    formats = [bf16, curves("fp16", *same), curves("fp8", *same)]
    perturbed = curves("fp32", [5.5, 1.6]).curves
    return TaskComparison(
        "any", "", [10, 20], ProductShares(0.5, 0.25, 1, 2), curves("fp32", *fp32), perturbed, formats
    )


def test_gaps_are_in_units_of_seed_and_rounding_noise_at_that_step() -> None:
    item = compared(curves("bf16", [5.0, 2.0], [7.0, 3.0]))
    start, end = hypot(stdev([5.0, 6.0]), stdev([5.0, 5.5])), hypot(stdev([1.0, 3.0]), stdev([1.0, 1.6]))
    assert (item.noise(0).unit, item.noise().unit) == (start, end)
    assert item.gaps("bf16", 0) == [0.0, 1 / start]
    assert item.gaps("bf16") == [1 / end, 0.0]
    assert item.mean_gaps("bf16") == [0.5 / start, 0.5 / end]


def test_a_worse_format_is_told_from_noise() -> None:
    item = compared(curves("bf16", [5.0, 9.0], [6.0, 11.0]))
    assert finding(FormatsResult([0, 1], [item])) == (
        "Outside FP32's own noise: BF16 on any (+5.4 units); other mean gaps are at most 0.0 units at the end, "
        "0.0 at any step"
    )
    same = compared(curves("bf16", [5.0, 1.0], [6.5, 3.0]))
    assert finding(FormatsResult([0, 1], [same])) == (
        "No format can be told from FP32's own noise; mean gaps are at most 0.0 units at the end, 0.3 at any step"
    )
    rows = tables(FormatsResult([0, 1], [item]))[0].rows
    assert rows[3][:3] == ("", "fp8", "50% fp8 (Linears: 1 of 2); convolutions, 25%, bf16")


SMALL = ("train.global_batch_size=8", "train.micro_batch_size=8")
SHARES = {  # of the products: in convolutions, and in FP8; lower and upper bounds
    "language model": (0.0, 0.0, 0.1, 1.0),
    "vision transformer": (0.0, 1.0, 0.8, 1.0),
    "convnet": (0.99, 1.0, 0.0, 0.0),
    "diffusion": (0.9, 1.0, 0.0, 0.1),
    "regression": (0.0, 0.0, 0.1, 1.0),
}


@pytest.mark.parametrize("names", [("regression", "convnet"), pytest.param(None, marks=pytest.mark.exhaustive)])
def test_every_task_trains_in_every_format_and_is_drawn(names: tuple[str, ...] | None) -> None:
    chosen = [shorter(task, 2, 1, *SMALL) for task in TASKS if names is None or task.name in names]
    result = run(chosen, seeds=(0, 1))
    for item in result.tasks:
        assert item.steps == [1, 2]
        assert item.noise().seeds > 0
        assert (item.fp32.metric is None) == (not item.metric)
        finals = {tuple(found.losses()) for found in (item.fp32, *item.formats)}
        # without an FP8 Linear, FP8 is BF16 bit by bit
        assert len(finals) == 1 + len(PRECISIONS) - (item.shares.num_float8 == 0)
        if item.task in SHARES:
            least, most, least_float8, most_float8 = SHARES[item.task]
            assert least <= item.shares.convolutions <= most
            assert least_float8 <= item.shares.float8 <= most_float8
    assert len(tables(result)[0].rows) == len(chosen) * (1 + len(PRECISIONS))
    assert len(draw(result).axes) >= len(chosen)
