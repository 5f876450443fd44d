"""The benchmark: its command line, real contenders on real ranks at a tiny size, its records and its tables."""

from __future__ import annotations

import ast
import json
import logging
import os
import shlex
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.__main__ import main
from dtrain.cli.resolve import read_suite
from dtrain.config.commands import BENCH_ENGINE, BENCH_PRECISION
from dtrain.config.dump import from_plain
from dtrain.config.tool_schema import EngineBenchConfig, EngineSuiteConfig, PrecisionBenchConfig, PrecisionSuiteConfig
from dtrain.errors import BenchError
from dtrain.sharding.placement import STAGES
from dtrain.tools import host
from dtrain.tools.bench import cli, contest, peers, suites
from dtrain.tools.bench.peers import PEERS, RIVALS, plain
from dtrain.tools.bench.records import (
    Absence,
    Contender,
    Entry,
    Footprint,
    Host,
    Results,
    Turn,
    read_results,
    write_results,
)
from dtrain.tools.bench.report.document import best, describe, final_loss, is_wrong, step_ms, update_document
from dtrain.tools.bench.report.statistics import ratios
from dtrain.tools.bench.training.rounds import Entrant, compete

ROOT = Path(__file__).parents[4]
CPU = torch.device("cpu")
TINY = ["model.num_layers=1", "model.hidden_dim=32", "model.num_heads=2", "model.max_seq_len=32", "bench.device=cpu"]
SHORT = ["bench.micro_batch_size=2", "bench.warmup_steps=1", "bench.rounds=2", "bench.steps=2"]

SOME_STAGES = f"must list some of {', '.join(map(str, STAGES))}, each once"

MISTAKES = [
    ("engine bench.round=3", "unknown key 'bench.round'; did you mean 'bench.rounds'?"),
    ("engine bench.zero_stage=1", "unknown key 'bench.zero_stage'; did you mean 'bench.stages'?"),
    ("engine run_dir=x", "unknown key 'run_dir'; valid: bench, data, model, optim, seed"),
    ("engine engine=native", "no group 'engine' to override; valid: bench, data, model, optim, seed"),
    ("engine model=tinny", "unknown option 'model=tinny'; did you mean 'model=tiny'?"),
    ("engine bench.rounds=0", "bench.rounds=0 is too small; it must be at least 1"),
    ("engine bench.rounds=few", "bench.rounds=few is not a whole number"),
    ("engine bench.stages=[0,9]", f"bench.stages=[0, 9] {SOME_STAGES}"),
    ("engine bench.stages=[1,1]", f"bench.stages=[1, 1] {SOME_STAGES}"),
    ("engine bench.peers=[ddp_zer]", "bench.peers: unknown peer 'ddp_zer'; did you mean 'ddp_zero'?"),
    ("engine bench.peers=[ddp,ddp]", "bench.peers=['ddp', 'ddp'] lists 'ddp' more than once"),
    (
        "engine bench.peers=[ddp] bench.ranks=1",
        "bench.peers=['ddp'] has no effect with bench.ranks=1: peers run on several ranks",
    ),
    ("engine bench.engines=[fsdp]", "bench.engines: unknown engine 'fsdp'; did you mean 'fsdp2'?"),
    ("engine bench.engines=[native]", "bench.engines: the native engine is raced at bench.stages; list it there"),
    (
        "engine bench.engines=[fsdp2:two]",
        "bench.engines: 'fsdp2:two' must be an engine or engine:stage, such as fsdp2:2",
    ),
    (
        "engine bench.engines=[ddp:2]",
        "engine=ddp cannot do zero_stage=2: every rank holds the whole model and its optimizer state; use "
        "zero_stage=0, or engine=native, fsdp2 or deepspeed",
    ),
    ("engine bench.engines=[deepspeed:0]", "bench.engines: no peer does the work of deepspeed at stage 0"),
    (
        "engine bench.engines=[fsdp2,fsdp2:2]",
        "bench.engines=['fsdp2', 'fsdp2:2'] lists an engine more than once at one stage",
    ),
    (
        "engine bench.engines=[ddp] bench.ranks=1",
        "bench.engines=['ddp'] has no effect with bench.ranks=1: peers run on several ranks",
    ),
    ("engine bench.precision=fp16", "bench.precision=fp16 is not one of bf16, fp32; did you mean 'bf16'?"),
    ("engine bench.out=", "bench.out is empty; name a JSON file, or leave it null"),
    (
        "engine model.num_heads=5",
        "model.hidden_dim=384 does not divide by model.num_heads=5; each head takes the same share",
    ),
    ("engine data=text", "data=text needs data.files, a glob such as data.files='/data/**/*.txt'"),
    ("engine -m bench.rounds=1,2", "dtrain bench engine runs once; remove --multirun"),
    ("precision bench.stages=[0]", "unknown key 'bench.stages'; did you mean 'bench.steps'?"),
    (
        "precision bench.precisions=[fp8]",
        "bench.precisions=['fp8'] must list some of fp32, tf32, bf16, fp16, each once",
    ),
    ("engin", "unknown suite 'engin'; did you mean 'engine'?"),
    ("report", "dtrain bench report needs results files, such as docs/results/*.json"),
    ("report engine", "'engine' is not a .json file of `dtrain bench`"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_mistakes_are_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words.split()]) == 2
    assert capsys.readouterr() == ("", f"dtrain: {message}\n")


