"""The run directory: its path, its contents so far, and whether the run may continue. Rank 0 decides for all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from dtrain.checkpoint.directory import (
    checkpoints_dir,
    committed_checkpoints,
    is_single_checkpoint,
    make_directories,
    quarantined_checkpoints,
    step_name,
    step_of,
)
from dtrain.checkpoint.format.checked_file import DamageError
from dtrain.checkpoint.format.integrity import load_manifest
from dtrain.checkpoint.format.manifest import Manifest
from dtrain.checkpoint.huggingface.task_model import task_of
from dtrain.checkpoint.lease.lease import hold
from dtrain.checkpoint.shared_folder import reopen_folders
from dtrain.checkpoint.state_diff import state_differences
from dtrain.config.blocks import Blocks
from dtrain.config.dump import HASH_EXCLUDES, config_to_dict, defaults, to_yaml
from dtrain.config.model import LOSS_KEYS, ModelConfig
from dtrain.config.schema import RunConfig
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.consensus import on_rank_0, on_rank_0_for_long
from dtrain.distributed.logging import logger
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.errors import CheckpointError, ConfigError, StorageError, directory_error, disk_fault, is_disk_fault
from dtrain.redaction.redact import equal_but_for_secrets, redact
from dtrain.tasks import Task
from dtrain.tasks.description import describe_task, read_task
from dtrain.telemetry.metrics import (
    CHECKPOINTS,
    CONFIG_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    read_summary,
    to_json,
    write_atomically,
)

CONTRACT_FILE = "precision.json"

_MAY_CHANGE = (
    *("model.name", "model.dropout", "model.max_seq_len", "model.path", "model.lora.dropout", "model.channels_last"),
    *(f"model.{name}" for name in (*LOSS_KEYS, *(item.name for item in fields(Blocks)))),
)
"""Keys of the model that a resume may change."""


@dataclass(frozen=True)
class RunDir:
    """Directory of a run, and the checkpoint from which it starts.

    Attributes:
        load_from: a checkpoint or a directory of checkpoints; None: start from step 0.
        finished: whether all steps are done already.
        contract: the precision contract of that checkpoint; empty if unknown.
        step: of that checkpoint, if it verifies.
    """

    path: Path
    load_from: Path | None
    finished: bool
    contract: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS


def check_resume(config: RunConfig) -> None:
    """Raises ``ConfigError`` if ``resume`` is a path without a checkpoint, before anything starts.

    Ranks of several hosts leave it to rank 0, which checks it in ``open_run_dir``: [Note: cached names].
    """
    if config.resume not in ("auto", "none") and LaunchEnv.read().one_host:
        _find_checkpoints(config.resume)


def open_run_dir(
    config: RunConfig, comm: Communicator, job: int | None, held: ExitStack, task: Task | None = None
) -> RunDir:
    """Chooses and creates the run directory on rank 0, and returns it on every rank.

    Args:
        config: the run; without ``run_dir`` it is ``runs/<date>_<time>``.
        comm: the ranks.
        job: the number of this job in a sweep; each has its own folder in the run directory.
        held: rank 0 holds the lease of the run's checkpoints until it closes.
        task: of the data; None: it is not compared.

    Raises:
        ConfigError: on every rank: it cannot be created, another job uses it, it holds a run that ``resume`` forbids to
            continue, or the checkpoint is of another model or task.
        StorageError: on every rank: the disk is full or faulty.
    """

    def decide(while_waiting: Callable[[], None]) -> tuple[str, str | None, bool, dict[str, Any], int]:
        path = _create(config, job, while_waiting)
        load_from, finished = _starting_point(config, path)
        if not finished:
            _hold(path, held, while_waiting)
            load_from, finished = _starting_point(config, path)  # the job that held the lease may have saved since
        manifest = None if load_from is None else _newest_manifest(load_from)
        contract: dict[str, Any] = {}
        if manifest is not None:
            before, now = redact(manifest.state.get("config") or {}), redacted(config)
            # groups that the checkpoint lacks are not compared: an imported one has only its model
            shared = {group: now[group] for group in now if group in before}
            if before:
                if "model" in before:  # an older checkpoint lacks newer keys
                    before = before | {"model": defaults(ModelConfig) | before["model"]}
                compare_configs(before, shared, manifest.step)
            if task is not None:
                compare_tasks(task_of(manifest.state), task, manifest.step)
            contract = manifest.state.get("contract") or {}
        step = 0 if manifest is None else manifest.step
        return str(path), str(load_from) if load_from else None, finished, contract, step

    path, load_from, finished, contract, step = _value(
        on_rank_0_for_long(
            comm, "", lambda keep: _outcome(lambda: decide(keep)), ConfigError, expected=(ConfigError, OSError)
        )
    )
    return RunDir(Path(path), Path(load_from) if load_from else None, finished, contract, step)


def decide_on_rank_0(comm: Communicator, decide: Callable[[], Any]) -> Any:
    """Calls ``decide`` on rank 0 and returns its plain JSON value on every rank.

    Raises:
        ConfigError: on every rank, if ``decide`` raised it or an ``OSError`` that is no fault of the disk.
        StorageError: on every rank, if the disk is full or faulty.
        CommunicationError: on other ranks, if it raised anything else, which rank 0 raises unchanged.
    """
    return _value(on_rank_0(comm, "", lambda: _outcome(decide), ConfigError, expected=(ConfigError, OSError)))


def _outcome(decide: Callable[[], Any]) -> dict[str, Any]:
    """Returns the value of ``decide``, or the message of a disk fault, which is no mistake in the configuration."""
    try:
        return {"value": decide()}
    except StorageError as error:
        return {"disk_fault": str(error)}
    except OSError as error:
        if not is_disk_fault(error):
            raise
        return {"disk_fault": str(disk_fault(error))}


def _value(outcome: Mapping[str, Any]) -> Any:
    if "disk_fault" in outcome:
        raise StorageError(outcome["disk_fault"])
    return outcome["value"]


def check_not_newer(run_dir: RunDir, step: int) -> None:
    """Checks that the run directory has no checkpoint later than ``step``, from which the run continues.

    Raises:
        ConfigError: it has one: the run has already continued from ``step``, or the later one cannot be read.
    """
    steps = _steps(run_dir.checkpoints)
    if not steps or steps[-1] <= step:
        return
    if run_dir.load_from == run_dir.checkpoints:
        raise ConfigError(
            f"{run_dir.checkpoints / step_name(steps[-1])} cannot be read, though it is not known to be damaged, and "
            f"the newest readable one is at step {step}; make it readable, or move it away to continue from step {step}"
        )
    raise ConfigError(
        f"resume={run_dir.load_from} is at step {step}, but {run_dir.checkpoints} continues to step {steps[-1]}; "
        "use resume=auto to continue from there, or a new run_dir to branch off"
    )


def compare_configs(before: dict[str, Any], now: dict[str, Any], step: int) -> None:
    """Logs the differences from the config of a checkpoint. Both are without secrets; a secret that changes is none.

    Raises:
        ConfigError: a key that defines the model differs.
    """
    changes = [
        (item.path, item.a, item.b)
        for item in state_differences(before, now)
        if item.path.partition(".")[0] not in HASH_EXCLUDES and not equal_but_for_secrets(item.a, item.b)
    ]
    fatal = [
        (path, old, new)
        for path, old, new in changes
        # older checkpoints do not name their vocabulary; the engine compares the shapes
        if path.startswith("model.") and not path.startswith(_MAY_CHANGE) and (path, old) != ("model.vocab_size", None)
    ]
    if fatal:
        listed = ", ".join(f"{path}={old} (now {new})" for path, old, new in fatal)
        raise ConfigError(
            f"the checkpoint at step {step} holds another model: {listed}; set these back, or choose a new run_dir"
        )
    for path, old, new in changes:
        logger.info("changed since the checkpoint at step %d: %s=%s (was %s)", step, path, new, old)


def compare_tasks(before: Any, task: Task, step: int) -> None:
    """Compares what a model has learned from with the data: classes, the shape of inputs, and the number of targets.

    Means and deviations may change, because they follow the samples.

    Args:
        before: the description of the task in a checkpoint; nothing is compared with anything else.
        task: of the data.
        step: of the checkpoint.

    Raises:
        ConfigError: one differs.
    """
    try:
        before = describe_task(read_task(before, "the checkpoint's task"))
    except CheckpointError:  # a key of a library user, or of a run on tokens
        before = None
    if before is None:
        return
    now = describe_task(task) or {"name": task.name}
    before_targets, targets = (len(each.get("mean") or ()) for each in (before, now))
    changes = [
        f"{key}={before.get(key)} (now {now.get(key)})"
        for key in ("name", "input_shape", "is_image", "num_times")
        if before.get(key) != now.get(key)
    ]
    if before_targets != targets:
        changes.append(f"{before_targets} target values (now {targets})")
    old, new = (each.get("labels") or [] for each in (before, now))
    if len(old) != len(new):
        changes.append(f"{len(old)} classes (now {len(new)})")
    else:
        differing = [f"class {i} {a!r} (now {b!r})" for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
        changes += differing[:3] + ["other classes"] * (len(differing) > 3)
    if changes:
        raise ConfigError(
            f"the checkpoint at step {step} was trained on other data: {', '.join(changes)}; set the data back, or "
            "choose a new run_dir"
        )


def write_config(run_dir: RunDir, config: RunConfig, step: int) -> None:
    """Writes ``config.yaml``; a different one is kept as ``config-until-step-<step>.yaml``."""
    _write_keeping(run_dir.path / CONFIG_FILE, to_yaml(redacted(config)), step)


def write_contract(run_dir: RunDir, contract: Mapping[str, Any], step: int) -> None:
    """Writes ``precision.json``; a different one is kept as ``precision-until-step-<step>.json``."""
    _write_keeping(run_dir.path / CONTRACT_FILE, to_json(contract, indent=2), step)


def _write_keeping(path: Path, text: str, step: int) -> None:
    if path.exists() and path.read_text(encoding="utf-8") != text:
        path.replace(path.with_stem(f"{path.stem}-until-step-{step}"))
    write_atomically(path, text)


def redacted(config: RunConfig) -> dict[str, Any]:
    """Returns the config as plain data without secrets, because files and trackers outlive the run."""
    values: dict[str, Any] = redact(config_to_dict(config))
    return values


def _create(config: RunConfig, job: int | None, while_waiting: Callable[[], None]) -> Path:
    parts = [] if job is None else [str(job)]
    path = stamped = Path(config.run_dir or f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}", *parts).absolute()
    attempts = itertools.count(2)
    while config.run_dir is None and path.exists():  # two runs of one second
        path = stamped.with_name(f"{stamped.name}-{next(attempts)}")
    try:
        # durably: a checkpoint outlives a power cut only if its directories do
        make_directories(path, while_waiting)
    except OSError as error:
        raise directory_error("run_dir", path, error) from error
    return path


def _hold(path: Path, held: ExitStack, while_waiting: Callable[[], None]) -> None:
    try:
        held.enter_context(hold(path / CHECKPOINTS, while_waiting=while_waiting))
    except CheckpointError as error:
        raise ConfigError(f"run_dir={path} is not free: {error}") from error


def _starting_point(config: RunConfig, path: Path) -> tuple[Path | None, bool]:
    """Returns the checkpoint to load, and whether all steps are done."""
    summary = read_summary(path)
    steps, damaged = _steps(path / CHECKPOINTS), quarantined_checkpoints(path / CHECKPOINTS)
    if config.resume == "none" and (steps or damaged or (path / SUMMARY_FILE).exists()):
        what = f"checkpoints up to step {steps[-1]}" if steps else damaged[0].name if damaged else "a run's summary"
        raise ConfigError(
            f"resume=none, but run_dir={path} already holds {what}; "
            "continue it with resume=auto, or choose a new run_dir"
        )
    if config.resume == "none":
        return None, False
    if config.resume != "auto":
        return _find_checkpoints(config.resume), False
    if summary is not None and summary.finished and summary.steps >= config.train.steps:
        return None, True
    if steps or damaged:  # if none verifies the load fails: a run never restarts from step 0 by itself
        return path / CHECKPOINTS, False
    if (path / METRICS_FILE).exists():
        logger.warning("%s holds metrics but no checkpoint: starting again from step 0", path)
    return None, False


def _newest_manifest(load_from: Path) -> Manifest | None:
    candidates = [load_from] if is_single_checkpoint(load_from) else committed_checkpoints(load_from)
    for path in reversed(candidates):
        with suppress(DamageError, OSError):  # the engine names the damage, and loads an older one too
            return load_manifest(path)
    return None


def _find_checkpoints(resume: str) -> Path:
    """Finds the checkpoint or directory of checkpoints at ``resume``, which may be a run directory."""
    path = Path(resume).absolute()
    reopen_folders(path)  # [Note: cached names]
    if path.is_dir():
        directory = checkpoints_dir(path)
        try:
            if is_single_checkpoint(path) or committed_checkpoints(directory):
                return directory
        except CheckpointError as error:
            raise ConfigError(f"resume={resume}: {error}") from error
    found = "it holds no step-<number>" if path.is_dir() else "no such directory"
    raise ConfigError(
        f"resume={resume}: {found}; expected auto, none, a checkpoint (.../checkpoints/step-00000100), "
        "a directory of checkpoints, or a run directory"
    )


def _steps(directory: Path) -> list[int]:
    return [step_of(path) for path in committed_checkpoints(directory)]
