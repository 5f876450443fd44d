"""Runs in every state, as ``dtrain watch`` reads them from their files."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.__main__ import main
from dtrain.checkpoint.lease.lease_file import Holder, path_of
from dtrain.telemetry.metrics import MetricsFile, StepMetrics
from dtrain.tools.watch import cli
from dtrain.tools.watch.files import LineReader
from dtrain.tools.watch.state import WatchedRun
from tests.helpers.terminal import Terminal

STEP = StepMetrics(
    step=1, loss=3.0, lr=1e-3, grad_norm=1.0, loss_scale=1.0, applied=True, skipped_steps=0, tokens=512,
    tokens_per_s=100.0, step_ms=50.0, data_wait_ms=0.25, peak_memory=1 << 30,
)  # fmt: skip
FOREIGN = replace(Holder.this_process(1), host="node7", boot_id="another", pid=4711)
OWN = replace(Holder.this_process(1), host="here")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def write_run(path: Path, steps: int = 3, *, saved: tuple[int, ...] = (2,)) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text("run_dir: x\ntrain:\n  steps: 10\n")
    for step in saved:
        (path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    file = MetricsFile(path, 0)
    for step in range(1, steps + 1):
        file.step(replace(STEP, step=step, loss=3.0 / step))
    file.close(0)
    return path


def add_line(path: Path, **values: Any) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**STEP.to_dict(), **values}) + "\n")


def write_lease(path: Path, holder: Holder) -> Path:
    (path / "checkpoints").mkdir(parents=True, exist_ok=True)
    file = path_of(path / "checkpoints", holder.token)
    file.write_bytes(holder.encode())
    return file


def files(path: Path) -> dict[str, tuple[int, bytes]]:
    found = [file for file in path.rglob("*") if file.is_file()]
    return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in found}


AGAIN = "the same command with run_dir={path} continues from step 2"
FAILURE = {"failure": "StorageError: disk full\x1b[2J\nat step 4"}
SILENT = f"ended without a message, such as by SIGKILL; {AGAIN}"
ENDED = {
    "finished": ("summary.json", {"finished": True, "steps": 10}, "finished"),
    "train.steps raised": ("summary.json", {"finished": True, "steps": 3}, f"stopped; {AGAIN}"),
    "stopped": ("summary.json", {"finished": False, "steps": 3}, f"stopped; {AGAIN}"),
    "failed": ("restarts.json", FAILURE, f"failed: StorageError: disk full\ufffd[2J at step 4; {AGAIN}"),
    "silent": ("restarts.json", {"failure": "", "attempts": 1}, SILENT),
}


@pytest.mark.parametrize(("name", "content", "expected"), ENDED.values(), ids=ENDED)
def test_an_ended_run_says_why_and_what_continues(run: Path, name: str, content: dict[str, Any], expected: str) -> None:
    (run / name).write_text(json.dumps(content))
    before = files(run)
    watched = WatchedRun(run)
    view = watched.view()
    assert view.status == expected.format(path=run)
    assert not view.is_running
    assert not watched.may_change
    assert files(run) == before


@pytest.mark.processes
def test_a_held_run_names_its_process(run: Path) -> None:
    silent = (
        "seems dead: no heartbeat from process 4711 on node7 for 5 min; if it has ended, the same command with "
        f"run_dir={run} takes over after 90 s"
    )
    process = subprocess.Popen(["true"])
    dead = replace(OWN, pid=process.pid)
    write_lease(run, dead)
    process.wait()
    killed = f"killed: process {dead.pid} on here has ended without a message; " + AGAIN.format(path=run)
    assert WatchedRun(run).view().status == killed
    path_of(run / "checkpoints", dead.token).unlink()
    for holder, age_s, damage, expected in (
        (OWN, 0, b"", f"running: process {OWN.pid} on here"),
        (FOREIGN, 0, b"", "running: process 4711 on node7"),
        (FOREIGN, 300, b"", silent),
        (FOREIGN, 0, b"{", "running: an unknown process"),
    ):
        file = write_lease(run, holder)
        if damage:
            file.write_bytes(damage)
        os.utime(file, (time.time() - age_s,) * 2)
        watched = WatchedRun(run)
        view = watched.view()
        assert (view.status, watched.may_change) == (expected, True)
        assert view.is_running is expected.startswith("running")
        file.unlink()


def test_a_run_without_a_checkpoint_or_a_step(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", saved=())
    assert WatchedRun(path).view().status.endswith("begins again, because there is no checkpoint")
    write_lease(tmp_path / "new", OWN)
    view = WatchedRun(tmp_path / "new").view()
    assert view.status == f"running: process {os.getpid()} on here; waiting for the first logged step"
    assert [name for name, _ in view.plain(ascii_only=True)] == ["run", "state", "step"]


def test_a_heartbeat_counts_by_the_clock_of_the_watcher(run: Path) -> None:
    """The time of the file decides only at the first look; from then on, its bytes do."""
    now = [0.0]
    file = write_lease(run, FOREIGN)
    watched = WatchedRun(run, elapsed=lambda: now[0])
    for later, heartbeats, word in [(0, 0, "running"), (89, 0, "running"), (95, 0, "seems"), (97, 1, "running")]:
        now[0] = later
        file.write_bytes(replace(FOREIGN, counter=heartbeats).encode())
        os.utime(file, (0 if later else time.time(),) * 2)
        assert watched.view().status.startswith(word), later


def test_lines_are_read_as_they_come(run: Path) -> None:
    watched = WatchedRun(run)
    assert watched.view().progress.step == 3
    line = json.dumps({**STEP.to_dict(), "step": 4}).encode()
    with (run / "metrics.jsonl").open("ab", buffering=0) as file:
        file.write(b"not json\n[1]\n" + line[:20])
        assert watched.view().progress.step == 3
        file.write(line[20:] + b"\n")
        assert watched.view().progress.step == 4
        file.write(b'{"step": 5, "val_loss": 2.5}\n{"st')
    progress = watched.view().progress
    assert (progress.step, progress.val_losses) == (4, {"val_loss": 2.5})
    assert len(progress.loss.sampled(99)) == 4
    reader = LineReader(run / "none")
    assert (reader.restarted(), list(reader.new_lines())) == (False, [])


@pytest.mark.parametrize("in_place", [False, True], ids=["replaced", "truncated"])
def test_a_file_that_is_written_again_is_read_again(tmp_path: Path, in_place: bool) -> None:
    path = write_run(tmp_path / "run", 6)
    run = WatchedRun(path)
    assert run.view().progress.step == 6
    if in_place:
        lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
        (path / "metrics.jsonl").write_text("".join(line.replace("50.0", "77.0") for line in lines))
    else:
        MetricsFile(path, 4).close(0)  # what a resumed run does
    (path / "config.yaml").write_text("train: {steps: 20}\ndata: {name: glyphs}\n")
    view = run.view()
    assert (view.progress.step, view.progress.total_steps) == (6 if in_place else 4, 20)
    assert len(view.progress.loss.sampled(99)) == view.progress.step
    assert view.progress.number("step_ms") == (77.0 if in_place else 50.0)
    names = [name for name, _ in view.figures()]
    assert "samples/s" in names, "images have no tokens"
    assert not [name for name in names if "token" in name]


def test_an_unreadable_configuration_leaves_the_total_open(run: Path) -> None:
    for text in ("", "{", "train: 3", "train: {steps: -1}", "train: {steps: yes}", "a: &a [*a]", "\x00"):
        (run / "config.yaml").write_text(text)
        view = WatchedRun(run).view()
        assert view.progress.total_steps is None
        assert dict(view.plain(ascii_only=True))["step"] == "3"


def test_a_folder_of_runs_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2, 10):
        write_run(tmp_path / str(number), number)
    (tmp_path / "2/summary.json").write_text('{"finished": true, "steps": 10}')
    (tmp_path / "other").mkdir()
    assert main(["watch", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if str(tmp_path) in line][1:]
    assert cells == [
        [str(tmp_path / "1"), "1/10 10 %", "3.0000", "stopped"],
        [str(tmp_path / "2"), "2/10 20 %", "1.5000", "finished"],
        [str(tmp_path / "10"), "10/10 100 %", "0.3000", "stopped"],
    ]
    assert out.startswith(f"## 3 runs in {tmp_path}; dtrain watch {tmp_path / '1'} shows the first\n")


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a\x1b[2J").mkdir()
    (tmp_path / "file").write_text("")
    for path, message in (
        (tmp_path / "file", ": a file; expected the run directory"),
        (tmp_path, "or with runs in it; it holds file, a\ufffd[2J\n"),
        (tmp_path / "a\x1b[2J", "it holds nothing\n"),
    ):
        assert main(["watch", str(path)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert (error.count("\n"), "\x1b" in error) == (1, False)
    assert cli.main([]) == 2
    assert "usage: dtrain watch" in capsys.readouterr().err


def test_nothing_printed_holds_a_secret_or_controls_the_terminal(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "c4nary-token-1")
    path = write_run(tmp_path / "run-c4nary-token-1-ghp_C4naryGithub0001")
    add_line(path, applied=False, reason="overflow\x9b", culprit="password=c4nary-text1\x1b]0;x\x07", step=4)
    (path / "restarts.json").write_text(json.dumps({"failure": "Bearer c4nary.bearer-1 \x1b[2J"}))
    assert main(["watch", str(path)]) == 0
    assert main(["watch", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "c4nary" not in out.lower()
    assert "culprit: password=***" in out
    assert all(char.isprintable() or char == "\n" for char in out)


@pytest.mark.processes
@pytest.mark.parametrize("end", ["ctrl-c", "finished"])
def test_a_terminal_follows_a_run_to_its_end(run: Path, end: str) -> None:
    lease = write_lease(run, Holder.this_process(1))
    with Terminal("watch", "run", cwd=run.parent) as terminal:
        terminal.wait_for("step 3/10  30 %  ETA 0:00")
        add_line(run, step=4)
        terminal.wait_for("step 4/10")
        if end == "finished":
            lease.unlink()
            (run / "summary.json").write_text('{"finished": true, "steps": 10}')
        else:
            terminal.press_ctrl_c()
        assert terminal.wait() == 0
    shown = "\n".join(terminal.screen.lines)
    assert ("finished" if end == "finished" else f"running: process {os.getpid()}") in shown
    assert shown.count("╭─ run ") == 1, "it is drawn in its place"
    assert "Traceback" not in shown
    assert terminal.screen.cursor_shown
