"""The suites that train: their cases, their processes, and each once from end to end at a tiny size."""

from __future__ import annotations

import gc
import logging
import os
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtrain.__main__ import main
from dtrain.cli.resolve import read_suite
from dtrain.config import capabilities
from dtrain.config.commands import SUITES
from dtrain.config.precision import Float8
from dtrain.config.tool_schema import EngineBenchConfig, PrecisionBenchConfig, TrainingSuite
from dtrain.errors import BenchError, ConfigError
from dtrain.measure.bench import cli, peers
from dtrain.measure.bench.peers import DEFAULT_PEERS, PEERS
from dtrain.measure.bench.records import BenchmarkCase, CaseResult, RankJob, TrainingResults, read_results
from dtrain.measure.bench.report.document import describe
from dtrain.measure.bench.report.statistics import final_loss
from dtrain.measure.bench.report.training import has_wrong_loss
from dtrain.measure.bench.training import cases, first_step, float8, rounds, suites, worker
from dtrain.measure.bench.training.float8 import ALL_THREE, product_shapes
from dtrain.measure.bench.training.processes import CaseProcesses
from dtrain.measure.record import write_record
from dtrain.measure.worker import Rank
from dtrain.precision.float8.options import Recipe, resolve_float8
from dtrain.telemetry import host
from tests.unit.measure.bench.made import HOST, SHORT, TINY, result, row

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_ranks")]


