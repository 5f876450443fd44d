"""The suites: who competes in each, on what."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from dtrain.config.dump import config_to_dict
from dtrain.config.schema import (
    EngineBenchConfig,
    EngineSuiteConfig,
    NativeEngineConfig,
    PrecisionBenchConfig,
    PrecisionSuiteConfig,
    SuiteConfig,
    VoteBenchConfig,
    VoteSuiteConfig,
)
from dtrain.distributed.logging import logger
from dtrain.distributed.setup import choose_device
from dtrain.errors import ConfigError
from dtrain.precision.policy import PrecisionPolicy
from dtrain.sharding.placement import STAGES
from dtrain.tools.bench.contest import compete
from dtrain.tools.bench.engines import peer_contenders
from dtrain.tools.bench.peers import PEERS
from dtrain.tools.bench.records import Absence, Contender, Entry, Results
from dtrain.tools.bench.startup import time_first_steps
from dtrain.tools.host import describe_host


def run_engine_suite(config: EngineSuiteConfig, command: str) -> Results:
    """dtrain's engines against plain PyTorch on one rank and the peers on ``bench.ranks``, on the same data.

    Raises:
        BenchError: no contender could run, or ``dtrain train`` failed.
        ConfigError: a stage or peer that does not exist.
    """
    check_stages(config.bench.stages)
    installed, missing = [], []
    for contender in engine_contenders(config.bench):
        peer = None if contender.is_dtrain else PEERS.get(contender.engine)
        if peer is None or peer.is_installed:
            installed.append(contender)
            continue
        reason = f"{contender.name}: package {peer.package} is not installed; pip install 'dtrain[bench]'"
        logger.warning("left out: %s", reason)
        missing.append(Absence(contender, reason))
    entries, failed = compete(installed, config)
    starts = time_first_steps(config.bench.starts, config.bench.threads_per_rank)
    return replace(_results("engine", command, config, entries, starts), absences=[*missing, *failed])


def run_precision_suite(config: PrecisionSuiteConfig, command: str) -> Results:
    """dtrain's training loop in FP32 and in mixed precision.

    Raises:
        BenchError: no contender could run.
        ConfigError: a device that is not there.
    """
    device = choose_device(config.bench.device, 0)
    entries, failed = compete(precision_contenders(config.bench, device), config)
    return replace(_results("precision", command, config, entries, []), absences=failed)


def run_vote_suite(config: VoteSuiteConfig, command: str) -> Results:
    """dtrain's engine with and without loss scaling, its vote timed inside each step.

    Raises:
        BenchError: no contender could run.
        ConfigError: a device that is not there.
    """
    device = choose_device(config.bench.device, 0)
    entries, failed = compete(vote_contenders(config.bench, device), config)
    return replace(_results("vote", command, config, entries, []), absences=failed)


def check_stages(stages: Sequence[int]) -> None:
    """Checks what ``bench.stages`` lists.

    Raises:
        ConfigError: a ZeRO stage that dtrain does not have, or twice the same.
    """
    if not set(stages) <= set(STAGES) or len(set(stages)) < len(stages):
        known = ", ".join(map(str, STAGES))
        raise ConfigError(f"bench.stages={list(stages)} must list some of {known}, each once")


def engine_contenders(bench: EngineBenchConfig) -> list[Contender]:
    """Plain PyTorch and native on one rank; on several the peers, dtrain's other engines, and native at each stage."""
    one_rank_stage = NativeEngineConfig().zero_stage
    contenders = [
        Contender("plain", "plain", 1, bench.precision),
        Contender("native, 1 rank", "native", 1, bench.precision, one_rank_stage),
    ]
    if bench.ranks == 1:
        return contenders
    floor = Contender(f"plain, {bench.ranks} at once", "plain", bench.ranks, bench.precision)
    stages = [
        Contender(f"native, stage {stage}", "native", bench.ranks, bench.precision, stage) for stage in bench.stages
    ]
    return [*contenders, floor, *peer_contenders(bench), *stages]


def precision_contenders(bench: PrecisionBenchConfig, device: torch.device) -> list[Contender]:
    """FP32 first, then the others: those asked for, else those that ``device`` is good at."""
    mixed = [name for name in bench.precisions or good_precisions(device) if name != "fp32"]
    return [Contender(name, "native", bench.ranks, name, bench.zero_stage) for name in ("fp32", *mixed)]


def vote_contenders(bench: VoteBenchConfig, device: torch.device) -> list[Contender]:
    """Without and with a dynamic loss scale, in BF16 and where ``device`` is good at it in FP16."""
    precisions = [name for name in good_precisions(device) if name != "tf32"] or ["bf16"]
    return [
        Contender(f"{name}, {mode}", "native", bench.ranks, name, bench.zero_stage, loss_scale=mode, times_vote=True)
        for name in precisions
        for mode in ("none", "dynamic")
    ]


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
