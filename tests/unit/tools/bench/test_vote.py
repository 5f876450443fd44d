"""`dtrain bench vote`: the vote timed inside real steps on two ranks, its clocks, contenders and table."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch

from dtrain.__main__ import main
from dtrain.cli.resolve import read_suite
from dtrain.config.commands import BENCH_VOTE
from dtrain.config.dump import config_to_dict
from dtrain.config.tool_schema import VoteBenchConfig
from dtrain.tools.bench import suites
from dtrain.tools.bench.records import Assignment, Contender, Entry, Footprint, Results, Turn, read_results
from dtrain.tools.bench.report.document import describe, final_loss, ratios
from dtrain.tools.bench.training.vote_timing import Stopwatch
from dtrain.tools.bench.training.worker import _run_config
from dtrain.tools.host import Host

CPU = torch.device("cpu")
TINY = ["model.num_layers=1", "model.hidden_dim=32", "model.num_heads=2", "model.max_seq_len=32", "bench.device=cpu"]
SHORT = ["bench.micro_batch_size=2", "bench.warmup_steps=1", "bench.rounds=2", "bench.steps=3"]


@pytest.mark.processes
def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "vote", *TINY, *SHORT, f"bench.out={tmp_path / 'r.json'}"]) == 0
    results = read_results(tmp_path / "r.json")
    assert isinstance(results, Results)
    none, dynamic = results.entries
    assert (none.contender.name, dynamic.contender.name) == ("bf16, none", "bf16, dynamic")
    for turn in (*none.turns, *dynamic.turns):
        vote, norm, gather = (turn.parts_ms[name] for name in ("vote", "norm", "all-gather"))
        for ranks in (vote, norm, gather):
            assert [len(steps) for steps in ranks] == [3, 3]
        for rank in range(2):
            for whole, *parts in zip(vote[rank], norm[rank], gather[rank], strict=True):
                assert min(parts) > 0
                assert sum(parts) < whole  # record and decision take time as well
        assert all(max(ranks) < step for *ranks, step in zip(*vote, turn.step_ms, strict=True))
    # a power of two changes the exponents of the gradients alone, and the update takes it out
    assert final_loss(dynamic) == pytest.approx(final_loss(none), rel=1e-4)
    out = capsys.readouterr().out.strip()
    assert out == describe(results)
    assert "WRONG" not in out
    (tmp_path / "doc.md").write_text("# Title\n")
    assert main(["bench", "report", str(tmp_path / "r.json"), f"bench.docs={tmp_path / 'doc.md'}"]) == 0
    assert out in (tmp_path / "doc.md").read_text()


def test_a_stopwatch_adds_the_calls_of_one_method_up() -> None:
    class Sleeper:
        def sleep(self, seconds: float, *, answer: str) -> str:
            time.sleep(seconds)
            return answer

    timed, other = Sleeper(), Sleeper()
    stopwatch = Stopwatch(timed, "sleep", CPU)
    assert [timed.sleep(0.002, answer="a"), timed.sleep(0.003, answer="b")] == ["a", "b"]
    other.sleep(0.0, answer="not timed")
    assert 5.0 <= stopwatch.take() < 1000
    timed.sleep(0.001, answer="c")
    assert 1.0 <= stopwatch.take() < 1000
    with pytest.raises(AssertionError, match="was not called"):
        stopwatch.take()
    with pytest.raises(AttributeError):
        Stopwatch(timed, "slep", CPU)


def test_a_stopwatch_within_another_counts_only_there() -> None:
    class Nested:
        def inner(self) -> None:
            time.sleep(0.002)

        def outer(self) -> None:
            self.inner()

    nested = Nested()
    outer = Stopwatch(nested, "outer", CPU)
    inner = Stopwatch(nested, "inner", CPU, outer)
    nested.inner()
    with pytest.raises(AssertionError, match="was not called"):
        inner.take()
    nested.outer()
    nested.inner()
    assert 2.0 <= inner.take() < outer.take()


def test_who_competes_and_with_which_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_suite(["bench.zero_stage=3", "bench.ranks=3"], BENCH_VOTE)
    assert config is not None
    contenders = suites.vote_contenders(config.bench, CPU)
    assert contenders == [
        Contender(f"bf16, {mode}", "native", 3, "bf16", 3, loss_scale=mode, times_vote=True)
        for mode in ("none", "dynamic")
    ]
    runs = [_run_config(Assignment(contender, 0, "store", config_to_dict(config))) for contender in contenders]
    assert [run.precision.loss_scale.mode for run in runs] == ["none", "dynamic"]
    monkeypatch.setattr(suites, "good_precisions", lambda _: ["tf32", "bf16", "fp16"])
    names = [contender.name for contender in suites.vote_contenders(VoteBenchConfig(), CPU)]
    assert names == ["bf16, none", "bf16, dynamic", "fp16, none", "fp16, dynamic"]


def _entry(precision: str, mode: str, step_ms: list[float], parts_ms: dict[str, list[list[float]]]) -> Entry:
    contender = Contender(f"{precision}, {mode}", "native", 2, precision, 2, loss_scale=mode, times_vote=True)
    footprint = Footprint(1000, {"master": 4000}, {"master": 4000}, 2**27, None, "cpu")
    turns = []
    for number, step in enumerate(step_ms):  # a round of one step each
        parts = {name: [[ms] for ms in steps[number]] for name, steps in parts_ms.items()}
        turns.append(Turn([step], [2.0], 0.5, [step], parts))
    return Entry(contender, 1.5, Turn([], [], 0.1), turns, footprint)


def test_the_table_takes_the_waiting_apart() -> None:
    parts = {
        "vote": [[3.0, 1.0], [1.0, 5.0], [2.0, 6.0]],  # of each step: rank 0, rank 1
        "norm": [[0.5, 0.25], [0.5, 0.25], [0.5, 0.25]],
        "all-gather": [[2.0, 0.5], [0.25, 4.5], [1.0, 5.5]],
    }
    none = _entry("bf16", "none", [100.0, 100.0, 200.0], parts)
    dynamic = _entry("bf16", "dynamic", [101.0, 102.0, 200.0], parts)
    orphan = _entry("fp16", "dynamic", [100.0, 100.0, 100.0], parts)
    host = Host("a cpu", 2, 8.0, [], "Linux x86_64", "3.11", "2.13", "0.1.0")
    config = {"bench": {"threads_per_rank": 1, "rounds": 3, "steps": 1}}
    results = Results(
        "vote", "dtrain bench vote", "2026-01-01T00:00:00", host, config, 128, [none, dynamic, orphan], []
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in describe(results).splitlines() if "|" in line]
    assert [row[-1] for row in rows[2:5]] == [
        "1.0000 (1.0000 to 1.0000)",
        "1.0100 (1.0000 to 1.0200)",
        "not measured",
    ]
    assert median(ratios(dynamic, none)) == pytest.approx(1.01)
    assert rows[7:12] == [
        ["bf16, none", "vote", "2.000, 5.000", "5.000 (3.000 to 6.000)", "3.00%", "1.000 (1.000 to 2.000)", "1.00%"],
        ["bf16, none", "norm", "0.500, 0.250", "0.500 (0.500 to 0.500)", "0.50%", "0.250 (0.250 to 0.250)", "0.25%"],
        ["bf16, none", "vote without norm", "1.500, 4.750", "4.750 (2.500 to 5.750)", "2.88%", "0.750 (0.500 to 1.500)",
         "0.75%"],
        ["bf16, none", "all-gather", "1.000, 4.500", "4.500 (2.000 to 5.500)", "2.75%", "0.500 (0.250 to 1.000)",
         "0.50%"],
        ["bf16, none", "record, decision", "0.500, 0.250", "0.500 (0.250 to 0.500)", "0.25%", "0.250 (0.250 to 0.250)",
         "0.25%"],
    ]  # fmt: skip
    assert "1.0100" not in describe(replace(results, entries=[none]))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("bench.round=3", "unknown key 'bench.round'; did you mean 'bench.rounds'?"),
        ("bench.stages=[0]", "unknown key 'bench.stages'; did you mean 'bench.steps'?"),
        ("bench.zero_stage=4", "bench.zero_stage=4 is too large; it must be at most 3"),
        ("bench.ranks=0", "bench.ranks=0 is too small; it must be at least 1"),
        ("bench.out=", "bench.out is empty"),
        ("model.num_heads=5", "does not divide by model.num_heads=5"),
    ],
)
def test_mistakes_are_one_line(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "vote", word]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert message in error


def test_help_and_the_default_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "vote", "--help"]) == 0
    assert "Usage: dtrain bench vote" in capsys.readouterr().out
    config = read_suite([], BENCH_VOTE)
    assert config is not None
    assert config.bench == VoteBenchConfig()
    assert config.bench.ranks == 2
