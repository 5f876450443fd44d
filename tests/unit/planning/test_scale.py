"""``dtrain plan scale`` as users run it, and what ``docs/results/scaling/README.md`` says of published scaling."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from matplotlib.figure import Figure

from dtrain.__main__ import main
from dtrain.cli.resolve import read_jobs
from dtrain.engine.vote.record import NUM_FIELDS
from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.plans import planned_run
from dtrain.planning.record.ranks import Transfer
from dtrain.planning.scale import ScalingPoint, draw, remarks, scale, scale_assumptions, with_ranks
from dtrain.planning.time.network import FABRICS
from dtrain.planning.time.prediction import Assumptions
from dtrain.planning.time.replay import GRADIENTS, REPLICAS, VOTE, WEIGHTS
from dtrain.sharding.layout import CHUNK
from tests.measure.compare_scaling import COMPARED, RESULTS, compare, read_series, table

SIZES = ["train.micro_batch_size=4", "train.global_batch_size=8", "model.num_layers=1"]
TINY = ["experiment=smoke", "precision=bf16", *SIZES]
ASSUMED = Assumptions(spread=0.0)
exhaustive = pytest.mark.exhaustive
STAGE_2, STAGE_3 = "engine.zero_stage=2", "engine.zero_stage=3"


def tiny(*keys: str, ranks: int = 1) -> PlannedRun:
    (job,) = read_jobs([*TINY, *keys], "simulate", 1024)
    return planned_run(job.config, "h100-80gb", ranks)


@cache
def point_of(*keys: str, ranks: int) -> ScalingPoint:
    (point,) = scale(tiny(*keys, ranks=ranks), [ranks], ASSUMED, is_strong=False)
    return point


def test_table_limits_and_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "scaling.png"
    files = [f"json={out}", f"picture={picture}"]
    assert main(["simulate", *TINY, "ranks=1,64", STAGE_3, "train.global_batch_size=4", *files]) == 0
    text = capsys.readouterr().out
    assert text.count("| 64 ") == 2
    assert "nothing is measured; network ib-400g: 8 GPUs a node" in text
    for limit in ("are padding", "the root group", "the vote's gather takes", "ms; larger micro-batches or engine"):
        assert limit in text
    assert "| checkpoint of a rank |" in text
    assert "| vote, % of the step |" in text
    one, many = json.loads(out.read_text())["points"]
    assert (one["ranks"], many["ranks"]) == (1, 64)
    assert (one["transfers"], one["startup_s"]) == ([], 0)
    assert one["efficiency"] == 1 > many["efficiency"] > 0
    assert one["checkpoint_bytes"] == one["checkpoint_rank_bytes"] == many["checkpoint_bytes"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("ranks", "size"),
    [(16, 8), *(pytest.param(*case, marks=exhaustive) for case in ((8, None), (64, None), (1024, None), (1024, 8)))],
)
def test_bytes_are_the_closed_formulas(ranks: int, size: int | None) -> None:
    """Stage 3, whose prefetch keeps the last two blocks from forward until backward."""
    keys = [STAGE_3, "model.num_layers=3", *([f"engine.shard_size={size}"] if size else [])]
    micro_batches, shard = 2, size or ranks
    of_ranks = with_ranks(tiny(*keys), ranks, 4 * micro_batches * ranks)
    (point,) = scale(of_ranks, [ranks], ASSUMED, is_strong=False)
    replicas = ranks // shard
    sizes = {"bfloat16": 2, "float32": 4}
    expected = {WEIGHTS: 0, GRADIENTS: 0, REPLICAS: 0}
    for name, (_, numel) in point.recorded.elements.items():
        assert numel % (shard * CHUNK) == 0
        itemsize = sizes[name.rpartition("/")[2]]
        # the last two blocks stay unsharded until backward, which begins with them; the root group stays
        stays = name.startswith(("blocks.1/", "blocks.2/", "root/"))
        part = numel * itemsize * (shard - 1) // shard
        expected[WEIGHTS] += micro_batches * (1 if stays else 2) * part
        expected[GRADIENTS] += micro_batches * part
        expected[REPLICAS] += 2 * (4 * numel // shard * (replicas - 1) // replicas)
    assert point.step.total(WEIGHTS).nbytes == expected[WEIGHTS]
    assert point.step.total(VOTE).nbytes == (ranks - 1) * (NUM_FIELDS + 1) * 8
    assert point.step.total(REPLICAS).nbytes == pytest.approx(expected[REPLICAS], abs=2 * len(point.recorded.elements))
    weight_gaps = (
        point.step.total(GRADIENTS).nbytes - expected[GRADIENTS]
    )  # a weight of each rank beside the first gradient
    assert 0 <= weight_gaps <= micro_batches * (shard - 1) * 64 * 4


@exhaustive
def test_more_ranks_and_slower_networks_take_longer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = tiny(STAGE_3, "optim=sgd", ranks=2)
    weak = scale(run, [2, 16], ASSUMED, is_strong=False)
    assert [point.recorded.run.num_micro_batches for point in weak] == [1, 1]
    assert all(one.step.seconds >= one.step.compute for one in weak)
    assert 1 == weak[0].efficiency > weak[1].efficiency
    strong = scale(run, [2, 16], ASSUMED, is_strong=True)
    assert [point.recorded.run.num_micro_batches for point in strong] == [8, 1]
    assert (
        strong[0].recorded.run.config.train.global_batch_size == strong[1].recorded.run.config.train.global_batch_size
    )
    seen: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: seen.append(figure))
    draw(tmp_path / "scaling.png", {False: weak, True: strong})
    assert "1 to 8 micro-batches a step" in " ".join(seen[0].texts[0].get_text().split())
    assert len(seen[0].legends) == 1
    ib = FABRICS["ib-400g"]
    assert ib.nic is not None
    monkeypatch.setitem(FABRICS, "ib-400g", replace(ib, nic=2 * ib.nic, inside=2 * ib.inside))
    (faster,) = scale(run, [16], ASSUMED, is_strong=False)
    assert faster.step.seconds <= weak[1].step.seconds


@exhaustive
def test_many_micro_batches_take_what_the_last_of_a_few_takes() -> None:
    run = tiny(STAGE_3, ranks=2)
    three, four, six = (scale(with_ranks(run, 2, 8 * n), [2], ASSUMED, is_strong=False)[0].step for n in (3, 4, 6))
    assert six.seconds - four.seconds == pytest.approx(2 * (four.seconds - three.seconds))
    weights = [share.count for step in (three, six) for (name, _), share in step.shares.items() if name == WEIGHTS]
    assert weights[1] == 2 * weights[0]


@exhaustive
def test_measured_computation_rescales_the_step() -> None:
    run = tiny(STAGE_2, ranks=8)
    measured = [replace(ASSUMED, step_ms=50.0, spread=spread) for spread in (0.0, 0.015)]
    point, slow = (scale(run, [8], assumed, is_strong=False)[0] for assumed in measured)
    assert point.step.compute == pytest.approx(0.05, rel=0.02)
    assert slow.step.compute / point.step.compute == pytest.approx(1 + 0.015 * 1.42, abs=1e-3), "slowest of 8"


def test_memory_that_does_not_fit_is_named() -> None:
    point = point_of(STAGE_2, ranks=8)
    plan = point.memory
    assert "fit on" not in " ".join(remarks(point))
    for nbytes, words in ((plan.low - 1, "does not fit on"), (plan.low, "may not fit on"), (plan.high - 1, "may not")):
        memory = replace(plan, device=replace(plan.device, memory=nbytes))
        line = remarks(replace(point, memory=memory))[0]
        assert line.startswith(words)
        assert line.endswith("; dtrain plan memory proposes changes")


@exhaustive
def test_replicas() -> None:
    run = tiny(STAGE_3, "engine.shard_size=16", ranks=8)
    one, many = scale(run, [8, 512], ASSUMED, is_strong=False)
    assert remarks(one)[0].startswith("one replica, because engine.shard_size=16 is more; dtrain train would")
    text = " ".join(remarks(many))
    assert "one replica" not in text
    assert "the sum over 32 replicas (FP32, once a step) is waited for " in text
    assert "replicas" not in " ".join(remarks(one))


def test_advice_about_transfers_and_other_engines() -> None:
    other = "engine=fsdp2 is predicted as native at the same stage; for its reduce-scatters: gradients="
    for keys, ranks, expected in (([STAGE_2], 8, []), (["engine=fsdp2", STAGE_2], 64, [other])):
        point = point_of(*keys, ranks=ranks)
        assert "ms; larger micro-batches or more of them a step reduce this" in " ".join(remarks(point))
        found = [one for one in scale_assumptions([point]) if "predicted as native" in one]
        assert [one[: len(other)] for one in found] == expected


def recorded() -> list[dict[str, Any]]:
    series: list[dict[str, Any]] = json.loads(COMPARED.read_text(encoding="utf-8"))["series"]
    return series


def test_the_page_has_the_recorded_figures() -> None:
    assert table(recorded()) in (RESULTS / "README.md").read_text(encoding="utf-8")


@exhaustive
def test_a_simulation_gives_the_recorded_figures() -> None:
    series = next(one for one in read_series() if one["name"] == "MPT-125M A100")
    row = next(one for one in recorded() if one["name"] == series["name"])
    assert compare(series | {"points": series["points"][:2]})["points"] == row["points"][:1]


def test_collectives_take_what_is_published() -> None:
    published = json.loads((RESULTS / "collectives-efa.json").read_text(encoding="utf-8"))
    fabric = FABRICS["efa"]
    ratios = []
    for op in ("all_gather", "all_to_all"):
        for size, row in published[op].items():
            ranks = int(size)
            for mebibytes, bandwidth in zip(published["mebibytes"], row, strict=True):
                received = mebibytes * 2**20 * (ranks - 1) // ranks
                seconds = fabric.seconds(Transfer(op, received, ranks))
                ratios.append(received / seconds / 1e9 / bandwidth)
    assert 0.95 < median(ratios) < 1.05
    assert sum(0.8 < ratio < 1.3 for ratio in ratios) > 0.94 * len(ratios)
