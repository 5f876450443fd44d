"""The process that watches: hanging processes, its clock, and its files."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtrain.distributed.processes import process_start
from dtrain.distributed.progress import Phase, Progress
from dtrain.distributed.transport.choose import make_communicator
from dtrain.supervision import supervised, watcher
from dtrain.supervision.hang import PhaseLimits
from dtrain.supervision.member import Member, WatchJob, share_progress
from dtrain.supervision.supervised import Supervision, unsupported_reason
from dtrain.supervision.watcher import POLL_S, HangReport, Watcher, find_hangs
from tests.helpers import watched
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.ranks import run_ranks
from tests.helpers.watched import WatchedProcesses
from tests.unit.supervision.test_hang import CASES, ended, find_hang, limits, running, waiting

LIMIT_S = 0.8
TOLERANCE_S = 2.0

HANGS: dict[str, tuple[Phase, Callable[[Progress], None], str]] = {
    "stopped": (Phase.FORWARD, watched.stop, "rank 1 is stopped (SIGSTOP) in 'forward' of step 42 since"),
    "stopped in a wait": (Phase.UPDATE, watched.stop_in_a_wait, "rank 1 is stopped (SIGSTOP) in reduce of 'blocks.7'"),
    "endless loader": (Phase.DATA, watched.loop, "rank 1 is in 'data' of step 42 since"),
    "blocked in C": (Phase.FORWARD, watched.block, "rank 1 is in 'forward' of step 42 since"),
    "blocked in a save": (Phase.SAVE, watched.block, "rank 1 is in 'save' after step 41 since"),
    "evaluation": (Phase.EVALUATION, watched.block, "rank 1 is in 'evaluation' after step 41 since"),
    "deaf": (Phase.BACKWARD, watched.ignore_signals, "rank 1 is in 'backward' of step 42 since"),
    "start": (Phase.START, watched.block, "rank 1 is in 'start' since"),
}


@pytest.mark.processes
def test_every_hang_is_named_and_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str], faults: FaultCounts) -> None:
    """All at once, so that they wait together."""
    with ExitStack() as stack:
        groups = {}
        for name, (phase, action, _) in HANGS.items():
            group = WatchedProcesses(tmp_path / name, [Phase.BACKWARD, phase], [watched.wait, action], LIMIT_S)
            groups[name] = stack.enter_context(group)
        watched.begin(*groups.values())
        taken = {name: group.wait() for name, group in groups.items()}
        output = capfd.readouterr().err
        for name, (_, action, expected) in HANGS.items():
            failures = groups[name].failures
            assert LIMIT_S < taken[name] < LIMIT_S + TOLERANCE_S, name
            report = json.loads((failures / "hang-1/hang.json").read_text())
            assert report["message"].startswith(expected)
            assert "; rank 0 waits in reduce of 'blocks.7' (#7) since" in report["message"]
            key = {"start": "start_s", "blocked in a save": "save_s"}.get(name, "limit_s")
            assert report["message"].endswith(f"; the limit is 0.8 s (supervise.{key})")
            assert report["culprits"] == [1]
            assert f"dtrain: {report['message']}; stacks in {failures}/hang-1\n" in output
            assert all(code is not None and code < 0 for code in groups[name].exit_codes)
            assert 'watched.py", line' in (failures / "hang-1/rank-0.txt").read_text()
            stack_of_culprit = (failures / "hang-1/rank-1.txt").read_text()
            if "stop" in name:
                assert "is stopped by a signal" in stack_of_culprit
            elif name == "deaf":
                assert "or it handles SIGUSR2 itself" in stack_of_culprit
            else:
                assert f" in {action.__name__}\n" in stack_of_culprit
    faults.passed("F4", len(HANGS), named=len(HANGS), slowest_ms=round(1000 * max(taken.values())))


@pytest.mark.processes
def test_a_debugger_a_crash_and_work(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        groups = {}
        for name, actions, limit_s in (
            ("debugger", [watched.wait, watched.debug], LIMIT_S),
            ("crash", [watched.block, watched.die], 600.0),
            ("work", [watched.work, watched.work], 10.0),
        ):
            group = WatchedProcesses(tmp_path / name, [Phase.DATA] * 2, actions, limit_s)
            groups[name] = stack.enter_context(group)
        watched.begin(*groups.values())
        assert groups["crash"].wait() < TOLERANCE_S
        assert groups["work"].wait() < 10
        assert groups["work"].exit_codes == [0, 0]
        assert groups["crash"].exit_codes == [-9, -9]
        assert groups["debugger"].supervision.watcher.wait(10) == 0
        assert groups["debugger"].exit_codes in ([None, None], [None, 0])
    assert not (tmp_path / "work/failures").exists()
    output = capfd.readouterr().err
    assert output.count("\ndtrain: ") + output.startswith("dtrain: ") == 2
    assert "rank 1 is in 'data' of step 42 since 1 s" in output
    assert "a debugger runs there, so this run is no longer watched\n" in output
    process = groups["crash"].members[1].pid
    assert f"dtrain: rank 1 (process {process}) has ended; rank 0 is in 'data' of step 42 since" in output


def test_a_rank_that_ends_its_run_and_process_between_two_looks_has_not_crashed(monkeypatch: Any) -> None:
    """Without a descriptor of the process, as in old kernels."""
    progress = Progress()

    def has_ended() -> bool:
        progress.end()
        return True

    with ExitStack() as held:
        watching = Watcher(WatchJob((share_progress(0, progress, held),), 1, (60.0,) * 3))
        (rank,) = watching._ranks
        rank.process = None
        monkeypatch.setattr(rank, "has_ended", has_ended)
        assert watching.poll() is None
        assert rank.ended_at is not None
        assert not rank.state(rank.ended_at, is_late=False).has_crashed


@pytest.mark.processes
def test_a_rank_that_has_ended_before_is_not_watched(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor another process with its number."""
    with ExitStack() as held:
        member = share_progress(0, Progress(), held)
        stranger = Member(0, member.pid, "1", member.record, member.stacks)
        supervision = Supervision(Progress())
        supervision.start_watcher(WatchJob((stranger,), 1, (1.0,) * 3))
        assert supervision.watcher is not None
        assert supervision.watcher.wait(10) == 0
        supervision.end()
    assert capfd.readouterr().err == ""


