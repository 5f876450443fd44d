"""The suites engine, precision, vote, telemetry, blocks and step: their cases, measured on one configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from dtrain.config.tool_schema import (
    BLOCK_CASES,
    STEP_CASES,
    BenchConfig,
    BlocksBenchConfig,
    EngineBenchConfig,
    Float8Suite,
    PrecisionBenchConfig,
    StepBenchConfig,
    TelemetryBenchConfig,
    TrainingSuite,
    VoteBenchConfig,
)
from dtrain.distributed.logging import logger
from dtrain.distributed.startup.setup import choose_device
from dtrain.errors import ConfigError
from dtrain.measure.bench.peers import PEERS
from dtrain.measure.bench.records import BenchmarkCase, FailedCase, TrainingResults
from dtrain.measure.bench.training.cases import engine_cases
from dtrain.measure.bench.training.first_step import time_first_steps
from dtrain.measure.bench.training.rounds import run_rounds
from dtrain.measure.record import head
from dtrain.precision.policy import PrecisionPolicy
from dtrain.sharding.placement import STAGES


def run_engine_suite(config: TrainingSuite[EngineBenchConfig], command: str) -> Iterator[TrainingResults]:
    """Measures dtrain's engines, plain PyTorch on one rank, and the peers on ``bench.ranks``, on the same data."""
    stages = config.bench.stages
    if not set(stages) <= set(STAGES) or len(set(stages)) < len(stages):
        known = ", ".join(map(str, STAGES))
        raise ConfigError(f"bench.stages={list(stages)} must list some of {known}, each once")
    installed, missing = _installed(engine_cases(config.bench))
    for results in _run("engine", installed, config, command, missing):
        yield results
    starts = time_first_steps(config.bench.starts, config.bench.threads_per_rank)
    yield replace(results, train_starts_s=starts)


def run_precision_suite(config: TrainingSuite[PrecisionBenchConfig], command: str) -> Iterator[TrainingResults]:
    """Measures dtrain's training loop in FP32 and in mixed precision."""
    cases = precision_cases(config.bench, choose_device(config.bench.device, 0))
    yield from _run("precision", cases, config, command)


def run_vote_suite(config: TrainingSuite[VoteBenchConfig], command: str) -> Iterator[TrainingResults]:
    """Measures dtrain's engine with and without loss scaling, its vote timed inside each step."""
    yield from _run("vote", vote_cases(config.bench, choose_device(config.bench.device, 0)), config, command)


def run_telemetry_suite(config: TrainingSuite[TelemetryBenchConfig], command: str) -> Iterator[TrainingResults]:
    """Measures dtrain's engine without sampled steps, and with nothing but sampled steps."""
    yield from _run("telemetry", telemetry_cases(config.bench, choose_device(config.bench.device, 0)), config, command)


def run_blocks_suite(config: TrainingSuite[BlocksBenchConfig], command: str) -> Iterator[TrainingResults]:
    """Measures dtrain's engine with recomputed and compiled blocks, and with blocks as they are."""
    yield from _run("blocks", blocks_cases(config, choose_device(config.bench.device, 0)), config, command)


def run_step_suite(config: Float8Suite[StepBenchConfig], command: str) -> Iterator[TrainingResults]:
    """Measures the named cases on one device."""
    installed, missing = _installed([_step_case(name, config) for name in config.bench.cases])
    yield from _run("step", installed, config, command, missing)


def _step_case(name: str, config: Float8Suite[StepBenchConfig]) -> BenchmarkCase:
    keys = {"engine": "native", "precision": "bf16", **STEP_CASES[name]}
    if "blocks" in keys:
        eager = replace(config.model.block_options, compile="none")
        keys["blocks"] = replace(eager, **keys["blocks"])
    stage = config.bench.zero_stage if keys["engine"] == "native" else None
    return BenchmarkCase(name, ranks=1, zero_stage=stage, **keys)


def _installed(cases: Sequence[BenchmarkCase]) -> tuple[list[BenchmarkCase], list[FailedCase]]:
    """Returns the cases whose packages are installed, and the others."""
    installed, missing = [], []
    for case in cases:
        peer = None if case.is_dtrain else PEERS.get(case.engine)
        if peer is None or peer.is_installed:
            installed.append(case)
            continue
        reason = f"{case.name}: package {peer.package} is not installed; pip install 'dtrain[bench]'"
        logger.warning("left out: %s", reason)
        missing.append(FailedCase(case, reason))
    return installed, missing


def precision_cases(bench: PrecisionBenchConfig, device: torch.device) -> list[BenchmarkCase]:
    """Returns FP32, then ``bench.precisions`` or those that ``device`` computes faster than FP32."""
    mixed = [name for name in bench.precisions or fast_precisions(device) if name != "fp32"]
    return [BenchmarkCase(name, "native", bench.ranks, name, bench.zero_stage) for name in ("fp32", *mixed)]


def vote_cases(bench: VoteBenchConfig, device: torch.device) -> list[BenchmarkCase]:
    """Returns the fast precisions of 16 bits, each without and with a dynamic loss scale."""
    return [
        BenchmarkCase(
            f"{name}, {mode}", "native", bench.ranks, name, bench.zero_stage, loss_scale=mode, times_vote=True
        )
        for name in _fast_sixteen_bits(device)
        for mode in ("none", "dynamic")
    ]


def telemetry_cases(bench: TelemetryBenchConfig, device: torch.device) -> list[BenchmarkCase]:
    """Returns each precision without and with samples."""
    return [
        BenchmarkCase(
            f"{name}, {'sampled' if samples else 'off'}", "native", bench.ranks, name, bench.zero_stage, samples=samples
        )
        for name in bench.precisions or _fast_sixteen_bits(device)
        for samples in (False, True)
    ]


def blocks_cases(config: TrainingSuite[BlocksBenchConfig], device: torch.device) -> list[BenchmarkCase]:
    """Returns the cases of ``bench.cases`` in one precision."""
    bench, options = config.bench, config.model.block_options
    precision = PrecisionPolicy.named("auto").on(device).name if bench.precision == "auto" else bench.precision
    return [
        BenchmarkCase(
            *(name, "native", bench.ranks, precision, bench.zero_stage), blocks=replace(options, **BLOCK_CASES[name])
        )
        for name in bench.cases
    ]


def _fast_sixteen_bits(device: torch.device) -> list[str]:
    return [name for name in fast_precisions(device) if name != "tf32"] or ["bf16"]


def fast_precisions(device: torch.device) -> list[str]:
    """Returns the precisions in which ``device`` multiplies matrices faster than in FP32.

    FP16 is not among them on a CPU; an Ampere GPU or later has all three.
    """
    best = PrecisionPolicy.named("auto").on(device).name
    if device.type == "cuda":
        return ["tf32", "bf16", "fp16"] if best == "bf16" else ["fp16"]
    return [best] if best != "fp32" else []


def _run(
    suite: str,
    cases: Sequence[BenchmarkCase],
    config: TrainingSuite[BenchConfig],
    command: str,
    missing: Sequence[FailedCase] = (),
) -> Iterator[TrainingResults]:
    of_run = head(command, config)
    for measured in run_rounds(cases, config):
        yield TrainingResults(
            **of_run,
            suite=suite,
            tokens_per_rank=config.bench.micro_batch_size * config.model.max_seq_len,
            cases=measured.cases,
            train_starts_s=[],
            failures=[*missing, *measured.failures],
        )
