"""Reads what a run has left behind: its configuration, its metrics, the culprit of a step, and its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from dtrain.checkpoint.directory import checkpoints_dir, committed_checkpoints, step_of
from dtrain.checkpoint.format.integrity import load_manifest
from dtrain.checkpoint.format.manifest import Manifest
from dtrain.config.dump import config_from_dict
from dtrain.config.model import LANGUAGE_FACTORIES, USED_KEYS
from dtrain.config.schema import LaunchConfig, RunConfig, TrackerConfig
from dtrain.config.yaml_files import read_yaml
from dtrain.distributed.logging import logger
from dtrain.errors import CheckpointError, ConfigError
from dtrain.redaction.redact import MASK
from dtrain.telemetry.metrics import (
    CHECKPOINTS,
    CONFIG_FILE,
    FAILURES,
    METRICS_FILE,
    Summary,
    failure_file,
    read_metrics,
    read_summary,
)
from dtrain.train.run import DATA_FINGERPRINT
from dtrain.train.run_dir import CONTRACT_FILE


@dataclass(frozen=True)
class RecordedRun:
    """A run and the step of it to replay.

    Attributes:
        path: the run directory.
        step: counted from 1, as in ``metrics.jsonl``.
        config: in force at that step.
        checkpoints: those before the step, the newest first.
        metrics: the logged line of each step.
        failure: ``failures/step-N.json`` of the step; None if it was applied.
        world_size: number of ranks; None if no file names it.
        data_fingerprint: of its data; None if no checkpoint names it.
        contract: the precision contract; empty if unknown.
        versions: of PyTorch and Python; empty if unknown.
        device: as ``summary.json`` names it; None without that file.
    """

    path: Path
    step: int
    config: RunConfig
    checkpoints: tuple[Path, ...]
    metrics: Mapping[int, Mapping[str, Any]]
    failure: Mapping[str, Any] | None
    world_size: int | None
    data_fingerprint: str | None
    contract: Mapping[str, Any]
    versions: Mapping[str, str]
    device: str | None


def read_run(path: Path, step: int) -> RecordedRun:
    """Reads the files of the run at ``path``.

    Raises:
        ConfigError: it is no run directory, its configuration cannot be read, or it has not come to the step.
    """
    config = _read_config(path, step)
    metrics = {line["step"]: line for line in _read_lines(path) if "loss_scale" in line}
    _check_step(path, step, config, metrics)
    # a file of an earlier attempt may lie beside the line of a step that was applied since
    is_applied = step in metrics and metrics[step]["applied"]
    failure = None if is_applied else _read_json(path / FAILURES / failure_file(step))
    manifests = list(_manifests(path / CHECKPOINTS))
    states = [manifest.state for manifest in manifests]
    before = [manifest.state for manifest in manifests if manifest.step < step]
    # the process that ran the step saved the next checkpoint
    saved_next = [manifest.state for manifest in manifests if manifest.step >= step]
    summary = read_summary(path)
    world_size = _world_size(summary, failure, [*saved_next, *reversed(before)])
    contract = _read_json(_in_force(path / CONTRACT_FILE, step)) or {}
    if config.precision.name == "auto" and contract:  # this machine might choose another one
        config = replace(config, precision=replace(config.precision, name=contract["precision"]))
    last = max((number for number in metrics if number <= step), default=None)
    if config.model.compile == "auto" and last is not None:  # a measurement here might choose otherwise, for other bits
        chosen = "blocks" if "compiled_graphs" in metrics[last] else "none"
        config = replace(config, model=replace(config.model, compile=chosen))
    fingerprints = [state["extra"][DATA_FINGERPRINT] for state in states if DATA_FINGERPRINT in state["extra"]]
    return RecordedRun(
        path,
        step,
        config.at(step - 1),
        _checkpoints_before(path, config, step),
        metrics,
        failure,
        world_size,
        fingerprints[0] if fingerprints else None,
        before[-1].get("contract") or contract if before else contract,
        states[0]["versions"] if states else {},
        None if summary is None else summary.device,
    )


def require_named(run: RecordedRun, code: Collection[str]) -> None:
    """Checks that the user has named all code of their own that the run's configuration names.

    A run directory is data: nothing that it names is imported because it names it.

    Args:
        code: names on the command line, as ``package.module:name``.

    Raises:
        ConfigError: the run names code that the user has not named, or the user names code that the run does not.
    """
    factory = getattr(run.config.optim, "factory", "torch.optim:")
    needed = {run.config.model.factory} - {*LANGUAGE_FACTORIES, *USED_KEYS}
    needed |= set() if factory.startswith("torch.optim:") else {str(factory)}
    if needed - set(code):
        names = ",".join(sorted(needed))
        raise ConfigError(
            f"{run.path} trains with code of its own, {names}, which a run directory alone must not start; if you "
            f"trust it, name it: dtrain replay {run.path} step={run.step} code={names}"
        )
    if set(code) - needed:
        used = f"only {','.join(sorted(needed))}" if needed else "no code but dtrain and torch; leave code= out"
        raise ConfigError(f"code={','.join(code)}: {run.path} uses {used}")


def _read_config(path: Path, step: int) -> RunConfig:
    """Returns the configuration that was in force at ``step``, on this machine's device and without a tracker."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory; give the run directory of dtrain train")
    file = _in_force(path / CONFIG_FILE, step)
    if not file.is_file():
        raise ConfigError(f"{path} holds no {CONFIG_FILE}; give the run directory of dtrain train")
    try:
        config = config_from_dict(read_yaml(file))
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{file} is not the configuration of a training run ({type(error).__name__}: {reason})"
        ) from None
    for group in ("model", "data", "optim"):
        for key in _blanked(group, vars(getattr(config, group))):
            logger.warning("%s is blanked in %s, and stays so in the replay", key, file)
    launch = LaunchConfig(
        device=config.launch.device if config.launch.device == "cpu" else "auto",
        threads_per_rank=config.launch.threads_per_rank,
        timeout_s=config.launch.timeout_s,
    )
    return replace(config, launch=launch, tracker=TrackerConfig())


