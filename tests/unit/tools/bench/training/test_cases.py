"""The cases of each suite, the peers that cannot run, and the processes in which cases are measured."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.cli.resolve import read_suite
from dtrain.config import capabilities
from dtrain.config.commands import BENCH_BLOCKS, BENCH_ENGINE
from dtrain.config.dump import config_to_dict
from dtrain.config.model import ModelConfig
from dtrain.config.tool_schema import (
    EngineBenchConfig,
    EngineSuiteConfig,
    PrecisionBenchConfig,
    SuiteConfig,
)
from dtrain.errors import BenchError, ConfigError
from dtrain.telemetry import host
from dtrain.tools.bench import peers
from dtrain.tools.bench.peers import DEFAULT_PEERS, PEERS
from dtrain.tools.bench.records import BenchmarkCase, RankJob
from dtrain.tools.bench.training import cases, rounds, suites
from dtrain.tools.bench.training.processes import CaseProcesses
from dtrain.tools.bench.training.worker import run_config
from tests.unit.tools.bench.made import SHORT, TINY

CPU = torch.device("cpu")


def peer_cases(**values: Any) -> list[BenchmarkCase]:
    return cases.peer_cases(EngineBenchConfig(**values))


def models_of(config: SuiteConfig, found: list[BenchmarkCase]) -> list[ModelConfig]:
    return [run_config(RankJob(case, 0, "store", config_to_dict(config))).model for case in found]


def test_engine_and_precision_cases() -> None:
    def names(**values: Any) -> list[str]:
        return [case.name for case in cases.engine_cases(EngineBenchConfig(**values))]

    plain = ["plain", "native, 1 rank", "plain, 2 at once"]
    assert names(ranks=1) == plain[:2]
    both = ["fsdp2", "ddp", "native, stage 0", "native, stage 3"]
    assert names(stages=[0, 3], peers=["fsdp2", "ddp"], engines=[]) == [*plain, *both]
    assert names(stages=[], engines=[]) == [*plain, *DEFAULT_PEERS]
    precision = suites.precision_cases(PrecisionBenchConfig(precisions=["fp16", "fp32"], ranks=2, zero_stage=1), CPU)
    assert precision == [BenchmarkCase(name, "native", 2, name, 1) for name in ("fp32", "fp16")]
    assert "fp16" not in suites.fast_precisions(CPU)


def test_an_engine_comes_after_the_peer_that_does_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    found = peer_cases(peers=["accelerate", "fsdp2"], engines=["fsdp2:3", "deepspeed"], precision="fp32", ranks=3)
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


@pytest.mark.parametrize(
    ("names", "ranks", "message"),
    [
        (["ddp_zer"], 2, "unknown peer 'ddp_zer'; did you mean 'ddp_zero'?"),
        (["ddp", "ddp"], 2, "lists 'ddp' more than once"),
        (["ddp"], 1, "has no effect with bench.ranks=1: peers run on several ranks"),
        (["engine fsdp"], 2, "unknown engine 'fsdp'; did you mean 'fsdp2'?"),
        (["engine native"], 2, "the native engine is measured at bench.stages; list its stages there"),
        (["engine fsdp2:two"], 2, "must be an engine or engine:stage, such as fsdp2:2"),
        (["engine ddp:2"], 2, "engine=ddp cannot do zero_stage=2: every rank holds the whole model"),
        (["engine deepspeed:0"], 2, "no peer does the work of deepspeed at stage 0"),
        (["engine fsdp2", "engine fsdp2:2"], 2, "lists an engine more than once at one stage"),
        (["engine ddp"], 1, "has no effect with bench.ranks=1: peers run on several ranks"),
    ],
)
def test_mistakes_in_peers_and_engines(names: list[str], ranks: int, message: str) -> None:
    check = cases.check_engines if names[0].startswith("engine") else peers.check_peers
    with pytest.raises(ConfigError, match=re.escape(message)):
        check([name.removeprefix("engine ") for name in names], ranks)


def test_each_case_of_the_blocks_has_its_keys_of_the_model() -> None:
    config = read_suite(["bench.precision=fp32", "model.blocks=[blocks.0]"], BENCH_BLOCKS)
    assert config is not None
    found = suites.blocks_cases(config, CPU)
    assert [(case.name, case.precision) for case in found] == [(name, "fp32") for name in config.bench.cases]
    models = models_of(config, found)
    assert [(model.recompute, model.compile) for model in models] == [
        *(("none", "none"), ("selective", "none"), ("full", "none"), ("none", "blocks"), ("selective", "blocks"))
    ]
    assert all(model.block_options.blocks == ["blocks.0"] for model in models)
    engine = read_suite(["model.recompute=selective", "model.compile=blocks"], BENCH_ENGINE)
    assert engine is not None
    (model,) = models_of(engine, [BenchmarkCase("native", "native", 2, "bf16", 2)])
    assert (model.recompute, model.compile) == ("selective", "blocks")


def read() -> EngineSuiteConfig:
    found = read_suite([*TINY, *SHORT], BENCH_ENGINE)
    assert found is not None
    return found


@pytest.mark.processes
@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_an_idle_rank_uses_no_processor_time_and_a_killed_one_is_named(
    is_forked: bool, request: pytest.FixtureRequest
) -> None:
    if is_forked:
        request.getfixturevalue("warm_ranks")
    with CaseProcesses(BenchmarkCase("plain", "plain", 1, "fp32"), read()) as processes:
        processes.start()
        assert processes.take_steps(0).step_ms == []
        (process,) = processes._processes
        before = _processor_seconds(process.pid)
        assert is_forked or before > 0.1
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.6)
        assert _processor_seconds(process.pid) - before < 0.1
        process.kill()
        with pytest.raises(BenchError, match="plain: rank 0 ended with exit code -9"):
            processes.take_steps(1)
    assert process.poll() is not None


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
def test_a_case_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [BenchmarkCase(name, name, 1, "fp32") for name in ("absent", "plain")]
    results, failures = rounds.run_rounds(cases, read())
    assert [(result.case.name, len(result.warmup.step_ms), len(result.rounds)) for result in results] == [
        ("plain", 1, 2)
    ]
    assert [(failure.case, failure.reason) for failure in failures] == [
        (cases[0], "absent: rank 0 failed: KeyError: 'absent'")
    ]
    assert 0.0 < host.memory_left() <= 1.0
    monkeypatch.setattr(rounds, "memory_left", lambda: 0.04)
    with pytest.raises(BenchError, match="no case ran; plain: only 4% of the memory is left"):
        rounds.run_rounds(cases[1:], read())