def test_help_and_cfg(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    assert "usage: dtrain bench SUITE" in capsys.readouterr().out
    assert main(["bench", "engine", "--help"]) == 0
    assert "Usage: dtrain bench engine" in capsys.readouterr().out
    assert main(["bench", "precision", "--cfg", "job", "bench.rounds=7"]) == 0
    assert "rounds: 7\n" in capsys.readouterr().out


def test_started_once_not_by_a_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "precision"]) == 2
    assert "start it once, without a launcher" in capsys.readouterr().err


def test_default_configurations() -> None:
    engine, precision = read_suite([], BENCH_ENGINE), read_suite([], BENCH_PRECISION)
    assert type(engine) is EngineSuiteConfig
    assert type(precision) is PrecisionSuiteConfig
    assert engine.bench == EngineBenchConfig()
    assert engine.model == precision.model
    assert (engine.bench.micro_batch_size * engine.model.max_seq_len, engine.bench.ranks) == (1024, 2)


def test_who_competes() -> None:
    def names(bench: EngineBenchConfig) -> list[str]:
        return [contender.name for contender in suites.engine_contenders(bench)]

    assert names(EngineBenchConfig(ranks=1)) == ["plain", "native, 1 rank"]
    alone = ["plain", "native, 1 rank", "plain, 2 at once"]
    assert names(EngineBenchConfig(stages=[2], peers=[], engines=[])) == [*alone, "native, stage 2"]
    assert names(EngineBenchConfig(stages=[0, 3], peers=["fsdp2", "ddp"], engines=[])) == [
        *(*alone, "fsdp2", "ddp"),
        *("native, stage 0", "native, stage 3"),
    ]
    assert names(EngineBenchConfig(stages=[], engines=[])) == [*alone, *RIVALS]
    asked = suites.precision_contenders(PrecisionBenchConfig(precisions=["fp16", "fp32"], ranks=2, zero_stage=1), CPU)
    assert asked == [Contender(name, "native", 2, name, 1) for name in ("fp32", "fp16")]
    assert "fp16" not in suites.good_precisions(CPU)