def bench(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> TrainingResults:
    """The results of a suite, which are also what it prints and what a report on their file shows."""
    assert main(["bench", *words, f"bench.out={path}"]) == 0
    results = read_results(path)
    assert isinstance(results, TrainingResults)
    assert results.command == f"dtrain bench {shlex.join([*words, f'bench.out={path}'])}"
    assert capsys.readouterr().out.strip() == describe(results).markdown()
    document = path.with_suffix(".md")
    document.write_text("# Title\n")
    assert main(["bench", "report", str(path), f"bench.docs={document}"]) == 0
    assert describe(results).summary() in document.read_text()
    assert results.failures == []
    return results


def cases_of(results: TrainingResults) -> dict[str, CaseResult]:
    assert not any(has_wrong_loss(case, results.cases) for case in results.cases)
    return {case.case.name: case for case in results.cases}


def test_engine_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lists = ["bench.stages=[2]", "bench.peers=[ddp]", "bench.engines=[]", "bench.starts=0"]
    results = bench(capsys, tmp_path / "deep/r.json", "engine", *TINY, *SHORT, *lists)
    cases = cases_of(results)
    assert list(cases) == ["plain", "native, 1 rank", "plain, 2 at once", "ddp", "native, stage 2"]
    for case in cases.values():
        assert all(len(timed.step_ms) == len(timed.cpu_ms) == 2 for timed in case.rounds)
        assert case.first_step_s > max(case.warmup.step_ms) / 1000
        assert case.footprint.peak_rss > 50e6
        assert case.footprint.num_parameters == cases["plain"].footprint.num_parameters
    assert cases["plain, 2 at once"].case.is_lower_bound
    # FP32 masters under BF16 replicas start from the plain loop's weights and see its data.
    one, ddp, native = cases["native, 1 rank"], cases["ddp"], cases["native, stage 2"]
    assert final_loss(one) == pytest.approx(final_loss(cases["plain"]), rel=2e-3)
    assert final_loss(native) == pytest.approx(final_loss(ddp), rel=2e-3)
    assert final_loss(one) != final_loss(native)
    assert sum(native.footprint.state.values()) < 0.7 * sum(one.footprint.state.values())
    steps, details = describe(results).tables
    assert row(steps, "native, stage 2")["speed-up over ddp"]
    assert "step / plain, 2 at once" in details.columns
    assert os.uname().nodename not in astuple(results.host)


@pytest.mark.exhaustive
def test_precision_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = bench(capsys, tmp_path / "r.json", "precision", *TINY, *SHORT, "bench.precisions=[bf16]")
    fp32, bf16 = cases_of(results).values()
    assert (fp32.case.precision, bf16.case.precision) == ("fp32", "bf16")
    assert final_loss(fp32) == pytest.approx(final_loss(bf16), rel=0.01)
    assert final_loss(fp32) != final_loss(bf16)
    assert fp32.footprint.state != bf16.footprint.state
    assert row(describe(results).tables[0], "bf16")["speed-up over fp32"]


def test_blocks_suite_counts_activations_and_trains_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = bench(capsys, tmp_path / "r.json", "blocks", *TINY, *SHORT, "bench.cases=[none,selective]")
    none, selective = cases_of(results).values()
    assert [timed.losses for timed in none.rounds] == [timed.losses for timed in selective.rounds]
    few, all_ = selective.footprint.activations, none.footprint.activations
    assert few is not None
    assert all_ is not None
    assert 0 < few < all_
    shown = row(describe(results).tables[0], "selective")["activations MiB (/ none)"]
    assert shown == f"{few / 2**20:.2f} ({few / all_:.3f})"


def test_vote_suite_times_parts_inside_each_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = cases_of(bench(capsys, tmp_path / "r.json", "vote", *TINY, *SHORT, "bench.steps=3"))
    none, dynamic = cases["bf16, none"], cases["bf16, dynamic"]
    for timed in (*none.rounds, *dynamic.rounds):
        vote, norm, gather = (timed.parts_ms[name] for name in ("vote", "norm", "all-gather"))
        assert [len(steps) for ranks in (vote, norm, gather) for steps in ranks] == [3] * 6
        for rank in range(2):
            for whole, *parts in zip(vote[rank], norm[rank], gather[rank], strict=True):
                assert min(parts) > 0
                assert sum(parts) < whole  # record and decision take time too
        assert all(max(ranks) < step for *ranks, step in zip(*vote, timed.step_ms, strict=True))
    # A power of two changes only the exponents of the gradients, and the update divides by it.
    assert final_loss(dynamic) == pytest.approx(final_loss(none), rel=1e-4)


@pytest.mark.exhaustive
def test_telemetry_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("telemetry", *TINY, *SHORT, "bench.precisions=[fp32]", "bench.ranks=1")
    off, sampled = cases_of(bench(capsys, tmp_path / "r.json", *words)).values()
    assert [timed.losses for timed in off.rounds] == [timed.losses for timed in sampled.rounds]


def test_float8_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.num_heads=2", "bench.warmup_steps=0", "bench.widths=[48]", "bench.recipes=[tensorwise]"]
    results = bench(capsys, tmp_path / "r.json", "float8", *TINY, *SHORT, *words)
    assert "the times say nothing" in describe(results).markdown()
    bf16, fp8 = results.cases
    assert [(one.case.name, one.case.width) for one in (bf16, fp8)] == [("bf16", 48), ("fp8 tensorwise", 48)]
    embedding = 320 * 48  # shared with the head; bytes, padded
    assert bf16.footprint.num_parameters == embedding + 4 * 48 * 48 + 3 * 48 * 128 + 3 * 48
    # The weights and data are the same, the products are not.
    assert final_loss(fp8) == pytest.approx(final_loss(bf16), rel=0.02)
    assert final_loss(fp8) != final_loss(bf16)
    formats = {linear.name: linear.format for linear in fp8.footprint.linears}
    assert formats["blocks.0.ffn.down"] == "fp8"
    assert formats["head"] != "fp8", "the last product stays in BF16 by default"
    products = ["output", "input gradient", "weight gradient", ALL_THREE] * len(product_shapes(fp8.footprint.linears))
    assert [product.product for product in results.products] == products
    assert all(list(product.ms) == ["bf16", "tensorwise"] for product in results.products)


@pytest.mark.parametrize("recipe", Float8.__dataclass_fields__["recipe"].metadata["choices"])
def test_each_product_of_a_recipe_is_one_of_its_linear(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[dict[str, Any]] = []

    def time(workloads: dict[str, Any], *_: Any, **__: Any) -> dict[str, list[float]]:
        timed.append(workloads)
        return {name: [1.0] for name in workloads}

    monkeypatch.setattr(float8, "alternating_ms", time)
    torch.manual_seed(0)
    resolved = Recipe.of(resolve_float8(Float8(recipe=recipe), torch.device("cpu")), torch.bfloat16)
    times = float8.time_products(128, 160, (256, 128), {recipe: resolved}, 1, torch.device("cpu"))
    assert [product.sizes for product in times[:3]] == [[160, 256, 128], [160, 128, 256], [256, 128, 160]]
    for product, workloads in zip(times[:3], timed, strict=False):
        exact, got = workloads["bf16"](), workloads[recipe]()
        assert torch.equal(exact, got) == (recipe == "rowwise_bf16_wgrad" and product.product == "weight gradient")
        assert (got.float() - exact.float()).norm() < 0.1 * exact.float().norm()
    timed[3][recipe]()


def test_step_suite_starts_each_round_anew_and_measures_what_its_keys_ask_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[list[int]] = []

    def write(path: Path, results: Any) -> None:
        written.append([len(case.rounds) for case in results.cases])
        write_record(path, results)

    monkeypatch.setattr(cli, "write_record", write)
    words = ["bench.cases=[dtrain,plain,selective]", "bench.window_steps=2", "bench.attempts=1"]
    results = bench(capsys, tmp_path / "r.json", "step", *TINY, *SHORT, *words)
    assert written == [[1], [1, 1], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2]], "one model in memory at a time"
    dtrain, plain, _ = results.cases
    for case in results.cases:
        assert [(len(one.step_ms), len(one.losses)) for one in case.rounds] == [(1, 2)] * 2, "a window of two steps"
        assert case.rounds[0].losses == case.rounds[1].losses, "each round is a start on the same data"
        assert (case.micro_batch, case.footprint.fitted, case.footprint.unfit) == (2, [3], None)
        assert case.footprint.flops_causal is not None
        assert case.setup_s is not None
        assert 0 < case.setup_s < case.first_step_s
    assert dtrain.rounds[0].losses == pytest.approx(plain.rounds[0].losses, rel=2e-3)
    assert [case.footprint.activations is not None for case in results.cases] == [False, False, True]
    shown = row(describe(results).tables[0], "plain")
    assert shown["sequences"] == "2"
    assert shown["speed"]


def test_the_start_of_a_training_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "dtrain"
    package.mkdir()
    monkeypatch.chdir(tmp_path)
    (package / "__init__.py").touch()
    monkeypatch.setattr(first_step, "environment", lambda threads: {"PYTHONPATH": str(tmp_path)})
    (package / "__main__.py").write_text("import sys, time\ntime.sleep(0.2)\nprint('a\\nstep 1/3', file=sys.stderr)\n")
    (seconds,) = first_step.time_first_steps(1, 1)
    assert 0.2 < seconds < 60
    (package / "__main__.py").write_text("raise SystemExit('no data')\n")
    with pytest.raises(BenchError, match="exit code 1 before its first step: no data"):
        first_step.time_first_steps(1, 1)
    assert first_step.time_first_steps(0, 1) == []


def test_the_collector_stops_no_step_between_the_rounds_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    case = SimpleNamespace(take_steps=lambda count: gc.isenabled(), footprint=lambda **_: None)
    monkeypatch.setattr(worker.RankCase, "prepare", lambda *_: case)
    job = asdict(RankJob(BenchmarkCase("plain", "plain", 1, "fp32"), {}, "", 1))
    serving = worker.serve(Rank(job))
    next(serving)
    assert [serving.send({"steps": 1}) for _ in range(3)] == [True, False, False], "the first request warms up"
    serving.close()
    assert gc.isenabled()


CPU = torch.device("cpu")


def test_engine_and_precision_cases() -> None:
    def names(**values: Any) -> list[str]:
        return [case.name for case in cases.engine_cases(EngineBenchConfig(**values))]

    plain = ["plain", "native, 1 rank", "plain, 2 at once"]
    assert names(ranks=1) == plain[:2]
    both = ["fsdp2", "ddp", "native, stage 0", "native, stage 3"]
    assert names(stages=[0, 3], peers=["fsdp2", "ddp"], engines=[]) == [*plain, *both]
    assert names(stages=[], engines=[]) == [*plain, *DEFAULT_PEERS]
    assert names(ranks=1, reproducible=True) == [*plain[:2], "native, 1 rank, reproducible"]
    pairs = [*plain[:2], "native, 1 rank, reproducible", plain[2], "native, stage 2", "native, stage 2, reproducible"]
    assert names(stages=[2], peers=[], engines=[], reproducible=True) == pairs
    precision = suites.precision_cases(PrecisionBenchConfig(precisions=["fp16", "fp32"], ranks=2, zero_stage=1), CPU)
    assert precision == [BenchmarkCase(name, "native", 2, name, 1) for name in ("fp32", "fp16")]
    assert "fp16" not in suites.fast_precisions(CPU)


def test_an_engine_comes_after_the_peer_that_does_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = {"peers": ["accelerate", "fsdp2"], "engines": ["fsdp2:3", "deepspeed"]}
    found = cases.peer_cases(EngineBenchConfig(**lists, precision="fp32", ranks=3))  # type: ignore[arg-type]
    assert found == [
        BenchmarkCase("accelerate", "accelerate", 3, "fp32"),
        BenchmarkCase("fsdp2", "fsdp2", 3, "fp32"),
        BenchmarkCase("dtrain fsdp2, stage 3", "fsdp2", 3, "fp32", 3, baseline="fsdp2"),
        BenchmarkCase("fsdp2 again", "fsdp2", 3, "fp32", baseline="fsdp2"),
        BenchmarkCase("deepspeed_2_fp32", "deepspeed_2_fp32", 3, "fp32"),
        BenchmarkCase("dtrain deepspeed, stage 2", "deepspeed", 3, "fp32", 2, baseline="deepspeed_2_fp32"),
    ]
    assert [case.is_dtrain for case in found] == [False, False, True, False, False, True]
    assert set(cases.BASELINE_PEERS.values()) <= set(PEERS)
    monkeypatch.setattr(capabilities, "find_spec", lambda name: None)
    assert cases.chosen_engines(None) == [("fsdp2", 2), ("ddp", 0)], "by default those that are installed"


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch: Any, caplog: Any) -> None:
    measured: list[str] = []

    def run_rounds(given: list[BenchmarkCase], _: object) -> Iterator[rounds.MeasuredCases]:
        measured.extend(case.name for case in given)
        yield rounds.MeasuredCases({"plain": result("plain", 1, [[1.0]], engine="plain")})

    monkeypatch.setattr(suites, "run_rounds", run_rounds)
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name == "deepspeed" else object())
    monkeypatch.setattr("dtrain.measure.record.describe_host", lambda: HOST)
    arguments = ["bench.peers=[ddp,deepspeed_2,accelerate]", "bench.engines=[]", "bench.stages=[]", "bench.starts=0"]
    config = read_suite([*TINY, *arguments], SUITES["engine"].primary)
    assert config is not None
    with caplog.at_level(logging.WARNING):
        *_, results = suites.run_engine_suite(config, "dtrain bench engine")
    assert measured == ["plain", "native, 1 rank", "plain, 2 at once", "ddp", "accelerate"]
    (failure,) = results.failures
    assert failure.reason == "deepspeed_2: package deepspeed is not installed; pip install 'dtrain[bench]'"
    assert caplog.messages == [f"left out: {failure.reason}"]
    assert f"Did not run: {failure.reason}." in describe(results).facts


