"""The suites: who competes in each, on what."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from dtrain.bench.contest import compete
from dtrain.bench.host import describe_host
from dtrain.bench.records import Contender, Entry, Results
from dtrain.bench.startup import time_first_steps
from dtrain.config.dump import config_to_dict
from dtrain.config.schema import (
    EngineBenchConfig,
    EngineSuiteConfig,
    NativeEngineConfig,
    PrecisionBenchConfig,
    PrecisionSuiteConfig,
    SuiteConfig,
)
from dtrain.distributed.setup import choose_device
from dtrain.precision.policy import PrecisionPolicy


def run_engine_suite(config: EngineSuiteConfig, command: str) -> Results:
    """dtrain's engine against plain PyTorch on one rank and DDP on ``bench.ranks``, on the same data.

    Raises:
        BenchError: a process failed.
    """
    entries = compete(engine_contenders(config.bench), config)
    return _results(
        "engine", command, config, entries, time_first_steps(config.bench.starts, config.bench.threads_per_rank)
    )


def run_precision_suite(config: PrecisionSuiteConfig, command: str) -> Results:
    """dtrain's training loop in FP32 and in mixed precision.

    Raises:
        BenchError: a process failed.
        ConfigError: a device that is not there.
    """
    device = choose_device(config.bench.device, 0)
    return _results("precision", command, config, compete(precision_contenders(config.bench, device), config), [])


def engine_contenders(bench: EngineBenchConfig) -> list[Contender]:
    """Plain PyTorch and our engine on one rank; with several ranks DDP and our engine at each stage as well."""
    one_rank_stage = NativeEngineConfig().zero_stage
    contenders = [
        Contender("plain", "plain", 1, bench.precision),
        Contender("native, 1 rank", "native", 1, bench.precision, one_rank_stage),
    ]
    if bench.ranks == 1:
        return contenders
    stages = [
        Contender(f"native, stage {stage}", "native", bench.ranks, bench.precision, stage) for stage in bench.stages
    ]
    floor = Contender(f"plain, {bench.ranks} at once", "plain", bench.ranks, bench.precision)
    return [*contenders, floor, Contender("ddp", "ddp", bench.ranks, bench.precision), *stages]


def precision_contenders(bench: PrecisionBenchConfig, device: torch.device) -> list[Contender]:
    """FP32 first, then the others: those asked for, else those that ``device`` is good at."""
    mixed = [name for name in bench.precisions or good_precisions(device) if name != "fp32"]
    return [Contender(name, "native", bench.ranks, name, bench.zero_stage) for name in ("fp32", *mixed)]


def good_precisions(device: torch.device) -> list[str]:
    """The precisions that ``device`` multiplies matrices in faster than in FP32.

    FP16 is not among them on a CPU, where it is slower; an Ampere GPU or later has all three.
    """
    best = PrecisionPolicy.named("auto").on(device).name
    if device.type == "cuda":
        return ["tf32", "bf16", "fp16"] if best == "bf16" else ["fp16"]
    return [best] if best != "fp32" else []


def _results(
    suite: str, command: str, config: SuiteConfig, entries: Sequence[Entry], train_starts_s: list[float]
) -> Results:
    return Results(
        suite=suite,
        command=command,
        date=time.strftime("%Y-%m-%dT%H:%M:%S"),
        host=describe_host(),
        config=config_to_dict(config),
        tokens_per_rank=config.bench.micro_batch_size * config.model.max_seq_len,
        entries=list(entries),
        train_starts_s=train_starts_s,
    )