@pytest.fixture
def clock() -> list[float]:
    return [1000.0]


@pytest.fixture
def progress() -> Progress:
    return Progress()


@pytest.fixture
def one_rank(clock: list[float], progress: Progress) -> Iterator[Watcher]:
    """A watcher in this process, of this process."""
    progress.end_step(41)
    with ExitStack() as held:
        member = share_progress(0, progress, held)
        yield Watcher(WatchJob.decode(WatchJob((member,), 1, (10.0, 100.0, 30.0)).encode()), lambda: clock[0])


def after(seconds: float, clock: list[float], of: Watcher) -> str:
    """The message of a hang, if the watcher finds one while it polls for some time."""
    end = clock[0] + seconds
    while clock[0] < end:
        clock[0] += POLL_S
        if (hang := of.poll()) is not None:
            return hang.message
    return ""


def test_the_clock_starts_again_with_every_change(clock: list[float], progress: Progress, one_rank: Watcher) -> None:
    changes: list[Callable[[], None]] = [
        lambda: progress.begin(Phase.FORWARD),
        lambda: progress.enter(5, "vote"),
        lambda: progress.leave(5),  # what follows a wait has its own time
    ]
    for _ in range(20):  # their median is short
        progress.begin(Phase.FORWARD)
        assert after(0.5, clock, one_rank) == ""
    for change in changes:
        assert after(9, clock, one_rank) == ""
        change()
    assert after(9, clock, one_rank) == ""
    message = "rank 0 is in 'forward' of step 42 since 10 s; the limit is 10 s (supervise.limit_s)"
    assert after(2, clock, one_rank) == message


def test_a_compilation_in_a_step_has_its_own_limit(clock: list[float], progress: Progress, one_rank: Watcher) -> None:
    progress.begin(Phase.FORWARD)
    progress.begin(Phase.COMPILE)
    assert after(99, clock, one_rank) == ""
    progress.begin(Phase.FORWARD)
    assert after(9, clock, one_rank) == ""
    assert after(2, clock, one_rank) != ""
    assert not one_rank.is_over()
    progress.end()
    assert after(1000, clock, one_rank) == ""
    assert one_rank.is_over()


def test_a_sleep_of_the_machine_is_no_hang(clock: list[float], one_rank: Watcher) -> None:
    assert after(9, clock, one_rank) == ""
    clock[0] += 3600
    assert one_rank.poll() is None
    assert after(9, clock, one_rank) == ""
    assert after(2, clock, one_rank) != ""


def test_without_a_run_directory_all_stacks_are_printed(one_rank: Watcher, capsys: Any, monkeypatch: Any) -> None:
    states = [running(0, Phase.START, 61), running(1, Phase.START, 61, state="T"), waiting(2, 61), ended(3, 61)]
    hang = find_hang(states, limits(), has_other_hosts=False)
    assert hang is not None
    stacks = {0: b"File a.py\n", 2: b"File b.py\n"}
    assert one_rank._write(hang, states, stacks) == "there is no run directory yet, so the stacks are above"
    printed = capsys.readouterr().err
    assert printed.startswith("stack of rank 0:\nFile a.py\nrank 1 (process 101) is stopped by a signal")
    assert printed.endswith("stack of rank 2:\nFile b.py\nrank 3 (process 103) has ended\n")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    assert one_rank._write(hang, states, stacks).endswith("and the stacks could not be printed")


