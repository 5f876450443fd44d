"""The peers of `dtrain bench`: scripts without dtrain's code, which train as its engines do."""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from dtrain.cli.resolve import read_suite
from dtrain.config.commands import BENCH_ENGINE
from dtrain.config.dump import config_to_dict
from dtrain.tools.bench import cli, peers
from dtrain.tools.bench.peers import PEERS, deepspeed_zero, plain
from dtrain.tools.bench.records import BenchmarkCase, FailedCase, Footprint, RankJob
from dtrain.tools.bench.training.worker import footprint, prepare, take_steps
from tests.helpers.ranks import run_ranks
from tests.unit.tools.bench.made import SHORT, TINY, result, results_of

CPU = torch.device("cpu")
needs_deepspeed = pytest.mark.skipif(not PEERS["deepspeed_1"].is_installed, reason="needs deepspeed")


def test_peers_import_nothing_of_dtrain_but_their_shared_script() -> None:
    folder = Path(peers.__path__[0])
    assert {peer.module for peer in PEERS.values()} | {"plain"} == {path.stem for path in folder.glob("[!_]*.py")}
    for path in folder.glob("[!_]*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dtrain"):
                assert (node.module, [name.name for name in node.names]) == ("dtrain.tools.bench.peers", ["plain"])
            elif isinstance(node, ast.Import):
                assert not any(name.name.startswith("dtrain") for name in node.names)


def test_exit_code_is_1_only_if_an_engine_of_dtrain_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for engine, stage, code in (("deepspeed_1", None, 0), ("ddp", None, 0), ("ddp", 0, 1), ("native", 2, 1)):
        failure = FailedCase(BenchmarkCase("late", engine, 2, "bf16", stage), "late: rank 0 failed: no compiler")
        results = results_of([result("plain", 1, [[1.0]], engine="plain")])
        results.failures.append(failure)
        assert cli._finish(results, str(tmp_path / "r.json")) == code
        assert "Did not run: late: rank 0 failed: no compiler." in capsys.readouterr().out


# -- what they train ---------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor) -> SimpleNamespace:
        weight = self.linear.weight
        return SimpleNamespace(loss=self.linear(x.to(weight.dtype)).float().square().mean())


def sent_dtypes(rank: int, world: int, cases: list[tuple[int, bool]]) -> list[set[torch.dtype]]:
    """Dtypes of the gradients that DeepSpeed's peer sends in a step, by stage and ``fp32_sums``."""
    from dtrain.engine.deepspeed.library import load, observed_reductions

    load(CPU)
    os.environ["LOCAL_RANK"] = str(rank)  # DeepSpeed reads a launcher's environment
    settings = plain.Settings(1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0, True, 1, CPU)
    sent: list[set[torch.dtype]] = []
    for stage, fp32_sums in cases:
        training = deepspeed_zero.prepare(Model(16, 16), settings, stage=stage, fp32_sums=fp32_sums)
        seen: set[torch.dtype] = set()
        with observed_reductions(lambda tensor, seen=seen: seen.add(tensor.dtype) if tensor.numel() > 16 else None):
            training.step({"x": torch.ones(2, 16)})
        sent.append(seen)
    return sent


@pytest.mark.processes
@needs_deepspeed
def test_deepspeed_peer_sums_in_fp32_as_the_deepspeed_engine_does() -> None:
    cases = [(1, True), (2, True), (3, True), (2, False)]  # the last one shows that the others could fail
    for sent in run_ranks(2, sent_dtypes, cases):
        assert sent == [{torch.float32}] * 3 + [{torch.bfloat16}]


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
        steps = take_steps(training, CPU, 5)
        assert [len(steps[key]) for key in ("step_ms", "cpu_ms", "losses")] == [5] * 3
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
    assert len({trained.footprint.num_parameters for trained in ranks[0].values()}) == 1
    return ranks[0]


@pytest.mark.exhaustive
@pytest.mark.processes
def test_peers_and_engines_train_alike_and_count_their_state() -> None:
    engines = [
        BenchmarkCase("dtrain ddp", "ddp", 2, "bf16", 0),
        BenchmarkCase("dtrain fsdp2, stage 3", "fsdp2", 2, "bf16", 3),
        BenchmarkCase("native, stage 2", "native", 2, "bf16", 2),
    ]
    libraries = [BenchmarkCase(name, name, 2, "bf16") for name in ("ddp", "ddp_zero", "fsdp2")]
    trained = train_on_two_ranks([*libraries, *engines])
    expected = {"ddp": (4, 8, 4), "ddp_zero": (4, 4, 4), "fsdp2": (2, 4, 2)}
    for name, (master, moments, grad) in expected.items():
        state = trained[name].state
        assert state["master"] == pytest.approx(master, rel=0.02)
        assert state["moments"] == pytest.approx(moments, rel=0.2)  # whole parameters a rank, and step counters
        assert state["main_grad"] == pytest.approx(grad, rel=0.02)
        assert state["compute"] == 0
    # The engine frees its gradients after a step, which the formula counts.
    assert trained["dtrain ddp"].state["moments"] == 8
    for name in ("dtrain fsdp2, stage 3", "native, stage 2"):
        formula = trained[name].footprint.formula
        assert formula is not None
        assert 1.0 <= sum(trained[name].footprint.state.values()) / sum(formula.values()) < 1.5  # tiny: mostly padding


@pytest.mark.exhaustive
@pytest.mark.processes
@needs_deepspeed
def test_peers_of_other_libraries_train_as_ddp_does_and_count_their_state() -> None:
    # the engine before the peers: it switches DeepSpeed's extension off, which takes a minute to compile
    engine = BenchmarkCase("dtrain deepspeed", "deepspeed", 2, "bf16", 2)
    names = ["deepspeed_1", "deepspeed_3", *["accelerate"] * PEERS["accelerate"].is_installed]
    own = [BenchmarkCase(name, name, 2, "bf16") for name in names]
    trained = train_on_two_ranks([BenchmarkCase("ddp", "ddp", 2, "bf16"), engine, *own])
    for name in ("deepspeed_1", "deepspeed_3", "dtrain deepspeed"):
        state = trained[name].state
        assert state["master"] == pytest.approx(2, rel=0.02)
        assert state["moments"] == pytest.approx(4, rel=0.02)
        # Stage 3 keeps small parameters whole beside the shards.
        assert state["compute"] == pytest.approx(3 if name == "deepspeed_3" else 2, rel=0.02)