def run_bench(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dtrain", "bench", *words]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.processes
def test_engine_suite_end_to_end(tmp_path: Path) -> None:
    lists = ["bench.stages=[0,2]", "bench.peers=[ddp,ddp_zero,fsdp2]", "bench.engines=[ddp,fsdp2:3]"]
    words = ["engine", *TINY, *SHORT, *lists, "bench.starts=1", "bench.out=deep/r.json"]
    done = run_bench(words, tmp_path)
    assert done.returncode == 0, done.stderr
    results = read_results(tmp_path / "deep/r.json")
    assert results.command == f"dtrain bench {shlex.join(words)}"
    by_name = {entry.contender.name: entry for entry in results.entries}
    assert list(by_name) == [
        *("plain", "native, 1 rank", "plain, 2 at once"),
        *("ddp", "dtrain ddp", "ddp again", "ddp_zero", "fsdp2", "dtrain fsdp2, stage 3"),
        *("native, stage 0", "native, stage 2"),
    ]
    assert results.absences == []
    for entry in results.entries:
        for times in ([turn.step_ms, turn.cpu_ms] for turn in (entry.warmup, *entry.turns)):
            assert [len(values) for values in times] == ([1, 1] if times[0] == entry.warmup.step_ms else [2, 2])
        assert all(value > 0 for turn in entry.turns for value in turn.cpu_ms)
        assert all(value > 0 for turn in entry.turns for value in turn.step_ms)
        assert not is_wrong(entry, results.entries)
        assert entry.first_step_s > max(entry.warmup.step_ms) / 1000
        assert entry.footprint.peak_rss > 50e6
    alone, one, floor, ddp, our_ddp, again, zero, fsdp2, our_fsdp2, stage0, stage2 = results.entries
    assert floor.contender.is_floor
    # all steps on one thread: what the processor worked is no more than what the clock showed
    assert sum(sum(turn.cpu_ms) for turn in alone.turns) < 1.5 * sum(sum(turn.step_ms) for turn in alone.turns)
    numel = alone.footprint.num_parameters
    for peer, master, moments, grad in ((alone, 4, 8, 4), (ddp, 4, 8, 4), (zero, 4, 4, 4), (fsdp2, 2, 4, 2)):
        held = {kind: size / numel for kind, size in peer.footprint.state.items()}
        assert peer.footprint.num_parameters == numel
        assert held["master"] == pytest.approx(master, rel=0.02)
        assert held["moments"] == pytest.approx(moments, rel=0.2)  # whole parameters a rank, and step counters
        assert held["main_grad"] == pytest.approx(grad, rel=0.02)
        assert held["compute"] == 0
    # FP32 masters under BF16 replicas start from the plain loop's weights and see its data
    assert final_loss(one) == pytest.approx(final_loss(alone), rel=2e-3)
    assert final_loss(again) == final_loss(ddp)
    for entry in (our_ddp, zero, fsdp2, our_fsdp2, stage2):
        assert final_loss(entry) == pytest.approx(final_loss(ddp), rel=2e-3)
    assert final_loss(one) != final_loss(stage2)
    assert our_ddp.footprint.state["moments"] == 8 * numel  # it frees its gradients, which the formula counts
    for entry in (one, our_fsdp2, stage0, stage2):
        formula = entry.footprint.formula
        assert formula is not None
        assert 1.0 <= sum(entry.footprint.state.values()) / sum(formula.values()) < 1.5  # tiny: mostly padding
    assert sum(stage2.footprint.state.values()) < 0.7 * sum(stage0.footprint.state.values())
    (seconds,) = results.train_starts_s
    assert 0.5 < seconds < 60
    for text in (
        "step / plain",
        "speed-up over fsdp2",
        "native, stage 2",
        "1 starts",
        "main_grad 2.00",
        "ddp again (control)",
    ):
        assert text in done.stdout
    assert done.stdout.strip() == describe(results)
    assert os.uname().nodename not in astuple(results.host)


@pytest.mark.processes
def test_precision_suite_measures_fp32_against_mixed() -> None:
    config = read_suite([*TINY, *SHORT, "bench.precisions=[bf16]"], BENCH_PRECISION)
    assert config is not None
    results = suites.run_precision_suite(config, "dtrain bench precision")
    fp32, bf16 = results.entries
    assert (fp32.contender.precision, bf16.contender.precision) == ("fp32", "bf16")
    assert fp32.footprint.state["compute"] > 1.5 * bf16.footprint.state["compute"]
    assert final_loss(fp32) == pytest.approx(final_loss(bf16), rel=0.01)
    assert final_loss(fp32) != final_loss(bf16)
    assert results.train_starts_s == []
    table = describe(results)
    assert "speed-up over fp32" in table
    assert "WRONG" not in table


@pytest.mark.processes
def test_turns_interleave_and_idle_contenders_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    original = Entrant.turn

    def turn(self: Entrant, steps: int) -> Turn:
        order.append(self.contender.name)
        return original(self, steps)

    monkeypatch.setattr(Entrant, "turn", turn)
    config = read_suite([*TINY, *SHORT, "bench.warmup_steps=0"], BENCH_ENGINE)
    assert config is not None
    entries, _ = compete(suites.engine_contenders(replace(config.bench, ranks=1)), config)
    a, b = "plain", "native, 1 rank"
    assert order == [a, b, a, b, a, b]
    assert entries[0].warmup.step_ms == []


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_an_idle_rank_uses_no_processor_time() -> None:
    config = read_suite(TINY, BENCH_ENGINE)
    assert config is not None
    with Entrant(Contender("plain", "plain", 1, "bf16"), config) as entrant:
        entrant.start()
        (process,) = entrant._processes
        before = _processor_seconds(process.pid)
        assert before > 0.1
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.6)
        assert _processor_seconds(process.pid) - before < 0.1
    assert process.returncode == 0


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.processes
def test_a_contender_that_fails_is_named_with_its_last_words() -> None:
    config = read_suite([*TINY, "model.factory=dtrain.models.transformer:absent"], BENCH_ENGINE)
    assert config is not None
    with Entrant(Contender("native, stage 2", "native", 2, "bf16", 2), config) as entrant:
        with pytest.raises(BenchError, match=r"native, stage 2: rank [01] failed: .* has no absent"):
            entrant.start()
        processes = list(entrant._processes)
    assert all(process.poll() is not None for process in processes)