def test_a_late_watcher_is_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "_CLOSING_S", 0.01)
    with ExitStack() as held:
        member = share_progress(0, Progress(), held)
    job = WatchJob((member,), 1, (1.0,) * 3).encode() + "\n"  # its files are closed, its process has not ended
    for lines, is_over in ((job, True), (f'{job}"/failures"\n', True), (job, False)):
        end, start = os.pipe()
        os.write(start, lines.encode())
        if is_over:
            os.close(start)
        with open(end, "rb", buffering=0) as orders:
            watcher.watch(orders)
        printed = capsys.readouterr().err
        if is_over:
            assert printed == ""
        else:
            assert printed.startswith("dtrain: this run is not watched: ")
            os.close(start)


@pytest.mark.processes
def test_the_watcher_imports_no_torch_and_nothing_installed_beside_dtrain(tmp_path: Path) -> None:
    (tmp_path / "dtrain").symlink_to(Path(supervised.__file__).parents[1])
    (tmp_path / "statistics.py").write_text("raise ImportError('a backport')")
    code = supervised._COMMAND.format(root=str(tmp_path)).replace("; main()", "; sys.exit('torch' in sys.modules)")
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=60)


def test_hangs_are_numbered(tmp_path: Path) -> None:
    hang = find_hang(CASES["a loader"][0], limits(), has_other_hosts=False)
    assert hang is not None
    for number in range(1, 12):
        report = HangReport(hang, CASES["a loader"][0], {3: b"stack"}, PhaseLimits(60, 600, 600))
        report.write(tmp_path / "failures")
        assert report.folder == tmp_path / f"failures/hang-{number}"
    assert find_hangs(tmp_path / "failures")[-1].name == "hang-11"
    assert find_hangs(tmp_path / "nothing") == []
    content = json.loads((tmp_path / "failures/hang-11/hang.json").read_text())
    assert content["ranks"][3] == {
        "rank": 3, "pid": 103, "phase": "data", "attempted_steps": 119, "since_s": 61.4, "limit_s": 60, "state": "S",
        "has_ended": False, "waits_for": None, "collective": 1840,
    }  # fmt: skip
    assert content["ranks"][0]["waits_for"] == "reduce(blocks.7, 8 x float32)"
    (tmp_path / "file").touch()
    report = HangReport(hang, [], {}, PhaseLimits(60, 600, 600))
    report.write(tmp_path / "file")
    assert (report.folder, report.problem) == (None, "File exists")


def test_off_in_a_debugger_and_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_start("self") == process_start(str(os.getpid()))
    assert process_start("999999999") is None
    assert unsupported_reason() == ""
    monkeypatch.setitem(sys.modules, "pydevd", sys)
    assert unsupported_reason() == "it runs in a debugger"
    kernel = SimpleNamespace(IPKernelApp=SimpleNamespace(initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "ipykernel.kernelapp", kernel)  # which imports a debugger, too
    assert unsupported_reason() == "it runs in a notebook"
    monkeypatch.delitem(sys.modules, "ipykernel.kernelapp")
    monkeypatch.delitem(sys.modules, "pydevd")
    monkeypatch.setattr(sys, "gettrace", lambda: print)
    assert unsupported_reason() == "it runs in a debugger"
    monkeypatch.undo()
    monkeypatch.setattr(supervised, "host_identity", lambda: None)
    assert unsupported_reason() == "this system has no /proc or no memfd_create"


def test_compilations_are_a_phase() -> None:
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    progress = Progress()
    progress.begin(Phase.BACKWARD, 3)
    before = len(callback_handler.start_callbacks), len(callback_handler.end_callbacks)
    with Supervision(progress).following_compilation():
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
            assert progress.phase == Phase.COMPILE
        assert progress.phase == Phase.BACKWARD
    assert (len(callback_handler.start_callbacks), len(callback_handler.end_callbacks)) == before


@pytest.mark.processes
def test_the_watcher_is_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for its launcher nor for those who look for ranks in the environment of processes."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("MY_OWN", "1")
    with WatchedProcesses(tmp_path, [Phase.DATA], [watched.block], 60.0) as group:
        watched.begin(group)
        assert group.supervision.watcher is not None
        pid = group.supervision.watcher.pid
        names = [word.partition("=")[0] for word in Path(f"/proc/{pid}/environ").read_text().split("\0")]
        assert "MY_OWN" in names
        assert not {"RANK", "SLURM_PROCID"} & {*names}
        assert os.getsid(pid) == pid


def is_watched(rank: int, world: int, num_hosts: int) -> bool:
    supervised.host_identity = lambda: [str(rank % num_hosts)]  # type: ignore[assignment]
    comm = make_communicator(dist.group.WORLD, torch.device("cpu"), shared_memory=False)
    with supervised.supervised(comm, (60.0,) * 3, enabled=rank == 0) as supervision:
        assert comm.exchange_text(str(rank)) == [str(rank) for rank in range(world)]
        return supervision.watcher is not None


@pytest.mark.processes
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_ranks_may_differ_in_whether_they_are_watched(num_hosts: int) -> None:
    assert run_ranks(2, is_watched, num_hosts, timeout=60) == [True, False]
