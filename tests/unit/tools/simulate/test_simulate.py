"""``dtrain simulate`` as users run it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from dtrain.__main__ import main
from dtrain.cli.resolve import read_jobs
from dtrain.errors import ConfigError
from dtrain.planning.fabric import FABRICS
from dtrain.planning.replay import GRADIENTS, REPLICAS, VOTE, WEIGHTS
from dtrain.sharding.layout import CHUNK
from dtrain.tools.planned_run import planned_run
from dtrain.tools.simulate.picture import draw
from dtrain.tools.simulate.points import Assumptions, simulate
from dtrain.tools.simulate.report import assumptions, limits, remarks
from dtrain.tools.simulate.step import with_ranks
from dtrain.train.planned import PlannedRun
from tests.helpers.launch import ROOT

TINY = ["experiment=smoke", "precision=bf16", "train.micro_batch_size=4", "train.global_batch_size=8"]
MEASURED = ROOT / "docs" / "results" / "collectives-cpu.json"
ASSUMED = Assumptions("ib-400g", 0.7, None, 1.189, 0.0, "engine", 10.0)


def tiny(*keys: str, ranks: int = 1) -> PlannedRun:
    (job,) = read_jobs([*TINY, *keys], "simulate", 1024)
    return planned_run(job.config, {"device": "h100-80gb", "ranks": str(ranks)})


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["simulate", *TINY, *argv]) == 0
    return capsys.readouterr().out


def test_table_limits_and_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "scaling.png"
    keys = ["ranks=1,8,64", "engine.zero_stage=3", f"json={out}", f"picture={picture}"]
    text = run(capsys, *keys)
    assert text.count("| 64 ") == 2
    assert "nothing is measured; network ib-400g: 8 GPUs a node" in text
    for limit in ("are padding", "the root group", "the vote's gather takes", "ms; larger micro-batches or engine"):
        assert limit in text
    assert "| checkpoint of a rank |" in text
    assert "| vote, % of the step |" in text
    results: dict[str, Any] = json.loads(out.read_text())
    one, eight, many = results["points"]
    assert [point["ranks"] for point in results["points"]] == [1, 8, 64]
    assert one["transfers"] == []
    assert one["startup_s"] == 0
    assert one["efficiency"] == 1 > eight["efficiency"] > many["efficiency"] > 0
    assert one["checkpoint_bytes"] == one["checkpoint_rank_bytes"] == many["checkpoint_bytes"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ranks", [8, 64, 1024])
@pytest.mark.parametrize("size", [None, 8])
def test_bytes_are_the_closed_formulas(ranks: int, size: int | None) -> None:
    """Stage 3, whose prefetch keeps the last two blocks from forward until backward."""
    keys = ["engine.zero_stage=3", "model.num_layers=6", *([f"engine.shard_size={size}"] if size else [])]
    micro_batches, shard = 2, size or ranks
    of_ranks = with_ranks(tiny(*keys), ranks, 4 * micro_batches * ranks)
    (point,) = simulate(of_ranks, [ranks], ASSUMED, is_strong=False)
    received: dict[str, int] = {}
    for (purpose, _), share in point.step.shares.items():
        received[purpose] = received.get(purpose, 0) + share.nbytes
    replicas = ranks // shard
    sizes = {"bfloat16": 2, "float32": 4}
    expected = {WEIGHTS: 0, GRADIENTS: 0, REPLICAS: 0, VOTE: (ranks - 1) * 22 * 8}
    buffers = point.traced.buffers
    numbers = sorted(int(b.name[7:].split("/")[0]) for b in buffers if b.name.startswith("blocks."))
    for buffer in buffers:
        assert buffer.numel % (shard * CHUNK) == 0
        itemsize = sizes[buffer.name.rpartition("/")[2]]
        # the last two blocks stay unsharded until backward, which begins with them; the root group stays
        is_last = buffer.name.startswith(tuple(f"blocks.{number}/" for number in numbers[-2:]))
        gathers = micro_batches * (1 if is_last or buffer.name.startswith("root/") else 2)
        part = buffer.numel * itemsize * (shard - 1) // shard
        expected[WEIGHTS] += gathers * part
        expected[GRADIENTS] += micro_batches * part
        if replicas > 1:
            expected[REPLICAS] += 2 * (4 * buffer.numel // shard * (replicas - 1) // replicas)
    weight_gaps = received[GRADIENTS] - expected[GRADIENTS]  # a weight of each rank beside the first gradient
    assert 0 <= weight_gaps <= micro_batches * (shard - 1) * 64 * 4
    assert received[WEIGHTS] == expected[WEIGHTS]
    assert received[VOTE] == expected[VOTE]
    assert received.get(REPLICAS, 0) == pytest.approx(expected[REPLICAS], abs=len(buffers) * 2)


def test_more_ranks_and_slower_networks_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny("engine.zero_stage=3", "optim=sgd", ranks=2)
    weak = simulate(run, [2, 16, 128], ASSUMED, is_strong=False)
    assert [point.traced.count for point in weak] == [1, 1, 1]
    assert all(one.step.seconds >= one.step.compute for one in weak)
    assert 1 == weak[0].efficiency > weak[1].efficiency > weak[2].efficiency
    ib = FABRICS["ib-400g"]
    assert ib.nic is not None
    monkeypatch.setitem(FABRICS, "ib-400g", replace(ib, nic=2 * ib.nic, inside=2 * ib.inside))
    assert all(
        faster.step.seconds <= one.step.seconds
        for faster, one in zip(simulate(run, [2, 16, 128], ASSUMED, is_strong=False), weak, strict=True)
    )
    strong = simulate(run, [2, 16], ASSUMED, is_strong=True)
    assert [point.traced.count for point in strong] == [8, 1]
    assert strong[0].traced.run.config.train.global_batch_size == strong[1].traced.run.config.train.global_batch_size


def test_many_micro_batches_take_what_the_last_of_a_few_takes() -> None:
    run = tiny("engine.zero_stage=3", ranks=2)
    three, four, six = (
        simulate(with_ranks(run, 2, 2 * 4 * count), [2], ASSUMED, is_strong=False)[0].step for count in (3, 4, 6)
    )
    assert six.seconds - four.seconds == pytest.approx(2 * (four.seconds - three.seconds))
    (weights,) = (share for (name, _), share in six.shares.items() if name == WEIGHTS)
    assert weights.count == 2 * next(share for (name, _), share in three.shares.items() if name == WEIGHTS).count


def test_measured_computation_rescales_the_step() -> None:
    run = tiny("engine.zero_stage=2", ranks=8)
    (point,) = simulate(run, [8], replace(ASSUMED, step_ms=50.0), is_strong=False)
    assert point.step.compute == pytest.approx(0.05, rel=0.02)
    (slow,) = simulate(run, [8], replace(ASSUMED, step_ms=50.0, spread=0.015), is_strong=False)
    assert slow.step.compute / point.step.compute == pytest.approx(1 + 0.015 * 1.42, abs=1e-3), "slowest of 8"


def test_memory_that_does_not_fit_is_named() -> None:
    run = tiny(ranks=8)
    (point,) = simulate(run, [8], ASSUMED, is_strong=False)
    plan = point.memory
    assert "fit on" not in " ".join(remarks(run, point))
    for nbytes, words in ((plan.low - 1, "does not fit on"), (plan.low, "may not fit on"), (plan.high - 1, "may not")):
        memory = replace(plan, device=replace(plan.device, memory=nbytes))
        line = next(remarks(run, replace(point, memory=memory)))
        assert line.startswith(words)
        assert line.endswith("; dtrain plan memory proposes changes")


def test_replicas() -> None:
    run = tiny("engine.zero_stage=3", "engine.shard_size=16", ranks=8)
    one, many = simulate(run, [8, 512], ASSUMED, is_strong=False)
    assert next(remarks(run, one)).startswith("one replica, because engine.shard_size=16 is more; dtrain train would")
    text = " ".join(remarks(run, many))
    assert "one replica" not in text
    assert "the sum over 32 replicas (FP32, once a step) is waited for " in text
    assert "replicas" not in " ".join(limits(one))


@pytest.mark.parametrize(
    ("keys", "ranks", "advice"),
    [
        (["engine.zero_stage=2"], 64, "larger micro-batches, more of them a step, or engine.shard_size reduce this"),
        (["engine.zero_stage=3"], 64, "larger micro-batches or engine.shard_size reduce this"),
        (["engine.zero_stage=3", "engine.shard_size=8"], 64, "ms; larger micro-batches reduce this"),
        (["engine.zero_stage=2"], 8, "ms; larger micro-batches or more of them a step reduce this"),
        (["engine.zero_stage=0"], 64, "ms; larger micro-batches or more of them a step reduce this"),
        (["engine=fsdp2", "engine.zero_stage=2"], 64, "ms; larger micro-batches or more of them a step reduce this"),
    ],
)
def test_advice_about_transfers(keys: list[str], ranks: int, advice: str) -> None:
    (point,) = simulate(tiny(*keys, ranks=ranks), [ranks], ASSUMED, is_strong=False)
    assert advice in " ".join(limits(point))


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        (["engine=native"], None),
        (
            ["engine=fsdp2"],
            "engine=fsdp2 is simulated as native at the same stage; for its reduce-scatters: gradients=",
        ),
        (["engine=ddp"], "engine=ddp is simulated as native at the same stage"),
    ],
)
def test_other_engines_are_simulated_as_native(engine: list[str], line: str | None) -> None:
    run = tiny(*engine, ranks=8)
    lines = list(assumptions(run, simulate(run, [8], ASSUMED, is_strong=False), ASSUMED))
    found = [one for one in lines if "simulated as native" in one]
    assert len(found) == (line is not None)
    assert line is None or found[0].startswith(line)


def test_picture_says_the_micro_batches_of_both_scalings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = tiny(ranks=2)
    seen: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: seen.append(figure))
    kinds = {is_strong: simulate(run, [2, 16], ASSUMED, is_strong=is_strong) for is_strong in (False, True)}
    draw(tmp_path / "scaling.png", run, kinds, ASSUMED)
    (figure,) = seen
    assert "1 to 8 micro-batches a step" in " ".join(figure.texts[0].get_text().split())
    assert [axis.get_legend() for axis in figure.axes] == [None, None]
    assert len(figure.legends) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ranks=8,x"], "ranks=8,x must be whole numbers from 1, separated by commas: ranks=8,64"),
        (["ranks=[8,64]"], "ranks=[8,64] must be whole numbers from 1, separated by commas: ranks=8,64"),
        (["picture=/x/y.png", "device=x"], "picture=/x/y.png: the folder /x does not exist; create it or give another"),
        (["json=/x/y.json"], "json=/x/y.json: the folder /x does not exist; create it or give another path"),
        (["network=ib"], "network=ib is neither a file nor a known network"),
        (["network=nvlink", "ranks=16"], "network=nvlink is one node of 8 ranks"),
        (["device=cpu"], "network=ib-400g connects GPUs, and the ranks are CPUs; give the file of dtrain bench"),
        (["device=cpu", f"network={MEASURED}", "ranks=2"], "no rates of a CPU are published"),
        (["efficiency=2"], "efficiency=2 must be a number from 1e-06 to 1"),
        (["scaling=medium"], "scaling=medium must be weak or strong"),
        (["ranks=12", "engine.zero_stage=3", "engine.shard_size=8"], "engine.shard_size=8 does not divide"),
        (["ranks=12,16", "engine.zero_stage=3", "engine.shard_size=8"], "shard_size=8 does not divide"),
        (["rank=12"], "unknown key 'rank'; did you mean 'ranks'?"),
        (["engin=fsdp2"], "unknown key 'engin'; did you mean 'engine'?"),
        (["zzzz=1"], "unknown key 'zzzz'; valid: audit, checkpoint"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *TINY, *argv]) == ConfigError("").exit_code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.exhaustive
@pytest.mark.processes
def test_1024_ranks_in_a_minute_and_4_gb() -> None:
    words = ["simulate", "model=llama-8b", "precision=bf16", "engine.zero_stage=3", "train.micro_batch_size=1"]
    start = time.monotonic()
    command = [sys.executable, "-m", "dtrain", *words, "ranks=1024"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    seconds = time.monotonic() - start
    gigabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    print(f"{seconds:.1f} s, {gigabytes:.2f} GB")
    assert "| 1,024 " in text
    assert seconds < 60
    assert gigabytes < 4
