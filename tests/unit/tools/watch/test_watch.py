"""Runs in every state, as ``dtrain watch`` reads them from their files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
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


def write_run(path: Path, steps: int = 3, *, total: int = 10, saved: tuple[int, ...] = (2,)) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(f"run_dir: x\ntrain:\n  steps: {total}\n")
    for step in saved:
        (path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    file = MetricsFile(path, 0)
    for step in range(1, steps + 1):
        file.step(replace(STEP, step=step, loss=3.0 / step))
    file.close(0)
    return path


def write_lease(path: Path, holder: Holder) -> Path:
    (path / "checkpoints").mkdir(parents=True, exist_ok=True)
    file = path_of(path / "checkpoints", holder.token)
    file.write_bytes(holder.encode())
    return file


def state(path: Path) -> str:
    return WatchedRun(path).view().status


def write_end(path: Path, **content: Any) -> None:
    (path / "summary.json").write_text(json.dumps(content))


def files(path: Path) -> dict[str, tuple[int, bytes]]:
    found = [file for file in path.rglob("*") if file.is_file()]
    return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in found}


def _finish(path: Path) -> None:
    write_end(path, finished=True, steps=10)


def _raise_total(path: Path) -> None:
    write_end(path, finished=True, steps=3)


def _stop(path: Path) -> None:
    write_end(path, finished=False, steps=3)


def _fail(path: Path) -> None:
    (path / "restarts.json").write_text(json.dumps({"failure": "StorageError: disk full\x1b[2J\nat step 4"}))


def _end_silently(path: Path) -> None:
    (path / "restarts.json").write_text(json.dumps({"failure": "", "attempts": 1}))


def _kill(path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    write_lease(path, replace(Holder.this_process(1), pid=process.pid, host="here"))
    process.wait()


def _hold(path: Path) -> None:
    write_lease(path, replace(Holder.this_process(1), host="here"))


def _hold_elsewhere(path: Path) -> None:
    write_lease(path, FOREIGN)


def _fall_silent(path: Path) -> None:
    file = write_lease(path, FOREIGN)
    os.utime(file, (time.time() - 300, time.time() - 300))


def _damage(path: Path) -> None:
    write_lease(path, FOREIGN).write_bytes(b"{")


AGAIN = "the same command with run_dir={path} continues from step 2"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arrange", "expected", "may_change"),
    [
        (_finish, "finished", False),
        (_raise_total, f"stopped; {AGAIN}", False),
        (_stop, f"stopped; {AGAIN}", False),
        (_fail, f"failed: StorageError: disk full\ufffd[2J at step 4; {AGAIN}", False),
        (_end_silently, f"ended without a message, such as by SIGKILL; {AGAIN}", False),
        (_kill, "killed: process {pid} on here has ended without a message; " + AGAIN, False),
        (_hold, "running: process {pid} on here", True),
        (_hold_elsewhere, "running: process 4711 on node7", True),
        (
            _fall_silent,
            "seems dead: no heartbeat from process 4711 on node7 for 5 min; if it has ended, the same command with "
            "run_dir={path} takes over after 90 s",
            True,
        ),
        (_damage, "running: an unknown process", True),
    ],
)
def test_every_state_has_its_sentence(
    tmp_path: Path, arrange: Callable[[Path], None], expected: str, may_change: bool
) -> None:
    path = write_run(tmp_path / "run")
    arrange(path)
    before = files(path)
    run = WatchedRun(path)
    view = run.view()
    leases = [json.loads(file.read_text()) for file in path.glob("checkpoints/lease*") if arrange in (_hold, _kill)]
    assert view.status == expected.format(path=path, pid=leases[0]["pid"] if leases else 0)
    assert run.may_change is may_change
    assert view.is_running is expected.startswith("running")
    assert files(path) == before


def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", saved=())
    assert state(path).endswith("begins again, because there is no checkpoint")


def test_a_run_that_has_just_started_waits(tmp_path: Path) -> None:
    _hold(tmp_path)
    assert state(tmp_path) == f"running: process {os.getpid()} on here; waiting for the first logged step"
    view = WatchedRun(tmp_path).view()
    assert [name for name, _ in view.plain(ascii_only=True)] == ["run", "state", "step"]


def test_a_heartbeat_counts_by_the_clock_of_the_watcher(tmp_path: Path) -> None:
    """The time of the file decides only at the first look; from then on, its bytes do."""
    path, now = write_run(tmp_path / "run"), [0.0]
    file = write_lease(path, FOREIGN)
    run = WatchedRun(path, elapsed=lambda: now[0])
    for later, heartbeats, word in [(0, 0, "running"), (89, 0, "running"), (95, 0, "seems"), (97, 1, "running")]:
        now[0] = later
        file.write_bytes(replace(FOREIGN, counter=heartbeats).encode())
        os.utime(file, (0 if later else time.time(),) * 2)
        assert run.view().status.startswith(word), later


def test_lines_are_read_as_they_come(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 3)
    metrics = path / "metrics.jsonl"
    run = WatchedRun(path)
    assert run.view().progress.step == 3
    line = json.dumps({**STEP.to_dict(), "step": 4}).encode()
    with metrics.open("ab", buffering=0) as file:
        file.write(b"not json\n[1]\n" + line[:20])
        assert run.view().progress.step == 3
        file.write(line[20:] + b"\n")
        assert run.view().progress.step == 4
        file.write(b'{"step": 5, "val_loss": 2.5}\n{"st')
    view = run.view()
    assert (view.progress.step, view.progress.val_losses) == (4, {"val_loss": 2.5})
    assert len(view.progress.loss.sampled(99)) == 4


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
    (path / "config.yaml").write_text("train: {steps: 20}\n")
    view = run.view()
    assert (view.progress.step, view.progress.total_steps) == (6 if in_place else 4, 20)
    assert len(view.progress.loss.sampled(99)) == view.progress.step
    assert view.progress.number("step_ms") == (77.0 if in_place else 50.0)


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    reader = LineReader(tmp_path / "none")
    assert not reader.restarted()
    assert list(reader.new_lines()) == []


@pytest.mark.parametrize(
    "text", ["", "{", "train: 3", "train: {steps: -1}", "train: {steps: yes}", "a: &a [*a]", "\x00"]
)
def test_an_unreadable_configuration_leaves_the_total_open(tmp_path: Path, text: str) -> None:
    path = write_run(tmp_path / "run")
    (path / "config.yaml").write_text(text)
    view = WatchedRun(path).view()
    assert view.progress.total_steps is None
    assert dict(view.plain(ascii_only=True))["step"] == "3"


def test_a_folder_of_runs_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2, 10):
        write_run(tmp_path / str(number), number)
    _finish(tmp_path / "2")
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
    messages = []
    for path in (tmp_path / "none", tmp_path / "file", tmp_path, tmp_path / "a\x1b[2J"):
        assert main(["watch", str(path)]) == 2
        messages.append(capsys.readouterr().err)
    assert f"{tmp_path / 'none'}: no such folder; expected the run directory of dtrain train" in messages[0]
    assert ": a file; expected the run directory" in messages[1]
    assert messages[2].endswith("or with runs in it; it holds file, a\ufffd[2J\n")
    assert messages[3].endswith("it holds nothing\n")
    assert all(message.count("\n") == 1 and "\x1b" not in message for message in messages)


def test_nothing_printed_holds_a_secret_or_controls_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "c4nary-token-1")
    path = write_run(tmp_path / "run-c4nary-token-1-ghp_C4naryGithub0001")
    skipped = {"applied": False, "reason": "overflow\x9b", "culprit": "password=c4nary-text1\x1b]0;x\x07", "step": 4}
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**STEP.to_dict(), **skipped}) + "\n")
    (path / "restarts.json").write_text(json.dumps({"failure": "Bearer c4nary.bearer-1 \x1b[2J"}))
    assert main(["watch", str(path)]) == 0
    assert main(["watch", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "c4nary" not in out.lower()
    assert "culprit: password=***" in out
    assert all(char.isprintable() or char == "\n" for char in out)


def test_once_prints_names_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "run")
    assert cli.main([str(path), "--once"]) == 0
    assert capsys.readouterr().out.splitlines()[2:5] == [
        "step         3/10 30 %",
        "loss         1.0000  █▃▁  1.0000 to 3.0000",
        "lr           1.00e-03",
    ]


def test_samples_are_counted_as_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also once its lines are written again."""
    path = write_run(tmp_path / "run")
    (path / "config.yaml").write_text("train: {steps: 10}\ndata: {name: glyphs}\n")
    watched = WatchedRun(path)
    for _ in range(2):
        names = [name for name, _ in watched.view().figures()]
        assert "samples/s" in names
        assert not [name for name in names if "token" in name]
        lines = (path / "metrics.jsonl").read_text()
        (path / "metrics.jsonl").unlink()
        (path / "metrics.jsonl").write_text(lines.replace('"step": 1,', '"step": 2,'))


def test_a_bad_argument_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert (cli.main([]), cli.main(["--help"])) == (2, 0)
    assert "usage: dtrain watch" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize("end", ["ctrl-c", "finished"])
def test_a_terminal_follows_a_run_to_its_end(tmp_path: Path, end: str) -> None:
    path = write_run(tmp_path / "run")
    lease = write_lease(path, Holder.this_process(1))
    with Terminal("watch", "run", cwd=tmp_path) as terminal:
        terminal.wait_for("step 3/10  30 %  ETA 0:00")
        with (path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**STEP.to_dict(), "step": 4}) + "\n")
        terminal.wait_for("step 4/10")
        if end == "finished":
            lease.unlink()
            _finish(path)
        else:
            terminal.press_ctrl_c()
        assert terminal.wait() == 0
    shown = "\n".join(terminal.screen.lines)
    assert ("finished" if end == "finished" else f"running: process {os.getpid()}") in shown
    assert shown.count("╭─ run ") == 1, "it is drawn in its place"
    assert "Traceback" not in shown
    assert terminal.screen.cursor_shown
