"""The peers of `dtrain bench`: scripts without dtrain's code, which train as its engines do."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.cli.resolve import read_suite
from dtrain.config.commands import SUITES
from dtrain.config.dump import config_to_dict
from dtrain.measure.bench import cli, peers
from dtrain.measure.bench.peers import PEERS, deepspeed_zero, plain
from dtrain.measure.bench.records import BenchmarkCase, FailedCase, RankJob
from dtrain.measure.bench.training.worker import RankCase
from dtrain.measure.worker import Rank
from tests.helpers.ranks import run_ranks
from tests.unit.measure.bench.made import SHORT, TINY, result, results_of

CPU = torch.device("cpu")
needs_deepspeed = pytest.mark.skipif(not PEERS["deepspeed_1"].is_installed, reason="needs deepspeed")


def test_peers_import_nothing_of_dtrain_but_their_shared_script() -> None:
    folder = Path(peers.__path__[0])
    assert {peer.module for peer in PEERS.values()} | {"plain"} == {path.stem for path in folder.glob("[!_]*.py")}
    for path in folder.glob("[!_]*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dtrain"):
                assert (node.module, [name.name for name in node.names]) == ("dtrain.measure.bench.peers", ["plain"])
            elif isinstance(node, ast.Import):
                assert not any(name.name.startswith("dtrain") for name in node.names)


def test_exit_code_is_1_only_if_an_engine_of_dtrain_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for engine, stage, code in (("deepspeed_1", None, 0), ("ddp", None, 0), ("ddp", 0, 1), ("native", 2, 1)):
        failure = FailedCase(BenchmarkCase("late", engine, 2, "bf16", stage), "late: rank 0 failed: no compiler")
        results = results_of([result("plain", 1, [[1.0]], engine="plain")])
        results.failures.append(failure)
        assert cli._finish(results, tmp_path / "r.json") == code
        assert "Did not run: late: rank 0 failed: no compiler." in capsys.readouterr().out


class Model(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor) -> SimpleNamespace:
        weight = self.linear.weight
        return SimpleNamespace(loss=self.linear(x.to(weight.dtype)).float().square().mean())


def sent_dtypes(rank: int, world: int, cases: list[tuple[int, bool]]) -> list[set[torch.dtype]]:
    """Dtypes of the gradients that DeepSpeed's peer sends in a step, by stage and ``fp32_sums``."""
    from dtrain.engine.adapters.deepspeed.library import load, observed_reductions

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


Trained = tuple[list[Any], dict[str, float]]


def train(rank: int, world: int, cases: list[BenchmarkCase]) -> list[Trained]:
    """Losses of this rank, and its state in bytes a parameter, of each case."""
    config = read_suite([*TINY, *SHORT, "model.hidden_dim=96"], SUITES["engine"].primary)
    assert config is not None
    trained: list[Trained] = []
    for case in cases:
        job = RankJob(case, config_to_dict(config), "", config.bench.micro_batch_size)
        running = RankCase.prepare(job, Rank(rank=rank, ranks=world, device="cpu"))
        losses, held = running.take_steps(5).losses, running.footprint(last=False, warnings=[])
        trained.append((losses, {kind: size / held.num_parameters for kind, size in held.state.items()}))
    return trained


def train_alike(cases: list[BenchmarkCase]) -> dict[str, dict[str, float]]:
    """States of rank 0 by case; each case's loss, a mean over the ranks, must be that of the first."""
    ranks = run_ranks(2, train, cases)
    losses = ([losses for losses, _ in trained] for trained in ranks)
    first, *others = ([(a + b) / 2 for a, b in zip(*both, strict=True)] for both in zip(*losses, strict=True))
    assert first[-1] < first[0]
    for other in others:
        assert other == pytest.approx(first, rel=2e-3)
    return {case.name: state for case, (_, state) in zip(cases, ranks[0], strict=True)}


@pytest.mark.processes
def test_peers_train_alike() -> None:
    names = ("ddp", "ddp_zero", "fsdp2", *["accelerate"] * PEERS["accelerate"].is_installed)
    train_alike([BenchmarkCase(name, name, 2, "bf16") for name in names])


@pytest.mark.exhaustive
@pytest.mark.processes
@needs_deepspeed
def test_peers_of_deepspeed_train_as_ddp_does_and_count_their_state() -> None:
    # the engine before the peers: it switches DeepSpeed's extension off, which takes a minute to compile
    engine = BenchmarkCase("dtrain deepspeed", "deepspeed", 2, "bf16", 2)
    names = ("deepspeed_1", "deepspeed_3")
    ddp, *own = (BenchmarkCase(name, name, 2, "bf16") for name in ("ddp", *names))
    states = train_alike([ddp, engine, *own])
    for name in ("deepspeed_1", "deepspeed_3", "dtrain deepspeed"):
        # stage 3 keeps small parameters whole beside the shards
        held = {"master": 2, "moments": 4, "compute": 3 if name == "deepspeed_3" else 2}
        assert {kind: states[name][kind] for kind in held} == pytest.approx(held, rel=0.02)
