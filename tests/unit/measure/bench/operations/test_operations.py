"""Each suite of operations, once from end to end at a tiny size; and its cases, which do the same work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dtrain.__main__ import main
from dtrain.config.commands import SUITES
from dtrain.config.model import ModelConfig
from dtrain.config.optim import Muon
from dtrain.config.tool_schema import DataBenchConfig, LossHeadBenchConfig, OptimizerBenchConfig
from dtrain.data.text import Document
from dtrain.errors import BenchError
from dtrain.measure.bench.operations import data
from dtrain.measure.bench.operations.loss_head import BESIDE, PEAK, _Head
from dtrain.measure.bench.operations.muon import MuonPhase
from dtrain.measure.bench.operations.optimizer import OptimizerPhase, _record
from dtrain.measure.bench.records import OperationResults, read_results
from dtrain.measure.bench.report.document import describe
from dtrain.models import build_model
from dtrain.tasks import IGNORE_INDEX
from tests.helpers.oracle import assert_close_to_largest, normwise_error
from tests.helpers.token_shards import MemoryShards

CPU = torch.device("cpu")


def bench(capsys: pytest.CaptureFixture[str], path: Path, suite: str, *words: str) -> OperationResults:
    """The results of two rounds, which are also what the suite prints and what a report on their file shows."""
    out = path / "r.json"
    assert main(["bench", suite, *words, "bench.rounds=2", "bench.device=cpu", f"bench.out={out}"]) == 0
    results = read_results(out)
    assert isinstance(results, OperationResults)
    assert all(len(timing.ms) == 2 and min(timing.ms) > 0 for timing in results.timings)
    assert capsys.readouterr().out.strip().endswith(describe(results).markdown())
    document = path / "doc.md"
    document.write_text("# Title\n")
    assert main(["bench", "report", str(out), f"bench.docs={document}"]) == 0
    assert describe(results).summary() in document.read_text()
    return results


def cases_of(results: OperationResults) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for timing in results.timings:
        found.setdefault(timing.workload, []).append(timing.case)
    return found


def test_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench.numel=5000", "bench.compiled=false", "bench.optimizers=[sgd,adamw,muon]"]
    results = bench(capsys, tmp_path, "optimizer", *words)
    assert results.config["bench"]["numel"] == 5000
    adamw = {timing.case: timing for timing in results.timings if timing.workload == "adamw, 8 bytes"}
    assert adamw["dtrain, blocked"].nbytes == 4096 * 34
    assert {results.reference, *results.baselines} <= adamw.keys()
    muon = [timing for timing in results.timings if timing.workload == "muon, 4 bytes"]
    assert [timing.case for timing in muon] == ["torch, BF16 grads", "dtrain"]
    cubes = 3 * 4 + 1 * 4 + 2 * 4 * 4 + 4 * 2  # of [3d, d], [d, d], [4d, d] and [d, 4d]: 4 m^2 n + 2 m^3 in d^3
    assert {(timing.nbytes, timing.flops) for timing in muon} == {(0, 5 * cubes * 64**3)}
    assert [one.ranks for one in results.traffic] == [2, 4, 8, 64]
    assert all(0 < one.bytes_per_parameter <= one.bound == 4 for one in results.traffic)
    assert "2.33 on 2 ranks" in (tmp_path / "doc.md").read_text()


def test_loss_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["bench.tokens=64", "bench.hidden_dim=16", "bench.vocab_size=200", "bench.compiled=false"]
    results = bench(capsys, tmp_path, "loss-head", *sizes, "bench.dtypes=[fp32]")
    assert {"full logits", "dtrain, 128 rows"} <= set(cases_of(results)["fp32"])
    assert {timing.workload for timing in results.timings} == {"fp32"}
    assert {timing.flops for timing in results.timings} == {6 * 64 * 16 * 200}
    gradients = (64 * 16 + 200 * 16) / (64 * 200)
    full = next(timing.shares for timing in results.timings if timing.case == "full logits")
    assert full[PEAK] == pytest.approx(3, abs=0.3), "three copies of the logits"
    assert all(timing.shares[PEAK] - timing.shares[BESIDE] == pytest.approx(gradients) for timing in results.timings)
    assert main(["bench", "loss-head", "bench.dtypes=[fp61]"]) == 2
    assert "bench.dtypes: 'fp61' is not one of fp32, bf16" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
def test_collectives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = bench(capsys, tmp_path, "collectives", "bench.sizes=[2048,5000]")
    # bytes that a rank receives at 4,096 elements
    received = {
        "all_gather BF16": 4096, "all_to_all BF16, sum FP32": 4096, "reduce_scatter FP32": 8192,
        "all_reduce FP32": 16384,
    }  # fmt: skip
    assert set(cases_of(results)) == {f"{name}, {size}" for name in received for size in ("2,048", "4,096")}
    sockets = {timing.workload: timing.nbytes for timing in results.timings if timing.case == "sockets"}
    assert {name: sockets[f"{name}, 4,096"] for name in received} == received


@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
def test_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    results = bench(capsys, tmp_path, "checkpoint", "bench.sizes=[1,2]", "bench.ranks=2")
    names = ["lower bound", "dtrain", "dtrain, asynchronous", "DCP save", "DCP async_save", "torch.save, fsync"]
    workloads = [f"{kind}, {size} MB" for size in (1, 2) for kind in ("stall", "total")]
    assert cases_of(results) == dict.fromkeys(workloads, names)
    assert {round(timing.nbytes / 1e6) for timing in results.timings} == {1, 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["doc.md", "r.json"]


@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
def test_data(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def command(*words: str) -> None:
        assert main(words) == 0

    documents = [Document("a.py", b"def f(x):\n    return x + 1\n" * 400), Document("b.py", b"import sys, os\n" * 400)]
    monkeypatch.setattr(data, "stdlib_documents", lambda: documents)
    monkeypatch.setattr(data, "_dtrain", command)
    sizes = ["bench.vocab_size=300", "bench.median_length=40", "bench.documents=9", "bench.micro_batch_size=2"]
    model = ["model.max_seq_len=32", "model.hidden_dim=16", "model.num_layers=1", "model.num_heads=2"]
    results = bench(capsys, tmp_path, "data", *sizes, *model, "bench.reads=2")
    assert cases_of(results) == {
        "tokenize": ["library alone", "dtrain data tokenize"],
        "read": ["windows", "windows, just opened", "best_fit", "best_fit, just opened"],
        "learn": ["padded to 32", "padded to the longest", "packed"],
    }
    assert {timing.tokens for timing in results.timings if timing.workload == "read"} == {2 * 2 * 32}
    assert len({timing.tokens for timing in results.timings if timing.workload == "learn"}) == 1


MUON = Muon(lr=0.1)


@pytest.mark.parametrize("optimizer", [name for name in OptimizerBenchConfig().optimizers if name != "muon"])
def test_optimizers_do_the_same_update(optimizer: str) -> None:
    record = replace(_record(optimizer), lr=0.1)
    names = ["torch, FP32 grads", "torch, BF16 grads", "torch foreach, BF16 grads"]
    phase = OptimizerPhase(2048, CPU, record)
    before = phase.master.clone()
    phase.operations(compiled=False)["dtrain, blocked"].run()
    found = OptimizerPhase(2048, CPU, record).operations(compiled=False).keys()
    compared = [name for name in names if name in found]  # torch has no Lion
    assert len(compared) >= 2
    for name in compared:
        baseline = OptimizerPhase(2048, CPU, record)
        baseline.operations(compiled=False)[name].run()
        # BF16 gradients have eight bits
        assert_close_to_largest(phase.master - before, baseline.master - before, 5e-3)
        assert torch.equal(baseline.replica, baseline.master.bfloat16())


def test_muon_of_both_sides_ends_with_equal_masters_and_clips() -> None:
    own, baseline = (MuonPhase(1, CPU, MUON, 0.5) for _ in range(2))
    for run in (own.dtrain_step(), baseline.torch_sequence(baseline.torch_optimizer())):
        run()
        run()
    assert not torch.equal(own.master, MuonPhase(1, CPU, MUON).master)
    assert torch.equal(own.master, baseline.master)
    assert torch.equal(own.replica, baseline.replica)
    assert torch.equal(own.replica, own.master.bfloat16())
    own, baseline = (MuonPhase(1, CPU, MUON, 4.0) for _ in range(2))
    own.dtrain_step()()
    optimizer = baseline.torch_optimizer()
    baseline.torch_sequence(optimizer)()
    want = torch.cat([state["momentum_buffer"].view(-1) for state in optimizer.state.values()])
    assert_close_to_largest(own.momentum, want, 1e-5)


def test_loss_heads_compute_the_same_gradients() -> None:
    head = _Head.of(LossHeadBenchConfig(tokens=64, hidden_dim=16, vocab_size=200), torch.float32, CPU)
    found = []
    for run in head.cases(compiled=False).values():
        run()
        assert head.hidden.grad is not None
        assert head.weight.grad is not None
        found.append(torch.cat([head.hidden.grad.flatten(), head.weight.grad.flatten()]))
    assert len(found) >= 2
    assert all(normwise_error(grads, found[0]) < 1e-5 for grads in found)


def test_padded_and_packed_batches_have_the_same_loss() -> None:
    lengths = [3, 9, 39, 2, 17, 5, 5, 30, 12, 7, 4, 8]
    cases = data.learning_cases(MemoryShards(lengths), np.cumsum(lengths[:10]), 16, batch_size=2)
    assert list(cases) == ["padded to 16", "padded to the longest", "packed"]
    assert len(cases["packed"]) < len(cases["padded to 16"])
    model = ModelConfig(num_layers=1, hidden_dim=16, num_heads=2, max_seq_len=16)
    config = SUITES["data"].primary.schema(bench=DataBenchConfig(micro_batch_size=2), model=model)
    losses = []
    for batches in cases.values():
        counts = [int((batch["targets"] != IGNORE_INDEX).sum()) for batch in batches]
        assert sum(counts) == sum(length - 1 for length in lengths[:10])
        assert len(set(counts)) > 1
        alone = build_model(model, 200, 0)
        total = sum(alone(**batch).loss.item() * count for batch, count in zip(batches, counts, strict=True))
        losses += [total / sum(counts), data.learner(config, 200, CPU).step(batches).loss]
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-6)


@pytest.mark.processes
def test_a_command_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"dtrain data info .* ended with exit code 2: .*manifest"):
        data._dtrain("data", "info", str(tmp_path))
