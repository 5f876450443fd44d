from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dtrain.config.schema import TensorboardConfig, TrackerConfig, WandbConfig
from dtrain.errors import ConfigError
from dtrain.precision.report import PrecisionReport
from dtrain.telemetry import trackers
from dtrain.telemetry.precision import PrecisionFindings
from tests.helpers.run_folders import STEP

FOUND = PrecisionFindings(PrecisionReport(step=4, applied=True, loss_scale=1.0, better_scale=8.0, parameters=()))


@pytest.fixture
def logged_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No login of any kind; returns where the netrc file would be."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    return netrc


def test_mode(logged_out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mode(asked: str, variable: str | None = None) -> str:
        monkeypatch.delenv("WANDB_MODE", raising=False)
        if variable is not None:
            monkeypatch.setenv("WANDB_MODE", variable)
        return trackers.wandb_mode(asked)

    assert mode("auto") == mode("online") == mode("auto", "online") == "offline", "nobody is logged in"
    for text, expected in (
        ("machine example.org login user password 0123\n", "offline"),
        ("machine without end", "offline"),
        ("machine api.wandb.ai login user password 0123\n", "online"),
    ):
        logged_out.write_text(text)
        assert mode("auto") == expected
    logged_out.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert mode("auto") == mode("auto", "online") == mode("online", "offline") == "online"
    assert mode("auto", "offline") == mode("auto", "dryrun") == mode("offline", "online") == "offline"
    assert mode("auto", "disabled") == mode("disabled") == "disabled"


_RUN = """
import sys
import time
from dataclasses import replace
from pathlib import Path
from dtrain.config.schema import WandbConfig
from dtrain.telemetry.trackers import open_tracker
from tests.helpers.run_folders import STEP
from tests.unit.telemetry.test_trackers import FOUND
for _ in range(2):  # the second continues the run of the first
    [tracker] = open_tracker(WandbConfig(mode="offline"), Path(sys.argv[1]), settings={"seed": 7}, start_step=0)
    second = int(time.time())
    for step in (1, 2):
        tracker.step(replace(STEP, step=step))
    tracker.validation(2, {"val_loss": 2.5})
    tracker.precision(FOUND)
    tracker.close(0)
    while int(time.time()) == second:  # by which wandb names the folder of a run
        time.sleep(0.01)
"""


@pytest.mark.processes
def test_wandb_offline_keeps_its_id_and_its_secrets(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _RUN, str(tmp_path), "canary-5d1f"], check=True, timeout=120)
    run_id = json.loads((tmp_path / "tracker.json").read_text())["wandb_run_id"]
    runs = list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))
    logs = [path.read_bytes() for run in runs for path in run.glob("*.wandb")]
    assert len(logs) == 2
    expected = (b"train/grad_norm", b"val/loss", b"seed", b"precision/better_scale")
    assert all(name in log for log in logs for name in expected)
    everything = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"canary-5d1f" in content for content in everything)


def test_a_tracker_that_fails_warns_once(logged_out: Path, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    broken = Mock(**{"return_value.step.side_effect": ConnectionError("no network")})
    monkeypatch.setattr(trackers, "WandbTracker", broken)
    [tracker] = trackers.open_tracker(WandbConfig(), tmp_path, settings={}, start_step=0)
    with caplog.at_level(logging.WARNING):
        tracker.step(STEP)
        tracker.step(STEP)
        tracker.close(0)
    assert [name for name, _, _ in broken.return_value.method_calls] == ["step"]
    assert caplog.messages == ["wandb failed and is switched off; training continues: ConnectionError: no network"]


def test_no_tracker_is_no_sink_nor_one_that_cannot_start(logged_out: Path, tmp_path: Path, caplog: Any) -> None:
    assert trackers.open_tracker(TrackerConfig(), tmp_path, settings={}, start_step=0) == []
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "tracker.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert trackers.open_tracker(WandbConfig(mode="offline"), tmp_path, settings={}, start_step=0) == []
    assert "wandb failed" in caplog.text


def test_tensorboard_purges_what_a_resumed_run_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start in (0, 2):
        [tracker] = trackers.open_tracker(TensorboardConfig(), tmp_path, settings={}, start_step=start)
        for step in range(start + 1, 5):
            tracker.step(replace(STEP, step=step, loss=float(10 * start + step)))
        tracker.validation(4, {"val_loss": 2.5})
        tracker.precision(FOUND)
        tracker.close(0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0)]
    assert events.Scalars("val/loss")[-1].value == 2.5
    assert [(e.step, e.value) for e in events.Scalars("precision/better_scale")] == [(4, 8.0)]


def test_a_missing_tensorboard_is_reported_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install tensorboard"):
        trackers.check_tracker(TensorboardConfig())
    trackers.check_tracker(WandbConfig())