def read() -> TrainingSuite[EngineBenchConfig]:
    found = read_suite([*TINY, *SHORT], SUITES["engine"].primary)
    assert found is not None
    return found


def test_an_idle_rank_uses_no_processor_time_and_a_killed_one_is_named() -> None:
    with CaseProcesses(BenchmarkCase("plain", "plain", 1, "fp32"), read()) as processes:
        processes.start()
        assert processes.take_steps(0).step_ms == []
        assert processes._ranks is not None
        (process,) = processes._ranks._processes
        before = _processor_seconds(process.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.6)
        assert _processor_seconds(process.pid) - before < 0.1
        process.kill()
        with pytest.raises(BenchError, match="plain: rank 0 was ended by SIGKILL"):
            processes.take_steps(1)
    assert process.poll() is not None


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_case_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    absent, plain = (BenchmarkCase(name, name, 1, "fp32") for name in ("absent", "plain"))
    *_, measured = rounds.run_rounds([absent, plain], read())
    (result,), (failure,) = measured.cases, measured.failures
    assert (result.case, len(result.warmup.step_ms), len(result.rounds)) == (plain, 1, 2)
    assert (failure.case, failure.reason) == (absent, "absent: rank 0 ended with exit code 1: KeyError: 'absent'")
    assert 0.0 < host.memory_left() <= 1.0
    monkeypatch.setattr(rounds, "memory_left", lambda: 0.04)
    with pytest.raises(BenchError, match="no case ran; plain: only 4% of the memory is left"):
        list(rounds.run_rounds([plain], read()))


