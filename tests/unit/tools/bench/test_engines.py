"""dtrain's engines over other libraries in the race: who they are raced with, and the table of what they cost."""

from __future__ import annotations

import os
import random
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.config import capabilities
from dtrain.config.tool_schema import EngineBenchConfig
from dtrain.tools.bench import engines
from dtrain.tools.bench.peers import PEERS, RIVALS, deepspeed_zero, plain
from dtrain.tools.bench.records import Contender, Entry, Footprint, Turn
from dtrain.tools.bench.report.document import best
from dtrain.tools.bench.report.overhead import describe_overheads, median_interval, verdict
from tests.helpers.ranks import run_ranks


def peer_contenders(**values: Any) -> list[Contender]:
    return engines.peer_contenders(EngineBenchConfig(**values))


def test_an_engine_has_its_turns_after_the_peer_that_does_its_work() -> None:
    raced = peer_contenders(peers=["accelerate", "fsdp2"], engines=["fsdp2:3", "deepspeed"], precision="fp32", ranks=3)
    assert raced == [
        Contender("accelerate", "accelerate", 3, "fp32"),
        Contender("fsdp2", "fsdp2", 3, "fp32"),
        Contender("dtrain fsdp2, stage 3", "fsdp2", 3, "fp32", 3, pair="fsdp2"),
        Contender("fsdp2 again", "fsdp2", 3, "fp32", pair="fsdp2"),
        Contender("deepspeed_2_fp32", "deepspeed_2_fp32", 3, "fp32"),
        Contender("dtrain deepspeed, stage 2", "deepspeed", 3, "fp32", 2, pair="deepspeed_2_fp32"),
    ]
    assert [contender.is_dtrain for contender in raced] == [False, False, True, False, False, True]


def test_by_default_all_installed_engines_join_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [contender.name for contender in peer_contenders()]
    assert [names[names.index(peer) + 1] for peer in ("ddp", "fsdp2_no_reshard", "deepspeed_2_fp32")] == [
        *("dtrain ddp", "dtrain fsdp2, stage 2", "dtrain deepspeed, stage 2")
    ]
    assert len(names) == len(RIVALS) + 5  # three engines, DeepSpeed's peer, the control
    assert set(engines.TWINS.values()) <= set(PEERS)
    monkeypatch.setattr(capabilities, "find_spec", lambda name: None)
    assert engines.chosen_engines(None) == [("fsdp2", 2), ("ddp", 0)]


SETTINGS = [(1, True), (2, True), (3, True), (2, False)]
"""Stage and ``fp32_sums``; the last shows that the others could fail."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> SimpleNamespace:
        weight = self.linear.weight
        return SimpleNamespace(loss=self.linear(x.to(weight.dtype)).float().square().mean())


def sent_dtypes(rank: int, world: int) -> dict[tuple[int, bool], set[torch.dtype]]:
    """What DeepSpeed's peer sends of gradients in a step, by stage and ``fp32_sums``."""
    from dtrain.engine.deepspeed.library import load, observed_reductions

    device = torch.device("cpu")
    load(device)
    os.environ["LOCAL_RANK"] = str(rank)  # of a launcher
    settings = plain.Settings(1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0, True, 1, device)
    sent: dict[tuple[int, bool], set[torch.dtype]] = {}
    for stage, fp32_sums in SETTINGS:
        training = deepspeed_zero.prepare(Model(), settings, stage=stage, fp32_sums=fp32_sums)
        seen: set[torch.dtype] = set()
        with observed_reductions(lambda tensor, seen=seen: seen.add(tensor.dtype) if tensor.numel() > 16 else None):
            training.step({"x": torch.ones(2, 16)})
        sent[stage, fp32_sums] = seen
    return sent


@pytest.mark.processes
@pytest.mark.skipif(not PEERS["deepspeed_1"].is_installed, reason="needs deepspeed")
def test_the_peer_of_the_deepspeed_engine_sums_in_fp32_as_that_does() -> None:
    for sent in run_ranks(2, sent_dtypes):
        assert sent == {
            (stage, fp32_sums): {torch.float32 if fp32_sums else torch.bfloat16} for stage, fp32_sums in SETTINGS
        }


def entry(contender: Contender, ms: list[float], cpu_ms: list[float] | None = None) -> Entry:
    turns = [Turn([value], [2.0], 0.5, [cpu]) for value, cpu in zip(ms, cpu_ms or ms, strict=True)]
    return Entry(contender, 1.5, Turn([], [], 0.1), turns, Footprint(1000, {"master": 4000}, None, 2**27, None, "cpu"))


def test_the_table_of_overheads() -> None:
    peer = entry(Contender("ddp", "ddp", 2, "bf16"), [100.0] * 6)
    cheap = entry(
        Contender("dtrain ddp", "ddp", 2, "bf16", 0, pair="ddp"),
        [101.0, 101.0, 101.0, 101.9, 100.5, 101.0],
        [104.0, 103.0, 104.0, 104.0, 104.0, 105.0],
    )
    control = entry(Contender("ddp again", "ddp", 2, "bf16", pair="ddp"), [100.0, 100.0, 99.0, 100.0, 102.0, 100.0])
    alone = entry(Contender("dtrain fsdp2, stage 2", "fsdp2", 2, "bf16", 2, pair="fsdp2_no_reshard"), [50.0] * 6)
    about, table, differences = describe_overheads([peer, cheap, control, alone])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[2:] == [
        ["dtrain ddp", "ddp", "1.010 (1.005 to 1.019)", "1.040 (1.030 to 1.050)", "+1.0 % (+0.5 to +1.9)", "yes"],
        ["ddp again (control)", "ddp", "1.000 (0.990 to 1.020)", "1.000 (0.990 to 1.020)", "+0.0 % (-1.0 to +2.0)", ""],
    ]
    assert "- ddp: " in differences
    assert "- fsdp2: " not in differences
    assert "the whole interval lies below" in about
    assert describe_overheads([peer, alone]) == []
    # neither an engine of ours nor the control is a rival
    assert best([peer, cheap, control, alone]) is peer


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([1.0, 1.01, 1.0, 1.0, 1.02, 1.0], "yes"),
        ([1.0, 1.01, 1.0, 1.0, 1.021, 1.0], "open"),
        ([1.3, 1.021, 1.1, 1.1, 1.1, 1.1], "no"),
        ([1.3, 1.019, 1.1, 1.1, 1.1, 1.1], "open"),
        ([1.0] * 5, "too few rounds"),
        ([1.0] * 8 + [1.5], "yes"),  # from nine rounds on one may be wild
        ([1.0] * 7 + [1.5], "open"),
    ],
)
def test_the_verdict_counts_only_what_noise_does_not_hide(ratios: list[float], said: str) -> None:
    assert verdict(ratios) == said


@pytest.mark.parametrize("count", [6, 9, 12, 25])
def test_the_interval_holds_the_median_as_often_as_it_says(count: int) -> None:
    draw, true_median = random.Random(count), 2**0.5  # of a Pareto distribution: skewed, with wild values
    held = 0
    for _ in range(2000):
        interval = median_interval([draw.paretovariate(2) for _ in range(count)])
        assert interval is not None
        held += interval[0] <= true_median <= interval[1]
    assert 0.94 < held / 2000 < 0.99


def test_the_interval_is_of_the_values_and_the_median_within() -> None:
    values = [3.0, 1.0, 2.0, 9.0, 5.0, 4.0, 8.0, 7.0, 6.0]
    assert median_interval(values) == (2.0, 8.0)
    assert median(values) == 5.0
    assert median_interval(values[:5]) is None
