"""The command line of `dtrain bench`: its errors, its help, its defaults and its exit codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.__main__ import main
from dtrain.cli.resolve import read_suite
from dtrain.config.commands import BENCH_ENGINE, BENCH_OPTIMIZER, BENCH_PRECISION, BENCH_VOTE
from dtrain.config.tool_schema import (
    EngineBenchConfig,
    EngineSuiteConfig,
    OptimizerBenchConfig,
    PrecisionSuiteConfig,
    VoteBenchConfig,
)
from dtrain.sharding.placement import STAGES
from dtrain.tools.bench import cli
from dtrain.tools.bench.records import BenchmarkCase, FailedCase, TrainingResults, read_results
from tests.unit.tools.bench.made import result, results_of

SOME_STAGES = f"must list some of {', '.join(map(str, STAGES))}, each once"

MISTAKES = [
    ("engine model=convnet", "model=convnet takes images or numbers, but data=stdlib has tokens; choose data=images"),
    ("precision data=glyphs", "takes tokens, which data=glyphs has not; choose model=convnet, vit or mlp"),
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
    (
        "engine bench.engines=[native]",
        "bench.engines: the native engine is measured at bench.stages; list its stages there",
    ),
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
    ("vote bench.round=3", "unknown key 'bench.round'; did you mean 'bench.rounds'?"),
    ("vote bench.stages=[0]", "unknown key 'bench.stages'; did you mean 'bench.steps'?"),
    ("vote bench.zero_stage=4", "bench.zero_stage=4 is too large; it must be at most 3"),
    ("vote bench.ranks=0", "bench.ranks=0 is too small; it must be at least 1"),
    ("vote bench.out=", "bench.out is empty"),
    ("vote model.num_heads=5", "does not divide by model.num_heads=5"),
    ("float8 bench.device=cpu bench.width=[3]", "unknown key 'bench.width'; did you mean 'bench.widths'?"),
    ("float8 bench.device=cpu bench.widths=[]", "bench.widths=[] must list one or more, each once"),
    ("float8 bench.device=cpu bench.widths=[64,64]", "bench.widths=[64, 64] must list one or more, each once"),
    ("float8 bench.device=cpu bench.widths=[100]", "bench.widths: 100 is not a multiple of 64, the size of a head"),
    (
        "float8 bench.device=cpu bench.recipes=[rowise]",
        "bench.recipes=['rowise'] must list some of tensorwise, rowwise, each once",
    ),
    ("float8 bench.device=cpu float8.recipes=[rowwise]", "unknown key 'float8.recipes'; did you mean 'bench.recipes'?"),
    (
        "float8 bench.device=cpu float8.recipe=rowwise",
        "float8.recipe=rowwise has no effect here",
    ),
    ("blocks bench.cases=[selectiv]", "bench.cases=['selectiv'] must list some of none, selective, full, compile,"),
    ("blocks bench.cases=[]", "bench.cases is empty"),
    ("blocks model.recompute=full", "model.recompute=full has no effect here; list what to measure in bench.cases"),
    ("optimizer bench.numl=3", "unknown key 'bench.numl'; did you mean 'bench.numel'?"),
    ("optimizer bench.numel=3", "bench.numel=3 is too small; it must be at least 1024"),
    ("optimizer model=tiny", "no group 'model' to override; valid: bench"),
    ("optimizer bench.out=''", "bench.out is empty"),
    ("collectives bench.sizes=[100]", "bench.sizes=[100] must be one or more numbers, each at least 2048"),
    ("collectives bench.sizes=[]", "bench.sizes=[] must be one or more numbers"),
    ("collectives bench.ranks=1", "bench.ranks=1 is too small; it must be at least 2"),
    ("collectives bench.size=[1]", "unknown key 'bench.size'; did you mean 'bench.sizes'?"),
    ("checkpoint bench.sizes=[0]", "bench.sizes=[0] must be one or more numbers of MB, each at least 1"),
    ("checkpoint bench.sizes=[]", "bench.sizes=[] must be one or more numbers"),
    ("checkpoint bench.dir=/nowhere/at/all", "bench.dir=/nowhere/at/all: No such file or directory; name a folder"),
    ("checkpoint bench.size=[1]", "unknown key 'bench.size'; did you mean 'bench.sizes'?"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[arguments for arguments, _ in MISTAKES])
def test_mistakes_are_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("dtrain: ")
    assert message in err


def test_help_and_cfg(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    assert "usage: dtrain bench SUITE" in capsys.readouterr().out
    for suite in cli._SUITES:
        assert main(["bench", suite, "--help"]) == 0
        assert f"usage: dtrain bench {suite}" in capsys.readouterr().out.lower()
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
    vote, optimizer = read_suite([], BENCH_VOTE), read_suite([], BENCH_OPTIMIZER)
    assert vote is not None
    assert optimizer is not None
    assert (vote.bench, vote.bench.ranks) == (VoteBenchConfig(), 2)
    assert optimizer.bench == OptimizerBenchConfig()


def test_exit_code_is_1_only_if_an_engine_of_dtrain_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = results_of([result("plain", 1, [[1.0]], engine="plain")])
    for engine, stage, code in (("deepspeed_1", None, 0), ("ddp", None, 0), ("ddp", 0, 1), ("native", 2, 1)):
        case = BenchmarkCase("late", engine, 2, "bf16", stage)
        failure = FailedCase(case, "late: rank 0 failed: RuntimeError: no compiler")
        assert cli._finish(replace(results, failures=[failure]), str(tmp_path / "r.json")) == code
        read = read_results(tmp_path / "r.json")
        assert isinstance(read, TrainingResults)
        assert read.failures == [failure]
        assert "Did not run: late: rank 0 failed: RuntimeError: no compiler." in capsys.readouterr().out