def test_results_grow_with_each_start_and_round() -> None:
    plain = BenchmarkCase("plain", "plain", 1, "fp32")
    seen = [[len(result.rounds) for result in found.cases] for found in rounds.run_rounds([plain], read())]
    assert seen == [[0], [1], [2], [2]]


def test_a_case_out_of_memory_takes_half_of_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def start(self: CaseProcesses) -> int:
        tried.append(self._micro_batch)
        if self._micro_batch > 1:
            raise BenchError("plain: rank 0 ended with exit code 1: OutOfMemoryError: CUDA out of memory")
        return self._micro_batch

    monkeypatch.setattr(CaseProcesses, "_start", start)
    with CaseProcesses(BenchmarkCase("plain", "plain", 1, "fp32"), read(), 4) as processes:
        assert processes.start() == 1
    assert tried == [4, 2, 1]
    monkeypatch.setattr(CaseProcesses, "_start", lambda self: (_ for _ in ()).throw(BenchError("plain: no compiler")))
    with pytest.raises(BenchError, match="no compiler"):
        processes.start()


@pytest.mark.exhaustive  # takes a minute; the others test the same worker with blocks as they are
@pytest.mark.compile
def test_a_peer_compiles_its_blocks_as_dtrain_does() -> None:
    words = ["model.compile=blocks", "bench.data=random", "model.vocab_size=64", "bench.cases=[dtrain,plain]"]
    config = read_suite([*TINY, *SHORT, *words], SUITES["step"].primary)
    assert config is not None
    *_, found = suites.run_step_suite(config, "dtrain bench step")
    assert found.failures == []
    assert [case.footprint.graphs for case in found.cases] == [1, 1]
    assert [case.footprint.graph_breaks for case in found.cases] == [0, 0]


@pytest.mark.parametrize(
    ("key", "reason"), [("stages=[5]", "5 is not one of 0, 1"), ("precisions=[bf8]", "bf8 is not")]
)
def test_host_suite_refuses_values_before_it_starts_ranks(key: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_suite([f"bench.{key}"], SUITES["host"].primary)
