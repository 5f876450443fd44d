"""The cases of each suite, the peers that cannot run, and the processes in which cases are measured."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.cli.resolve import read_suite
from dtrain.config import capabilities
from dtrain.config.commands import BENCH_ENGINE
from dtrain.config.tool_schema import EngineBenchConfig, EngineSuiteConfig, PrecisionBenchConfig
from dtrain.errors import BenchError
from dtrain.telemetry import host
from dtrain.tools.bench.peers import DEFAULT_PEERS, PEERS
from dtrain.tools.bench.records import BenchmarkCase
from dtrain.tools.bench.training import cases, rounds, suites
from dtrain.tools.bench.training.processes import CaseProcesses
from tests.unit.tools.bench.made import SHORT, TINY

CPU = torch.device("cpu")


def peer_cases(**values: Any) -> list[BenchmarkCase]:
    return cases.peer_cases(EngineBenchConfig(**values))


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


def read() -> EngineSuiteConfig:
    found = read_suite([*TINY, *SHORT], BENCH_ENGINE)
    assert found is not None
    return found


@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
def test_an_idle_rank_uses_no_processor_time_and_a_killed_one_is_named() -> None:
    with CaseProcesses(BenchmarkCase("plain", "plain", 1, "fp32"), read()) as processes:
        processes.start()
        assert processes.take_steps(0).step_ms == []
        (process,) = processes._processes
        before = _processor_seconds(process.pid)
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