@pytest.mark.processes
def test_one_that_fails_leaves_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(self: Entrant, steps: int) -> Turn:
        if self.contender.name == "dies" and steps == config.bench.steps:
            self._processes[0].kill()
        return original(self, steps)

    original = Entrant.turn
    monkeypatch.setattr(Entrant, "turn", turn)
    config = read_suite([*TINY, *SHORT], BENCH_ENGINE)
    assert config is not None
    names = {"no start": "no_such_engine", "dies": "plain", "plain": "plain"}
    entries, absences = compete([Contender(name, engine, 1, "bf16") for name, engine in names.items()], config)
    assert [(entry.contender.name, len(entry.turns)) for entry in entries] == [("plain", 2)]
    unable, dead = absences
    assert unable == Absence(
        Contender("no start", "no_such_engine", 1, "bf16"), "no start: rank 0 failed: KeyError: 'no_such_engine'"
    )
    assert dead.reason.startswith("dies: rank 0 ended with exit code -9")


@pytest.mark.processes
def test_a_contender_that_takes_the_last_memory_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "memory_left", lambda: 0.04)
    config = read_suite([*TINY, *SHORT], BENCH_ENGINE)
    assert config is not None
    with pytest.raises(BenchError, match="no contender ran; plain: only 4% of the memory is left"):
        compete([Contender("plain", "plain", 1, "bf16")], config)
    assert 0.0 < host.memory_left() <= 1.0


@pytest.mark.skipif(not all(peer.is_installed for peer in PEERS.values()), reason="needs dtrain[bench]")
@pytest.mark.parametrize(
    "names",
    [
        ["ddp", "accelerate", "deepspeed_1"],
        pytest.param(["ddp", "deepspeed_3", "dtrain deepspeed"], marks=pytest.mark.soak),  # DeepSpeed starts slowly
    ],
    ids=" ".join,
)
def test_deepspeed_and_accelerate_train_as_ddp_does(names: list[str]) -> None:
    config = read_suite([*TINY, *SHORT, "bench.rounds=1", "model.hidden_dim=96"], BENCH_ENGINE)
    assert config is not None
    known = {"dtrain deepspeed": Contender("dtrain deepspeed", "deepspeed", 2, "bf16", 2)}
    entries, absences = compete([known.get(name, Contender(name, name, 2, "bf16")) for name in names], config)
    assert absences == []
    assert [entry.contender.name for entry in entries] == names
    for entry in entries:
        assert final_loss(entry) == pytest.approx(final_loss(entries[0]), rel=2e-3)
    numel = entries[0].footprint.num_parameters
    assert [entry.footprint.num_parameters for entry in entries] == [numel] * len(entries)
    for entry in entries:
        if "deepspeed" not in entry.contender.name:
            continue
        held = {kind: size / numel for kind, size in entry.footprint.state.items()}
        assert held["master"] == pytest.approx(2, rel=0.02)
        assert held["moments"] == pytest.approx(4, rel=0.02)
        # stage 3 keeps small parameters whole beside the shards
        assert held["compute"] == pytest.approx(3 if entry.contender.name == "deepspeed_3" else 2, rel=0.02)


