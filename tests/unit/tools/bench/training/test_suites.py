"""Each suite that trains, once from end to end at a tiny size; the tests of a suite share its run."""

from __future__ import annotations

import os
import shlex
from contextlib import redirect_stdout
from dataclasses import astuple, dataclass
from io import StringIO
from pathlib import Path

import pytest

from dtrain.__main__ import main
from dtrain.cli.resolve import read_suite
from dtrain.config.commands import BENCH_PRECISION
from dtrain.tools.bench.records import CaseResult, TrainingResults, read_results
from dtrain.tools.bench.report.document import describe
from dtrain.tools.bench.report.statistics import final_loss
from dtrain.tools.bench.report.training import has_wrong_loss
from dtrain.tools.bench.training import suites
from tests.unit.tools.bench.made import SHORT, TINY, row

pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class Run:
    """A finished command."""

    arguments: list[str]
    results: TrainingResults
    stdout: str

    def __getitem__(self, name: str) -> CaseResult:
        (found,) = (result for result in self.results.cases if result.case.name == name)
        return found


def bench(arguments: list[str], out: Path) -> Run:
    arguments = [*arguments, f"bench.out={out}"]
    stdout = StringIO()
    with redirect_stdout(stdout):
        assert main(["bench", *arguments]) == 0
    results = read_results(out)
    assert isinstance(results, TrainingResults)
    return Run(arguments, results, stdout.getvalue())


@pytest.fixture(scope="module")
def engine_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    lists = ["bench.stages=[2]", "bench.peers=[ddp]", "bench.engines=[]"]
    out = tmp_path_factory.mktemp("engine") / "deep/r.json"
    return bench(["engine", *TINY, *SHORT, *lists, "bench.starts=1"], out)


def test_engine_suite_times_every_step_of_every_case(engine_run: Run) -> None:
    results = engine_run.results
    assert results.command == f"dtrain bench {shlex.join(engine_run.arguments)}"
    assert [result.case.name for result in results.cases] == [
        *("plain", "native, 1 rank", "plain, 2 at once", "ddp", "native, stage 2")
    ]
    assert results.failures == []
    for result in results.cases:
        assert [len(times) for times in (result.warmup.step_ms, result.warmup.cpu_ms)] == [1, 1]
        for timed in result.rounds:
            for times in (timed.step_ms, timed.cpu_ms):
                assert len(times) == 2
                assert min(times) > 0
        assert result.first_step_s > max(result.warmup.step_ms) / 1000
        assert result.footprint.peak_rss > 50e6
    assert engine_run["plain, 2 at once"].case.is_lower_bound
    # One thread computes, so the processor time is no more than the wall time.
    plain = engine_run["plain"].rounds
    assert sum(sum(timed.cpu_ms) for timed in plain) < 1.5 * sum(sum(timed.step_ms) for timed in plain)
    (seconds,) = results.train_starts_s
    assert 0.5 < seconds < 120


def test_engine_suite_cases_train_alike(engine_run: Run) -> None:
    cases = engine_run.results.cases
    assert not any(has_wrong_loss(result, cases) for result in cases)
    one, ddp, native = engine_run["native, 1 rank"], engine_run["ddp"], engine_run["native, stage 2"]
    # FP32 masters under BF16 replicas start from the plain loop's weights and see its data.
    assert final_loss(one) == pytest.approx(final_loss(engine_run["plain"]), rel=2e-3)
    assert final_loss(native) == pytest.approx(final_loss(ddp), rel=2e-3)
    assert final_loss(one) != final_loss(native)
    numel = one.footprint.num_parameters
    assert [result.footprint.num_parameters for result in cases] == [numel] * len(cases)
    assert sum(native.footprint.state.values()) < 0.7 * sum(one.footprint.state.values())


def test_engine_suite_prints_its_report(engine_run: Run) -> None:
    report = describe(engine_run.results)
    assert engine_run.stdout.strip() == report.markdown()
    assert [table.title for table in report.tables] == ["Steps and memory", "Details"]
    assert {"step / plain", "speed-up over ddp"} <= set(report.tables[0].columns)
    assert row(report.tables[0], "native, stage 2")["speed-up over ddp"]
    assert "step / plain, 2 at once" in report.tables[1].columns
    for text in ("(1 start)", "main_grad 2.00"):
        assert text in engine_run.stdout
    assert os.uname().nodename not in astuple(engine_run.results.host)


def test_precision_suite_measures_fp32_against_mixed() -> None:
    config = read_suite([*TINY, *SHORT, "bench.precisions=[bf16]"], BENCH_PRECISION)
    assert config is not None
    results = suites.run_precision_suite(config, "dtrain bench precision")
    fp32, bf16 = results.cases
    assert (fp32.case.precision, bf16.case.precision) == ("fp32", "bf16")
    assert final_loss(fp32) == pytest.approx(final_loss(bf16), rel=0.01)
    assert final_loss(fp32) != final_loss(bf16)
    assert fp32.footprint.state != bf16.footprint.state
    assert results.train_starts_s == []
    table = describe(results).tables[0]
    assert row(table, "bf16")["speed-up over fp32"]
    assert "WRONG" not in table.markdown()


def test_blocks_suite_counts_activations_and_trains_alike(tmp_path: Path) -> None:
    run = bench(["blocks", *TINY, *SHORT, "bench.cases=[none,selective]"], tmp_path / "r.json")
    none, selective = (run[name].footprint.activations for name in ("none", "selective"))
    assert none is not None
    assert selective is not None
    assert 0 < selective < none
    for timed in zip(*(result.rounds for result in run.results.cases), strict=True):
        assert timed[0].losses == timed[1].losses
    table = describe(run.results).tables[0]
    assert row(table, "selective")["activations MiB (/ none)"] == f"{selective / 2**20:.2f} ({selective / none:.3f})"
    assert run.stdout.strip() == describe(run.results).markdown()


def test_vote_suite_times_parts_inside_each_step(tmp_path: Path) -> None:
    run = bench(["vote", *TINY, *SHORT, "bench.steps=3"], tmp_path / "r.json")
    none, dynamic = run.results.cases[:2]
    assert (none.case.name, dynamic.case.name) == ("bf16, none", "bf16, dynamic")
    for timed in (*none.rounds, *dynamic.rounds):
        vote, norm, gather = (timed.parts_ms[name] for name in ("vote", "norm", "all-gather"))
        for ranks in (vote, norm, gather):
            assert [len(steps) for steps in ranks] == [3, 3]
        for rank in range(2):
            for whole, *parts in zip(vote[rank], norm[rank], gather[rank], strict=True):
                assert min(parts) > 0
                assert sum(parts) < whole  # record and decision take time too
        assert all(max(ranks) < step for *ranks, step in zip(*vote, timed.step_ms, strict=True))
    # A power of two changes only the exponents of the gradients, and the update divides by it.
    assert final_loss(dynamic) == pytest.approx(final_loss(none), rel=1e-4)
    assert run.stdout.strip() == describe(run.results).markdown()
    assert not any(has_wrong_loss(result, run.results.cases) for result in run.results.cases)
    document = tmp_path / "doc.md"
    document.write_text("# Title\n")
    assert main(["bench", "report", str(tmp_path / "r.json"), f"bench.docs={document}"]) == 0
    assert describe(run.results).summary() in document.read_text()
