"""Experiment trackers: sinks that send metrics to Weights & Biases or TensorBoard.

Only this file imports wandb and tensorboard, inside the functions that need them. Trackers exist on rank 0 only. A
tracker that fails is dropped with a warning; training continues, and ``metrics.jsonl`` has all metrics anyway.
"""

from __future__ import annotations

import importlib.util
import json
import netrc
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from dtrain.config.schema import TensorboardConfig, TrackerConfig, WandbConfig
from dtrain.distributed.logging import logger
from dtrain.errors import ConfigError, is_disk_fault
from dtrain.redaction.redact import redact_values
from dtrain.telemetry.metrics import Sink, StepMetrics, write_json
from dtrain.telemetry.precision import PrecisionFindings

TRACKER_FILE = "tracker.json"

Mode = Literal["online", "offline", "disabled"]


def check_tracker(config: TrackerConfig) -> None:
    """Raises ``ConfigError`` if the tracker's package is missing; called on every rank before anything starts."""
    if isinstance(config, TensorboardConfig) and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "tracker=tensorboard needs the package tensorboard, which is not installed: "
            "pip install tensorboard, or choose tracker=none"
        )


def open_tracker(config: TrackerConfig, run_dir: Path, *, settings: Mapping[str, Any], start_step: int) -> list[Sink]:
    """Opens the tracker that ``config`` names; returns a list of zero or one sinks.

    ``settings`` is the resolved config of the run, redacted because it may leave this machine.
    """
    if isinstance(config, WandbConfig):
        return _guarded("wandb", lambda: WandbTracker(config, run_dir, settings))
    if isinstance(config, TensorboardConfig):
        return _guarded("tensorboard", lambda: TensorboardTracker(run_dir, start_step))
    return []


class WandbTracker:
    """A Weights & Biases run in ``run_dir/wandb``; a resumed run continues it by the id stored in ``tracker.json``.

    Only the redacted config and the metrics are sent: no command line, code, git state or console output.
    """

    def __init__(self, config: WandbConfig, run_dir: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        mode = wandb_mode(config.mode)
        self._run = wandb.init(
            **redact_values(
                {
                    "project": config.project,
                    "entity": config.entity,
                    "name": config.run_name or run_dir.name,
                    "tags": config.tags,
                }
            ),
            dir=str(run_dir),
            id=_run_id(run_dir),
            resume="allow",
            mode=mode,
            config=dict(settings),
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False, x_disable_meta=True, init_timeout=60
            ),
        )
        # a step axis of our own: wandb drops values logged at a step that it has seen, which a resumed run repeats
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if mode == "online":
            logger.info("wandb: online at %s", self._run.url)
        elif mode == "offline":
            logger.info("wandb: offline in %s; upload with `wandb sync`", run_dir / "wandb")

    def step(self, metrics: StepMetrics) -> None:
        self._run.log({"step": metrics.step} | {f"train/{key}": value for key, value in _scalars(metrics).items()})

    def validation(self, step: int, losses: Mapping[str, float]) -> None:
        self._run.log({"step": step, **_tracked(losses)})

    def precision(self, findings: PrecisionFindings) -> None:
        self._run.log({"step": findings.step} | _precision(findings))

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


def wandb_mode(asked: str) -> Mode:
    """Returns ``online``, ``offline`` or ``disabled``, without network access and without a prompt.

    ``auto`` is ``WANDB_MODE`` if it is set, else online if logged in, else offline. Online without a login becomes
    offline with a warning, because wandb would ask for a key.
    """
    mode = os.environ.get("WANDB_MODE", "auto").lower() if asked == "auto" else asked
    mode = {"dryrun": "offline", "run": "online"}.get(mode, mode)  # wandb's older names
    if mode == "disabled":
        return "disabled"
    if mode != "offline" and _logged_in():
        return "online"
    if mode == "online":
        logger.warning("wandb: mode=online, but not logged in (`wandb login`); tracking offline")
    return "offline"


def _logged_in() -> bool:
    """Whether wandb finds a key without asking: in ``WANDB_API_KEY``, or in the netrc file for its host."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    paths = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for path in paths:
        try:
            if netrc.netrc(Path(path).expanduser()).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _run_id(run_dir: Path) -> str:
    path = run_dir / TRACKER_FILE
    if path.exists():
        run_id = json.loads(path.read_text(encoding="utf-8")).get("wandb_run_id")
        if isinstance(run_id, str) and run_id.isalnum():
            return run_id
    run_id = uuid.uuid4().hex[:8]
    write_json(path, {"wandb_run_id": run_id})
    return run_id


class TensorboardTracker:
    """TensorBoard event files in ``run_dir/tensorboard``; steps that a resumed run repeats are purged."""

    def __init__(self, run_dir: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start_step + 1)

    def step(self, metrics: StepMetrics) -> None:
        for key, value in _scalars(metrics).items():
            self._writer.add_scalar(f"train/{key}", value, metrics.step)

    def validation(self, step: int, losses: Mapping[str, float]) -> None:
        for name, loss in _tracked(losses).items():
            self._writer.add_scalar(name, loss, step)

    def precision(self, findings: PrecisionFindings) -> None:
        for name, value in _precision(findings).items():
            self._writer.add_scalar(name, value, findings.step)

    def close(self, exit_code: int) -> None:
        self._writer.close()


def _tracked(losses: Mapping[str, float]) -> dict[str, float]:
    """Returns the losses of a validation under the trackers' names: ``val/loss``, ``val/loss_ema``."""
    return {name.replace("val_", "val/", 1): loss for name, loss in losses.items()}


def _precision(findings: PrecisionFindings) -> dict[str, float]:
    return {f"precision/{name}": value for name, value in findings.scalars().items()}


class _Guarded:
    """Forwards to a tracker until it fails once; then warns and drops it."""

    def __init__(self, name: str, tracker: Sink) -> None:
        self._name = name
        self._tracker: Sink | None = tracker

    def step(self, metrics: StepMetrics) -> None:
        self._try(lambda tracker: tracker.step(metrics))

    def validation(self, step: int, losses: Mapping[str, float]) -> None:
        self._try(lambda tracker: tracker.validation(step, losses))

    def precision(self, findings: PrecisionFindings) -> None:
        self._try(lambda tracker: tracker.precision(findings))

    def close(self, exit_code: int) -> None:
        self._try(lambda tracker: tracker.close(exit_code))

    def _try(self, call: Callable[[Sink], None]) -> None:
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except Exception as error:
            self._tracker = None
            _warn(self._name, error)


def _guarded(name: str, make: Callable[[], Sink]) -> list[Sink]:
    try:
        return [_Guarded(name, make())]
    except Exception as error:
        if is_disk_fault(error):  # nothing else of the run could be stored either
            raise
        _warn(name, error)
        return []


def _warn(name: str, error: Exception) -> None:
    logger.warning("%s failed and is switched off; training continues: %s: %s", name, type(error).__name__, error)


def _scalars(metrics: StepMetrics) -> dict[str, float]:
    """Returns the numbers of a step that a tracker can plot; ``applied`` is 0 or 1."""
    values = metrics.to_dict()
    return {key: float(value) for key, value in values.items() if key != "step" and isinstance(value, (int, float))}
