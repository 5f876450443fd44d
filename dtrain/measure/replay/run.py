"""Runs a replay on its ranks, and compares it with what the run has logged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dtrain.cli.checks import check_config
from dtrain.config.dump import config_to_dict, from_plain
from dtrain.distributed.logging import logger
from dtrain.measure.ranks import run_ranks
from dtrain.measure.replay.records import (
    REPORT_FILE,
    NumberDifference,
    ReplayedStep,
    ReplayReport,
    ReplayResult,
    culprit_from_dict,
    differing_fields,
    on_other_ranks,
)
from dtrain.measure.replay.source import RecordedRun
from dtrain.measure.replay.worker import replay_steps
from dtrain.measure.worker import Rank, connected
from dtrain.telemetry.metrics import write_json
from dtrain.tools.report_dir import make_empty_dir

_COMPARED = ("loss", "grad_norm", "loss_scale", "lr")


def replay(source: RecordedRun, ranks: int = 1, out: Path | None = None) -> tuple[ReplayReport, Path]:
    """Replays ``source`` up to its step on ``ranks`` processes; a single one is this process.

    Returns:
        The report, and the folder of the dump.

    Raises:
        ConfigError: the ranks cannot share the micro-batches, ``out`` is not empty, the data differs or the model
            cannot be built.
        RankError: one of several ranks failed.
    """
    check_config(source.config, ranks)
    folder = _make_folder(source, out)
    job = {
        "folder": str(folder),
        "config": config_to_dict(source.config),
        "step": source.step,
        "checkpoints": [str(path) for path in source.checkpoints],
        "data_fingerprint": source.data_fingerprint,
        "contract": dict(source.contract),
    }
    launch = source.config.launch
    rank = Rank(job, ranks=ranks, device=launch.device, threads=None, timeout_s=launch.timeout_s)
    begin = source.checkpoints[0].name if source.checkpoints else "the seed"
    logger.info("replaying %s from %s to step %d", source.path, begin, source.step)
    if ranks == 1:
        with connected(rank):
            result = replay_steps(rank)
    else:
        results = run_ranks("dtrain.measure.replay.worker:replay_steps", rank, folder=folder / "logs")
        result = from_plain(ReplayResult, results[0])
    report = compare(source, result, ranks)
    write_json(folder / REPORT_FILE, {"agrees": report.agrees, **asdict(report)}, indent=1)
    return report, folder


def _make_folder(source: RecordedRun, out: Path | None) -> Path:
    name = source.path.resolve().name
    path = out or Path("runs", f"replay-{name}-step-{source.step}")
    number = 2
    while out is None and path.exists():
        path = path.with_name(f"replay-{name}-step-{source.step}-{number}")
        number += 1
    return make_empty_dir(path, "out")


def compare(source: RecordedRun, result: ReplayResult, ranks: int) -> ReplayReport:
    """Compares the replayed steps and the culprit with those that the run has logged."""
    differences = [found for step in result.steps for found in _differences(step, source.metrics)]
    own = None if result.culprit is None else culprit_from_dict(result.culprit)
    found = None if own is None else on_other_ranks(own, ranks, source.world_size)
    evidence = None if source.failure is None else source.failure.get("evidence")
    recorded = None if evidence is None else culprit_from_dict(evidence)
    # a step of which the run has logged nothing is not compared
    is_known = source.failure is not None or source.step in source.metrics
    other_machine = list(_other_machine(source, result))
    return ReplayReport(
        run=str(source.path),
        step=source.step,
        ranks=ranks,
        world_size=source.world_size,
        promises_bits=source.config.engine.reproducible and not other_machine,
        result=result,
        num_compared=sum(step.step in source.metrics for step in result.steps),
        differences=differences,
        culprit=None if found is None else asdict(found),
        recorded=evidence,
        differing_fields=differing_fields(found, recorded) if is_known else [],
        notes=[*other_machine, *_notes(source, result)],
    )


def _differences(step: ReplayedStep, metrics: Mapping[int, Mapping[str, Any]]) -> Iterator[NumberDifference]:
    logged = metrics.get(step.step)
    if logged is not None:
        for name in _COMPARED:
            replayed = getattr(step, name)
            if logged[name] != replayed:  # None is a number that is not finite
                yield NumberDifference(step.step, name, logged[name], replayed)


def _other_machine(source: RecordedRun, result: ReplayResult) -> Iterator[str]:
    pairs = [
        ("device", source.device, result.device),
        ("PyTorch", source.versions.get("torch"), str(torch.__version__)),
    ]
    for what, then, now in pairs:
        if then is not None and then != now:
            yield f"the run used {what} {then}, this is {now}: kernels may round differently"


def _notes(source: RecordedRun, result: ReplayResult) -> Iterator[str]:
    if not source.config.engine.reproducible:
        yield "the run is not reproducible (engine.reproducible=false), so bits may differ"
    if source.data_fingerprint is None:
        yield "no checkpoint names the run's data, so only the losses show whether it is the same"
    if source.world_size is None:
        yield "no file names the run's number of ranks, so the culprit is given in the ranks of the replay"
    if source.checkpoints and result.checkpoint is None:
        yield "no checkpoint verifies: replayed from the seed"
