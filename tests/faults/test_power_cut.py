"""After a power cut at any instant of a save or load, a run resumes from the disk (F15).

The changes to the file system are recorded. The model in ``tests.helpers.power_cut`` derives the disk states that a cut
may leave; a sample of them is written out, verified, loaded and saved to.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import open_newest, storage, verify
from dtrain.checkpoint.directory import NoCheckpointError, committed_checkpoints, step_name
from dtrain.checkpoint.lease.lease import LeaseTiming, hold
from dtrain.checkpoint.retention import Retention
from dtrain.cli.resolve import compose
from dtrain.errors import CheckpointError
from dtrain.train.run_dir import open_run_dir
from tests.helpers.checkpoints import ALONE, assert_holds, make_tensors, save_good, save_threads
from tests.helpers.damage import R0, flip
from tests.helpers.fault_counts import FEW_AND_MANY, FaultCounts
from tests.helpers.power_cut import FUNCTIONS, Call, Disk, Recorder, State, cuts, write_state

RUN = "run/checkpoints"


class Killed(BaseException):
    """Simulates SIGKILL: no handler catches it."""


@dataclass(frozen=True)
class Scenario:
    """The state before, and the recorded work; both get the directory of checkpoints."""

    prepare: Callable[[Path], None]
    work: Callable[[Path, Recorder], None]
    newest: int = 200  # newest good step before; -1: none
    damaged: str = ""  # name of the damaged directory before, if any


def next_save(directory: Path, step: int) -> None:
    """A save by a job that starts after another one was killed."""
    with hold(directory, LeaseTiming(limit_s=0)):
        save_good(directory, step, 1)


def two_good(directory: Path) -> None:
    for step in (100, 200):
        save_good(directory, step, 1)


def with_leftovers(directory: Path) -> None:
    two_good(directory)
    leftover = directory / "step-00000250.tmp-ab12cd34"
    (leftover / "nested").mkdir(parents=True)
    (leftover / "r0000.safetensors").write_bytes(b"half")
    (leftover / "nested" / "file").write_bytes(b"")


def with_damage(directory: Path, step: int = 200) -> None:
    for good in (100, 200, step):
        if not (directory / f"step-{good:08d}").exists():
            save_good(directory, good, 1)
    flip(R0, 1)(directory / f"step-{step:08d}")


def saves(*steps: int, world: int = 1, keep_last: int = 2) -> Callable[[Path, Recorder], None]:
    def work(directory: Path, recorder: Recorder) -> None:
        for step in steps:
            save_good(directory, step, world, retention=Retention(keep_last))
            recorder.returned(step)

    return work


def loads_and_saves(directory: Path, recorder: Recorder) -> None:
    assert open_newest(directory, ALONE).step == 100
    saves(200)(directory, recorder)


def interrupted(
    folder: Callable[[Path], Path], number: int, failure: BaseException, then: int, *, returned: int = -1
) -> Callable[[Path, Recorder], None]:
    """A save of step 300 whose fsync of a folder fails, the ``number``-th one, then a save of step ``then``.

    After ``Killed`` the other one is by the next job. A step that had ``returned`` was durable and logged.
    """

    def work(directory: Path, recorder: Recorder) -> None:
        killed, count = isinstance(failure, Killed), 0
        with pytest.MonkeyPatch.context() as patch:

            def wrap(name: str, real: Callable[..., object]) -> Callable[..., object]:
                def call(*args: Path) -> object:
                    nonlocal count
                    count += name == "sync_directory" and args[0] == folder(directory)
                    if count == number or (count > number and killed):
                        count += not killed
                        raise failure
                    return real(*args)

                return call

            for function in FUNCTIONS:
                patch.setattr(storage, function, wrap(function, getattr(storage, function)))
            with pytest.raises(Killed) if killed else nullcontext():
                results = save_threads(directory, 300, 1)
                assert isinstance(results[0], CheckpointError)
        if returned > 0:
            recorder.returned(returned)
        next_save(directory, then)
        recorder.returned(then)

    return work


def saves_in_a_run_directory(directory: Path, recorder: Recorder) -> None:
    """``dtrain train`` creates the run directory."""
    with ExitStack() as held:
        run_dir = open_run_dir(compose([f"run_dir={directory.parent}"]), ALONE, None, held)
        save_good(run_dir.checkpoints, 300, 1)
    recorder.returned(300)


IO_ERROR = OSError(errno.EIO, os.strerror(errno.EIO))
SCENARIOS = {
    "first save of a run": Scenario(lambda directory: None, saves(300, world=2), newest=-1),
    "first save of dtrain train": Scenario(lambda directory: None, saves_in_a_run_directory, newest=-1),
    # before the directory's name is durable; the next job finds the directory
    "killed in a new directory": Scenario(
        lambda directory: None, interrupted(lambda d: d.parents[1], 1, Killed(), 300), newest=-1
    ),
    "deletes": Scenario(two_good, saves(300, world=2)),
    "cleans up": Scenario(with_leftovers, saves(300)),
    "two in a row": Scenario(two_good, saves(300, 400, keep_last=1)),
    "quarantine at a load": Scenario(with_damage, loads_and_saves, newest=100, damaged="step-00000200"),
    "replaces a damaged one": Scenario(lambda d: with_damage(d, 300), saves(300), damaged="step-00000300"),
    # after the old checkpoint was renamed, before that is durable; the next save cleans up
    "killed while deleting": Scenario(two_good, interrupted(lambda d: d, 2, Killed(), 400, returned=300)),
    "killed before it is durable": Scenario(two_good, interrupted(lambda d: d, 1, Killed(), 400)),
    # the save reverts its rename
    "fails to make it durable": Scenario(two_good, interrupted(lambda d: d, 1, IO_ERROR, 300)),
}


@dataclass(frozen=True)
class Recording:
    """A recorded scenario: the tree before it, in ``start``, and the calls."""

    scenario: Scenario
    start: Path
    calls: Sequence[Call]


def record(scenario: Scenario, folder: Path) -> Recording:
    work, start = folder / "work", folder / "start"
    work.mkdir(parents=True)
    scenario.prepare(work / RUN)
    shutil.copytree(work, start)
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(work, patch)
        scenario.work(work / RUN, recorder)
    return Recording(scenario, start, recorder.calls)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recording]:
    folder = tmp_path_factory.mktemp("recordings")
    return {name: record(scenario, folder / name.replace(" ", "-")) for name, scenario in SCENARIOS.items()}


# -- the check ---------------------------------------------------------------------------------------------------------


def tree(directory: Path) -> State:
    """Returns the files of a directory and their bytes."""
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def assert_run_resumes(root: Path, recording: Recording, returned: int) -> None:
    """Visible checkpoints verify, none that was saved is lost, and a run loads the newest and saves again."""
    directory, scenario = root / RUN, recording.scenario
    damaged = tree(recording.start / RUN / scenario.damaged) if scenario.damaged else None
    good = []
    for path in committed_checkpoints(directory):
        if damaged is not None and tree(path) == damaged:
            continue  # damaged before the cut
        problem = verify(path).checkpoints[0].problem
        assert problem is None, f"{path.name} is visible: {problem}"
        good.append(int(path.name.removeprefix("step-")))
    newest = max(scenario.newest, returned)
    assert max(good, default=-1) >= newest, f"step {newest} was saved, and the newest is {good}"
    if good:
        reader = open_newest(directory, ALONE)
        assert reader.step == good[-1]
        assert_holds(reader, make_tensors(reader.step))
    else:
        with pytest.raises(CheckpointError if damaged is not None else NoCheckpointError):
            open_newest(directory, ALONE)
    next_save(directory, 900)
    names = [path.name for path in directory.iterdir()]
    assert not [name for name in names if ".tmp-" in name], names
    assert verify(directory).ok
    if damaged is not None:
        assert damaged in [tree(path) for path in directory.iterdir()], "the damaged checkpoint is gone"


@dataclass(frozen=True)
class Cut:
    """One state of the disk after a power cut."""

    recording: Recording
    num_calls: int
    returned: int
    state: State

    @property
    def key(self) -> int:
        """Equal if everything that the check depends on is equal."""
        return hash((id(self.recording), self.returned, *self.state.items()))


def check_cut(cut: Cut) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        write_state(cut.state, Path(folder) / "disk")
        assert_run_resumes(Path(folder) / "disk", cut.recording, cut.returned)


def plain_cuts(recording: Recording, calls: Sequence[Call] | None = None) -> Iterator[Cut]:
    """Yields the plain states after each call, without duplicates."""
    seen = set()
    for num_calls, returned, disk in cuts(recording.start, recording.calls if calls is None else calls):
        for state in disk.plain_states():
            cut = Cut(recording, num_calls, returned, state)
            if cut.key not in seen:
                seen.add(cut.key)
                yield cut


def random_cuts(recording: Recording, count: int, rng: random.Random) -> Iterator[Cut]:
    """Yields ``count`` random states after random calls."""
    instants = sorted(rng.choices(range(len(recording.calls) + 1), k=count))
    for num_calls, returned, disk in cuts(recording.start, recording.calls):
        for _ in range(instants.count(num_calls)):
            yield Cut(recording, num_calls, returned, disk.random_state(rng))


SEED = 15


def sample_of_cuts(recordings: Sequence[Recording], count: int) -> list[Cut]:
    """Returns distinct states: up to half of them plain, the rest random, evenly from all recordings."""
    rng = random.Random(SEED)
    plain = [cut for recording in recordings for cut in plain_cuts(recording)]
    chosen = {cut.key: cut for cut in rng.sample(plain, min(len(plain), count // 2))}
    while len(chosen) < count:
        each = -(-(count - len(chosen)) // len(recordings))
        more = [cut for recording in recordings for cut in random_cuts(recording, each, rng)]
        chosen |= {cut.key: cut for cut in more[: count - len(chosen)]}
    return list(chosen.values())


def check_sample(recordings: dict[str, Recording], count: int) -> None:
    """Checks ``count`` states; fails with the calls that led to a bad one."""
    for cut in sample_of_cuts(list(recordings.values()), count):
        try:
            check_cut(cut)
        except Exception as error:
            calls = "\n".join(map(str, cut.recording.calls[: cut.num_calls]))
            found = {path: "directory" if data is None else len(data) for path, data in cut.state.items()}
            name = next(name for name, recording in recordings.items() if recording is cut.recording)
            pytest.fail(f"{name}: {error}\nafter the calls\n{calls}\nthe disk holds\n{found}")


@pytest.mark.timeout(1200)  # for all of them on a busy machine
@FEW_AND_MANY
def test_every_state_after_a_power_cut(recordings: dict[str, Recording], many: bool, faults: FaultCounts) -> None:
    count = faults.count(ci=2000, full=2000) if many else 110
    check_sample(recordings, count)
    faults.passed("F15", count, seed=SEED)


# -- mutations of the recording ---------------------------------------------------------------------------------------


def find_bad_state(recording: Recording, calls: Sequence[Call]) -> str | None:
    """Returns the problem of the first state that the check rejects for these calls, or None."""
    sound = {cut.key for cut in plain_cuts(recording)}
    for cut in plain_cuts(recording, calls):
        if cut.key not in sound:
            try:
                check_cut(cut)
            except AssertionError as error:
                return str(error)
    return None


DEPENDENT_CALLS = ("remove_file", "remove_directory", "returned")


def needed_syncs(recording: Recording) -> Iterator[int]:
    """Yields the fsyncs that protect data: not those of a lease, nor those repeated before anything depends on them."""
    calls = recording.calls
    for index, _, disk in cuts(recording.start, calls):
        if index < len(calls) and calls[index].name in ("sync", "sync_directory"):
            before = itertools.takewhile(lambda call: call.name not in DEPENDENT_CALLS, calls[index + 1 :])
            is_of_lease = "lease-" in calls[index].paths[0]
            if not is_of_lease and calls[index] not in before and disk.would_change(calls[index]):
                yield index


PROTECTED = ["first save of a run", "deletes", "quarantine at a load"]
OTHERS = ["first save of dtrain train", "killed in a new directory", "replaces a damaged one"]
OTHERS += ["killed while deleting", "fails to make it durable"]


@pytest.mark.parametrize("name", [*PROTECTED, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)])
def test_no_fsync_can_be_dropped(recordings: dict[str, Recording], name: str) -> None:
    """Without any one of them, the check finds a state in which something is lost or damaged."""
    recording = recordings[name]
    needed = []
    for index in needed_syncs(recording):
        problem = find_bad_state(recording, [*recording.calls[:index], *recording.calls[index + 1 :]])
        call = recording.calls[index]
        assert problem is not None, f"dropping call {index}, {call}, was not detected"
        needed.append(re.sub(r"\.tmp-\w+", ".tmp", Path(call.paths[0]).name))
    assert needed
    if name == "first save of a run":
        assert needed[:2] == ["", "run"]  # the names of the new directories
        assert sorted(needed[2:4]) == ["r0000.safetensors", "r0001.safetensors"]
        assert needed[4:] == ["manifest.json", "step-00000300.tmp", "checkpoints"]


class StorageWithoutRename:
    """The ``storage`` module, whose ``rename`` does nothing."""

    def __getattr__(self, name: str) -> Any:
        return nothing if name == "rename" else getattr(storage, name)


def nothing(*args: Any) -> None: ...


def final_path(directory: Path, step: int) -> Path:
    return directory / step_name(step)


NO_RENAME = {"commit.storage": StorageWithoutRename()}
WITHOUT = {  # what is left out: replaced names of dtrain.checkpoint, and a scenario in which it is missed
    "the commit's rename": (NO_RENAME, "first save of a run"),
    "the temporary name": ({**NO_RENAME, "commit.temporary_path": final_path}, "first save of a run"),
    "the rename before a deletion": ({"directory.storage": StorageWithoutRename()}, "deletes"),
    "the clean-up": ({"commit.clean_up": nothing, "lease.lease.clean_up": nothing}, "cleans up"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_no_rename_or_removal_can_be_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    replaced, scenario = WITHOUT[name]
    for target, value in replaced.items():
        monkeypatch.setattr(f"dtrain.checkpoint.{target}", value)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_sample({scenario: record(SCENARIOS[scenario], tmp_path)}, 300)


def test_every_storage_function_is_in_the_model() -> None:
    assert len(FUNCTIONS) >= 11
    assert not [name for name in FUNCTIONS if not hasattr(Disk, f"_{name}")]
