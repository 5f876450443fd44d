"""``dtrain plan time``: real steps of one rank, the share of products, and a bound for a device that is elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from dtrain.__main__ import main
from dtrain.cli.resolve import compose
from dtrain.planning.network import Network
from dtrain.planning.ranks import HOST, SOCKETS
from dtrain.tools.plan import time as plan_time
from dtrain.tools.plan.amdahl import Item
from dtrain.tools.plan.roofline import roofline
from dtrain.tools.plan.shapes import record_products
from dtrain.tools.plan.time import format_table, item_table, phase_table, product_share, summary
from dtrain.tools.plan.time_rank import RankTime
from dtrain.train.step_time import PlannedRank, StepTime
from tests.helpers.launch import ROOT
from tests.unit.tools.plan.planned_runs import planned_run

SMALL = ("experiment=smoke", "model.num_layers=1", "launch.device=cpu", "precision=fp32")
NETWORK = ROOT / "docs" / "results" / "collectives-cpu.json"
CPU = torch.device("cpu")
exhaustive = pytest.mark.exhaustive


def rank_of(*keys: str, ranks: int = 1, transport: str = HOST) -> PlannedRank:
    return PlannedRank(compose([*SMALL, *keys]), ranks, CPU, transport)


@pytest.mark.parametrize(
    ("ranks", "transport", "keys"),
    [
        (1, HOST, ("engine.zero_stage=0",)),
        (2, SOCKETS, ("engine.zero_stage=2", "precision=bf16", "model.compile=blocks", "model.recompute=selective")),
        pytest.param(2, HOST, ("engine.zero_stage=3", "engine.reproducible=true"), marks=exhaustive),
        pytest.param(4, SOCKETS, ("engine.zero_stage=3",), marks=exhaustive),
    ],
)
def test_a_rank_among_absent_ones_really_steps(ranks: int, transport: str, keys: tuple[str, ...]) -> None:
    rank = rank_of("train.global_batch_size=16", "train.micro_batch_size=4", *keys, ranks=ranks, transport=transport)
    before = {name: value.clone() for name, value in rank.engine.module.state_dict().items()} if ranks == 1 else {}
    times = rank.time(Network.read(NETWORK, transport) if ranks > 1 else None, 0.0, lambda: None)
    engine = rank.engine
    assert (engine.world_size, engine.attempted_steps) == (ranks, engine.applied_steps)
    assert engine.compiled_graphs is None
    assert engine.applied_steps >= 4, "a step that is skipped is not timed in full"
    assert all(ms > 0 for ms in times.busy_ms)
    assert set(times.phases_ms) == {"data_wait_ms", "forward_ms", "backward_ms", "update_ms"}
    assert sum(times.phases_ms.values()) <= 1.1 * max(times.busy_ms)
    assert bool(times.num_transfers) is (ranks > 1)
    assert all(bool(ms) is (ranks > 1) for ms in times.waited_ms)
    assert times.ms >= min(times.busy_ms)
    for name, value in before.items():
        assert torch.equal(value, engine.module.state_dict()[name]), "weights stay"


def test_the_bytes_of_stage_2_follow_the_formula() -> None:
    rank = rank_of("precision=bf16", "engine.zero_stage=2", "optim=lion", "train.global_batch_size=8", ranks=2)
    numel = sum(buffer.layout.numel for buffer in rank.engine.sharded.buffers)  # type: ignore[attr-defined]
    times = rank.time(None, 0.0, lambda: None)
    # BF16 weights are gathered; gradients are read in place
    assert times.received == pytest.approx(2 * numel // 2, rel=0.05)


def test_tables_show_what_was_measured() -> None:
    phases = {"forward_ms": 30.0, "backward_ms": 60.0}
    step = StepTime([90.0, 110.0, 100.0], [20.0] * 3, [5.0] * 3, phases, 7, 2 * 10**6)
    items = [Item("mm", 60.0, 9, True, False), Item("mul", 20.0, 4, False, True), Item("sum", 5.0, 1, False, False)]
    times = RankTime(step, 0.25, items, {"bf16": 2.0}, "fp32")
    run = planned_run(*SMALL, ranks=2)
    assert step.ms == 120.0
    assert dict(row[:2] for row in phase_table(times).rows)["wait for ranks"] == "20"
    rows = item_table(times).rows
    assert [row[0] for row in rows] == ["mul", "sum", "0 other operations", "no operation: Python, launches"]
    assert rows[0] == ("mul", "4", "20", "20.0%", "would fuse it")
    assert rows[-1][2] == "15"
    assert format_table(times).rows == [("bf16", "2 x", "1.43 x", "2.5 x")]
    slow = replace(times, items=[Item("mm", 120.0, 9, True, False), Item("sum", 30.0, 1, False, False)])
    assert product_share(slow) == 0.8, "the profiled steps were slower than the others"
    assert item_table(slow).rows[-1][2] == "0"
    lines = summary(times, run, NETWORK)
    assert lines[0].startswith("120 ms a step")
    assert lines[1].startswith("MFU 25.0 % (power limit ")
    assert lines[2].startswith("communication: 7 collectives a step, of which a rank receives 2 MB; 5 ms of it happen")
    assert "not in these times" in summary(times, run, None)[2]
    assert "not compiled" in summary(times, planned_run(*SMALL, "model.compile=blocks"), None)[1]


def test_the_bound_of_a_device_that_is_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("precision=bf16", "train.micro_batch_size=1", "train.global_batch_size=16", "device=h100-80gb", "ranks=8")
    run = planned_run("model=llama-1b", "model.num_layers=1", *keys[:2], device="h100-80gb", ranks=8)
    run = replace(run, config=replace(run.config, train=replace(run.config.train, global_batch_size=16)))
    found, _ = record_products(run)
    bound = roofline(run)
    flops = 2 * sum(product.flops for product in found)  # two micro-batches
    assert 1.0 <= bound.products / (flops / 989.4e12) < 1.5
    assert min(bound.others, bound.update) > 0
    assert bound.busy == bound.products + bound.others + bound.update
    assert {transfer.world_size for transfer in bound.transfers} == {8}
    assert main(["plan", "time", *SMALL, *keys]) == 0
    shown = capsys.readouterr().out
    assert "Least time of a step on h100-80gb" in shown
    assert re.search(r"communication is not in these times: \d+ collectives a step", shown)


@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
def test_command_on_two_processes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_time, "_BUDGET_S", 0.2)
    assert main(["plan", "time", *SMALL, "ranks=2", f"network={NETWORK}"]) == 0
    shown = capsys.readouterr().out
    waited = re.search(r"\| wait for ranks +\| ([\d.]+)", shown)
    assert waited is not None
    assert float(waited[1]) > 0
    for line in ("tokens/s, on 2 ranks", "communication: ", "no operation: Python, launches"):
        assert line in shown