def test_a_peer_that_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raced: list[str] = []

    def instead(contenders: list[Contender], _: object) -> tuple[list[Entry], list[Absence]]:
        raced.extend(contender.name for contender in contenders)
        return [entry("plain", 1, [[1.0]], [2.0], "plain")], []

    monkeypatch.setattr(suites, "compete", instead)
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name == "deepspeed" else object())
    monkeypatch.setattr(suites, "describe_host", lambda: HOST)
    config = read_suite(
        [*TINY, "bench.peers=[ddp,deepspeed_2,accelerate]", "bench.engines=[]", "bench.stages=[]"], BENCH_ENGINE
    )
    assert config is not None
    with caplog.at_level(logging.WARNING):
        results = suites.run_engine_suite(replace(config, bench=replace(config.bench, starts=0)), "dtrain bench engine")
    assert raced == ["plain", "native, 1 rank", "plain, 2 at once", "ddp", "accelerate"]
    (absence,) = results.absences
    assert absence.reason == "deepspeed_2: package deepspeed is not installed; pip install 'dtrain[bench]'"
    assert caplog.messages == [f"left out: {absence.reason}"]
    assert f"Did not run: {absence.reason}." in describe(results)


def test_peers_are_scripts_of_their_own() -> None:
    """They import nothing of dtrain but what all of them share, so what they measure is not ours."""
    folder = Path(peers.__path__[0])
    assert {peer.module for peer in PEERS.values()} | {"plain"} == {path.stem for path in folder.glob("[!_]*.py")}
    for path in folder.glob("[!_]*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dtrain"):
                assert (node.module, [name.name for name in node.names]) == ("dtrain.tools.bench.peers", ["plain"])
            elif isinstance(node, ast.Import):
                assert not any(name.name.startswith("dtrain") for name in node.names)


