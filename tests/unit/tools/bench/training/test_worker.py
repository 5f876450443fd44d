"""What one rank of each case trains, and the state that it counts. All cases of a test share two processes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from dtrain.cli.resolve import read_suite
from dtrain.config.commands import BENCH_ENGINE
from dtrain.config.dump import config_to_dict
from dtrain.tools.bench.peers import PEERS
from dtrain.tools.bench.records import BenchmarkCase, Footprint, RankJob
from dtrain.tools.bench.training.worker import footprint, prepare, take_steps
from tests.helpers.ranks import run_ranks
from tests.unit.tools.bench.made import SHORT, TINY

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
STEPS = 5
LIBRARIES = [name for name in ("ddp", "ddp_zero", "accelerate", "fsdp2") if PEERS[name].is_installed]


@dataclass(frozen=True)
class Trained:
    """Losses of this rank, and its state in bytes a parameter."""

    losses: list[float]
    footprint: Footprint
    state: dict[str, float]


def train(rank: int, world: int, cases: list[BenchmarkCase]) -> dict[str, Trained]:
    config = read_suite([*TINY, *SHORT, "model.hidden_dim=96"], BENCH_ENGINE)
    assert config is not None
    trained = {}
    for case in cases:
        training = prepare(RankJob(case, rank, "store", config_to_dict(config)), CPU)
        steps = take_steps(training, CPU, STEPS)
        assert [len(steps[key]) for key in ("step_ms", "cpu_ms", "losses")] == [STEPS] * 3
        held = footprint(training, CPU)
        state = {kind: size / held.num_parameters for kind, size in held.state.items()}
        trained[case.name] = Trained(steps["losses"], held, state)
    return trained


def train_on_two_ranks(cases: list[BenchmarkCase]) -> dict[str, Trained]:
    """Rank 0's results; each case's loss, a mean over the ranks, must be that of the first."""
    ranks = run_ranks(2, train, cases)
    losses = {
        name: [(a + b) / 2 for a, b in zip(*(rank[name].losses for rank in ranks), strict=True)] for name in ranks[0]
    }
    first = losses[cases[0].name]
    assert first[-1] < first[0]
    for name, values in losses.items():
        assert values == pytest.approx(first, rel=2e-3), name
    numel = ranks[0][cases[0].name].footprint.num_parameters
    assert {trained.footprint.num_parameters for trained in ranks[0].values()} == {numel}
    return ranks[0]


def test_peers_and_engines_train_alike_and_count_their_state() -> None:
    engines = [
        BenchmarkCase("dtrain ddp", "ddp", 2, "bf16", 0),
        BenchmarkCase("dtrain fsdp2, stage 3", "fsdp2", 2, "bf16", 3),
        BenchmarkCase("native, stage 0", "native", 2, "bf16", 0),
        BenchmarkCase("native, stage 2", "native", 2, "bf16", 2),
    ]
    peers = [BenchmarkCase(name, name, 2, "bf16") for name in LIBRARIES]
    trained = train_on_two_ranks([*peers, BenchmarkCase("ddp again", "ddp", 2, "bf16"), *engines])
    assert trained["ddp again"].losses == trained["ddp"].losses
    expected = {"ddp": (4, 8, 4), "ddp_zero": (4, 4, 4), "fsdp2": (2, 4, 2)}
    for name, (master, moments, grad) in expected.items():
        state = trained[name].state
        assert state["master"] == pytest.approx(master, rel=0.02)
        assert state["moments"] == pytest.approx(moments, rel=0.2)  # whole parameters a rank, and step counters
        assert state["main_grad"] == pytest.approx(grad, rel=0.02)
        assert state["compute"] == 0
    # The engine frees its gradients after a step, which the formula counts.
    assert trained["dtrain ddp"].state["moments"] == 8
    for name in ("dtrain fsdp2, stage 3", "native, stage 0", "native, stage 2"):
        formula = trained[name].footprint.formula
        assert formula is not None
        assert 1.0 <= sum(trained[name].footprint.state.values()) / sum(formula.values()) < 1.5  # tiny: mostly padding
    totals = {name: sum(item.state.values()) for name, item in trained.items()}
    assert totals["native, stage 2"] < 0.7 * totals["native, stage 0"]


@pytest.mark.skipif(not PEERS["deepspeed_1"].is_installed, reason="needs deepspeed")
def test_deepspeed_peers_train_as_ddp_does_and_count_their_state() -> None:
    # the engine before the peers: it switches DeepSpeed's extension off, which takes a minute to compile
    engine = BenchmarkCase("dtrain deepspeed", "deepspeed", 2, "bf16", 2)
    peers = [BenchmarkCase(name, name, 2, "bf16") for name in ("deepspeed_1", "deepspeed_3")]
    trained = train_on_two_ranks([BenchmarkCase("ddp", "ddp", 2, "bf16"), engine, *peers])
    for name in ("deepspeed_1", "deepspeed_3", "dtrain deepspeed"):
        state = trained[name].state
        assert state["master"] == pytest.approx(2, rel=0.02)
        assert state["moments"] == pytest.approx(4, rel=0.02)
        # Stage 3 keeps small parameters whole beside the shards.
        assert state["compute"] == pytest.approx(3 if name == "deepspeed_3" else 2, rel=0.02)
