"""The cases of each suite, and the peers that cannot run."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from dtrain.cli.resolve import read_suite
from dtrain.config import capabilities
from dtrain.config.commands import BENCH_ENGINE, BENCH_VOTE
from dtrain.config.dump import config_to_dict
from dtrain.config.tool_schema import EngineBenchConfig, PrecisionBenchConfig, VoteBenchConfig
from dtrain.tools.bench import peers, records
from dtrain.tools.bench.peers import DEFAULT_PEERS, PEERS
from dtrain.tools.bench.records import BenchmarkCase, CaseResult, FailedCase, RankJob
from dtrain.tools.bench.report.document import describe
from dtrain.tools.bench.training import cases, suites
from dtrain.tools.bench.training.worker import run_config
from tests.unit.tools.bench.made import HOST, TINY, result

CPU = torch.device("cpu")


def peer_cases(**values: Any) -> list[BenchmarkCase]:
    return cases.peer_cases(EngineBenchConfig(**values))


def test_engine_and_precision_cases() -> None:
    def names(bench: EngineBenchConfig) -> list[str]:
        return [case.name for case in cases.engine_cases(bench)]

    assert names(EngineBenchConfig(ranks=1)) == ["plain", "native, 1 rank"]
    plain = ["plain", "native, 1 rank", "plain, 2 at once"]
    assert names(EngineBenchConfig(stages=[2], peers=[], engines=[])) == [*plain, "native, stage 2"]
    assert names(EngineBenchConfig(stages=[0, 3], peers=["fsdp2", "ddp"], engines=[])) == [
        *(*plain, "fsdp2", "ddp"),
        *("native, stage 0", "native, stage 3"),
    ]
    assert names(EngineBenchConfig(stages=[], engines=[])) == [*plain, *DEFAULT_PEERS]
    precision = suites.precision_cases(PrecisionBenchConfig(precisions=["fp16", "fp32"], ranks=2, zero_stage=1), CPU)
    assert precision == [BenchmarkCase(name, "native", 2, name, 1) for name in ("fp32", "fp16")]
    assert "fp16" not in suites.fast_precisions(CPU)


def test_an_engine_comes_after_the_peer_that_does_its_work() -> None:
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


def test_by_default_all_installed_engines_join_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [case.name for case in peer_cases()]
    assert [names[names.index(peer) + 1] for peer in ("ddp", "fsdp2_no_reshard", "deepspeed_2_fp32")] == [
        *("dtrain ddp", "dtrain fsdp2, stage 2", "dtrain deepspeed, stage 2")
    ]
    assert len(names) == len(DEFAULT_PEERS) + 5  # three engines, DeepSpeed's peer, the control
    assert set(cases.BASELINE_PEERS.values()) <= set(PEERS)
    monkeypatch.setattr(capabilities, "find_spec", lambda name: None)
    assert cases.chosen_engines(None) == [("fsdp2", 2), ("ddp", 0)]


def test_a_peer_that_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured: list[str] = []

    def run_rounds(given: list[BenchmarkCase], _: object) -> tuple[list[CaseResult], list[FailedCase]]:
        measured.extend(case.name for case in given)
        return [result("plain", 1, [[1.0]], engine="plain")], []

    monkeypatch.setattr(suites, "run_rounds", run_rounds)
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name == "deepspeed" else object())
    monkeypatch.setattr(records, "describe_host", lambda: HOST)
    arguments = ["bench.peers=[ddp,deepspeed_2,accelerate]", "bench.engines=[]", "bench.stages=[]", "bench.starts=0"]
    config = read_suite([*TINY, *arguments], BENCH_ENGINE)
    assert config is not None
    with caplog.at_level(logging.WARNING):
        results = suites.run_engine_suite(config, "dtrain bench engine")
    assert measured == ["plain", "native, 1 rank", "plain, 2 at once", "ddp", "accelerate"]
    (failure,) = results.failures
    assert failure.reason == "deepspeed_2: package deepspeed is not installed; pip install 'dtrain[bench]'"
    assert caplog.messages == [f"left out: {failure.reason}"]
    assert f"Did not run: {failure.reason}." in describe(results).facts


def test_vote_cases_differ_in_their_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_suite(["bench.zero_stage=3", "bench.ranks=3"], BENCH_VOTE)
    assert config is not None
    monkeypatch.setattr(suites, "fast_precisions", lambda _: [])
    found = suites.vote_cases(config.bench, CPU)
    assert found == [
        BenchmarkCase(f"bf16, {mode}", "native", 3, "bf16", 3, loss_scale=mode, times_vote=True)
        for mode in ("none", "dynamic")
    ]
    runs = [run_config(RankJob(case, 0, "store", config_to_dict(config))) for case in found]
    assert [run.precision.loss_scale.mode for run in runs] == ["none", "dynamic"]
    monkeypatch.setattr(suites, "fast_precisions", lambda _: ["tf32", "bf16", "fp16"])
    names = [case.name for case in suites.vote_cases(VoteBenchConfig(), CPU)]
    assert names == ["bf16, none", "bf16, dynamic", "fp16, none", "fp16, dynamic"]