def test_only_matrices_are_decayed_and_each_gradient_is_clipped() -> None:
    settings = plain.Settings(0.1, (0.9, 0.99), 1e-8, 0.5, 1e-3, False, 1, CPU)
    model = torch.nn.Linear(3, 2)
    matrix, bias = plain.decay_groups(model, settings.weight_decay)
    assert (matrix["params"], matrix["weight_decay"]) == ([model.weight], 0.5)
    assert (bias["params"], bias["weight_decay"]) == ([model.bias], 0.0)
    assert len(plain.decay_groups(torch.nn.Linear(3, 2, bias=False), 0.5)) == 1

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = model

        def forward(self, x: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(loss=self.linear(x).sum())

    training = plain.prepare(Loss(), settings)
    expected = model(torch.ones(4, 3)).sum().item()
    assert training.step({"x": torch.ones(4, 3)}) == pytest.approx(expected)
    held = training.tensors()
    assert torch.cat([grad.flatten() for grad in held["main_grad"]]).norm() == pytest.approx(1e-3, rel=1e-2)
    assert len(held["moments"]) == 6


HOST = Host("a cpu", 2, 8.0, [], "Linux x86_64", "3.11", "2.13", "0.1.0")


def entry(name: str, ranks: int, turns: list[list[float]], losses: list[float | None], engine: str = "native") -> Entry:
    formula = {"master": 4000} if engine == "native" else None
    footprint = Footprint(1000, {"master": 4000}, formula, 2**27, None, "cpu")
    made = [Turn(step_ms, losses, 0.5) for step_ms in turns]
    contender = Contender(name, engine, ranks, "bf16", 2 if engine == "native" else None)
    return Entry(contender, 1.5, Turn([], [], 0.1), made, footprint)


def results_of(entries: list[Entry], suite: str = "engine") -> Results:
    config = {"bench": {"threads_per_rank": 1, "rounds": 2, "steps": 2}}
    return Results(suite, "dtrain bench engine", "2026-01-01T00:00:00", HOST, config, 128, entries, [3.0, 5.0, 4.0])


def test_ratios_compare_turns_of_one_round() -> None:
    base = entry("plain", 1, [[100, 100], [200, 200]], [2.0, 2.0], "plain")
    other = entry("native", 1, [[110, 110], [190, 190]], [2.0, 2.0])
    assert ratios(other, base) == pytest.approx([1.1, 0.95])
    assert step_ms(base) == 150
    table = describe(results_of([base, other]))
    assert "1.025 (0.950 to 1.100)" in table
    assert "853" in table  # 128 tokens in 150 ms
    assert "4.0 (3.0 to 5.0) s (3 starts)" in table


@pytest.mark.parametrize(
    ("loss", "wrong"), [(2.0, False), (2.03, False), (1.97, False), (2.05, True), (1.5, True), (None, True)]
)
def test_a_contender_whose_loss_is_elsewhere_is_marked(loss: float | None, wrong: bool) -> None:
    entries = [
        entry("plain", 1, [[1.0]], [2.0], "plain"),
        entry("ddp", 2, [[1.0]], [9.0], "ddp"),
        entry("native", 1, [[1.0]], [loss]),
    ]
    assert [is_wrong(item, entries) for item in entries] == [False, False, wrong]
    assert describe(results_of(entries)).count(" WRONG ") == int(wrong)


def test_the_best_peer_is_fast_and_right() -> None:
    entries = [
        entry("plain", 1, [[1.0], [1.0]], [2.0], "plain"),
        entry("plain, 2 at once", 2, [[1.0], [1.0]], [3.0], "plain"),
        entry("ddp", 2, [[300.0], [100.0]], [2.0], "ddp"),
        entry("fsdp2", 2, [[400.0], [400.0]], [2.0], "fsdp2"),
        entry("fsdp2_no_reshard", 2, [[5.0], [5.0]], [9.0], "fsdp2_no_reshard"),
        entry("deepspeed_1", 2, [[500.0], [600.0]], [2.0], "deepspeed_1"),
        entry("deepspeed_2", 2, [[500.0], [500.0]], [2.0], "deepspeed_2"),
        entry("native, 1 rank", 1, [[1.0], [1.0]], [2.0]),
        entry("native, stage 2", 2, [[100.0], [200.0]], [2.0]),
    ]
    found = [best(entries, prefix) for prefix in ("", "fsdp2", "deepspeed", "horovod")]
    assert [item and item.contender.name for item in found] == ["ddp", "fsdp2", "deepspeed_2", None]
    text = describe(results_of(entries))
    assert "Best peer by median step time: ddp, 200.0 ms." in text
    lines = [line for line in text.splitlines() if line.startswith("| native")]
    assert [cell.strip() for cell in lines[-1].strip("|").split("|")] == [
        "native, stage 2",
        "1.750 (0.500 to 3.000)",
        "3.000 (2.000 to 4.000)",
        "3.750 (2.500 to 5.000)",
    ]
    assert len(lines) == 3  # both in the first table, and in the second the one that has rivals
    assert "Best peer" not in describe(results_of([entries[0], entries[7]]))


def test_the_exit_code_says_when_our_own_engine_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = results_of([entry("plain", 1, [[1.0]], [2.0], "plain")])
    for engine, stage, code in (("deepspeed_1", None, 0), ("ddp", None, 0), ("ddp", 0, 1), ("native", 2, 1)):
        late = Contender("late", engine, 2, "bf16", stage)
        absence = Absence(late, "late: rank 0 failed: RuntimeError: no compiler")
        assert cli._finish(replace(results, absences=[absence]), str(tmp_path / "r.json")) == code
        assert read_results(tmp_path / "r.json").absences == [absence]
        assert "Did not run: late: rank 0 failed: RuntimeError: no compiler." in capsys.readouterr().out


def test_results_of_before_processor_times_are_read(tmp_path: Path) -> None:
    write_results(tmp_path / "r.json", results_of([entry("plain", 1, [[1.0]], [2.0], "plain")]))
    old = json.loads((tmp_path / "r.json").read_text())
    del old["absences"], old["host"]["peers"]
    for turn in (old["entries"][0]["warmup"], *old["entries"][0]["turns"]):
        del turn["cpu_ms"], turn["parts_ms"]
    for key in ("loss_scale", "times_vote", "pair"):
        del old["entries"][0]["contender"][key]
    (tmp_path / "r.json").write_text(json.dumps(old))
    assert "| not measured " in describe(read_results(tmp_path / "r.json"))


def test_the_results_in_the_documents_are_read() -> None:
    paths = sorted((ROOT / "docs/results").glob("*.json"))
    assert len(paths) >= 4
    for path in paths:
        assert "contender" in describe(read_results(path)) or "precision" in path.name


numbers = st.floats(min_value=0.001, max_value=1e6)
turns = st.builds(Turn, st.lists(numbers), st.lists(st.none() | numbers), numbers, st.lists(numbers))


@settings(deadline=None, max_examples=50)
@given(st.lists(turns, min_size=1, max_size=3), st.none() | st.integers(0, 2), st.none() | st.integers(0, 2**40))
def test_results_survive_json(drawn: list[Turn], stage: int | None, device: int | None) -> None:
    footprint = Footprint(7, {"master": 1}, None if stage is None else {"master": 2}, 3, device, "cpu")
    item = Entry(Contender("a", "native", 2, "bf16", stage), 0.5, drawn[0], drawn, footprint)
    results = replace(results_of([item]), absences=[Absence(item.contender, "late")])
    values = json.loads(json.dumps(results, default=lambda record: record.__dict__))
    assert from_plain(Results, values) == results


def test_files_that_are_no_results_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results = results_of([entry("plain", 1, [[1.0]], [float("nan")], "plain")])
    write_results(path, results)
    assert read_results(path).entries[0].turns[0].losses == [None]
    good = json.loads(path.read_text())
    for damage in ({**good, "extra": 1}, {key: value for key, value in good.items() if key != "host"}, [], 3):
        path.write_text(json.dumps(damage))
        with pytest.raises(BenchError, match=r"r\.json is no results file"):
            read_results(path)
    with pytest.raises(BenchError, match=r"absent\.json is no results file"):
        read_results(tmp_path / "absent.json")


def test_report_writes_between_the_markers_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        write_results(tmp_path / f"{name}.json", results_of([entry(f"plain-{name}", 1, [[1.0]], [2.0], "plain")]))
    document = tmp_path / "doc.md"
    document.write_text("# Title\n\nbefore \\1\n<!-- results one -->\nstale\n<!-- end one -->\nafter\n")
    assert main(["bench", "report", "one.json", "two.json", "bench.docs=doc.md"]) == 0
    text = document.read_text()
    assert text.startswith("# Title\n\nbefore \\1\n<!-- results one -->\n")
    assert "stale" not in text
    assert text.index("plain-one") < text.index("after\n") < text.index("## two") < text.index("plain-two")
    assert main(["bench", "report", "one.json", "two.json", "bench.docs=doc.md"]) == 0
    assert document.read_text() == text
    assert main(["bench", "report", "one.json"]) == 1  # docs/ does not exist here
    assert capsys.readouterr().err == "dtrain: docs is not a folder; set bench.docs=PATH to the document to write\n"
    document.write_text("<!-- end one --><!-- results one -->")
    assert main(["bench", "report", "one.json", "bench.docs=doc.md"]) == 1
    assert "restore the marker" in capsys.readouterr().err
    update_document(tmp_path / "new.md", {})
    assert (tmp_path / "new.md").read_text() == "# Benchmarks\n"