def _in_force(file: Path, step: int) -> Path:
    """Returns the version of a run's file that was in force at ``step``; a run that changes it keeps the earlier."""
    steps = {old: old.stem.rpartition("-")[2] for old in file.parent.glob(f"{file.stem}-until-step-*{file.suffix}")}
    earlier = {int(number): old for old, number in steps.items() if number.isdecimal()}
    changes = sorted(number for number in earlier if number >= step)
    return earlier[changes[0]] if changes else file


def _blanked(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _blanked(f"{key}.{name}", item)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _blanked(f"{key}[{number}]", item)
    elif isinstance(value, str) and MASK in value:
        yield key


def _read_lines(path: Path) -> list[dict[str, Any]]:
    file = path / METRICS_FILE
    return read_metrics(file) if file.is_file() else []


def _check_step(path: Path, step: int, config: RunConfig, metrics: Mapping[int, Any]) -> None:
    summary = read_summary(path)
    last = max([*metrics, summary.steps if summary is not None else 0, 0])
    # a run that died has logged only some of its last steps
    reached = last if summary is not None else min(last + config.train.log_every, config.train.steps)
    if step > reached:
        raise ConfigError(f"step={step}: {path} has come to step {last}, as its metrics show; choose one up to there")


def _read_json(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(values).__name__}")
    return values


def _manifests(directory: Path) -> Iterator[Manifest]:
    for path in committed_checkpoints(directory):
        try:
            manifest = load_manifest(path)
        except (CheckpointError, OSError):  # a load names what is wrong with it
            continue
        if manifest.training is not None:
            yield manifest


def _world_size(
    summary: Summary | None, failure: Mapping[str, Any] | None, states: list[Mapping[str, Any]]
) -> int | None:
    if failure is not None and "world_size" in failure:
        return int(failure["world_size"])
    if states:
        return int(states[0]["world_size"])
    return None if summary is None else summary.world_size


def _checkpoints_before(path: Path, config: RunConfig, step: int) -> tuple[Path, ...]:
    begin = 0 if config.at(step - 1) is config else config.switch_step
    own = [found for found in committed_checkpoints(path / CHECKPOINTS) if begin <= step_of(found) < step]
    if begin and not own:
        raise ConfigError(
            f"step={step} computes in another precision than the steps up to {begin}, and {path} holds no checkpoint "
            f"from there on before it; choose a later step, or one up to {begin}"
        )
    if own or config.resume in ("auto", "none"):
        return tuple(reversed(own))
    # the run began from another run's checkpoint
    other = Path(config.resume)
    found = [other] if (other / "manifest.json").exists() else committed_checkpoints(checkpoints_dir(other))
    if not found:
        raise ConfigError(
            f"{path} began from resume={config.resume}, where there is no checkpoint now; put it back, or replay a "
            f"step after one of the run's own checkpoints"
        )
    return (found[-1],)
