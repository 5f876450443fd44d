"""Files that want to run code, read elsewhere, or use up time and memory are refused, and none of it happens (F6)."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from dtrain.checkpoint import open_newest, verify
from dtrain.checkpoint.lease.lease import LeaseTiming, hold
from dtrain.errors import CheckpointError
from dtrain.tools.checkpoint.cli import main
from tests.faults.test_checkpoint_damage import CASES, NEWEST, assert_refused, instead, make_good, of_header, of_tensor
from tests.helpers.checkpoints import ALONE, assert_holds, make_tensors, save_good
from tests.helpers.damage import MANIFEST, R0, Damage, header, put, sealed, vouched
from tests.helpers.fault_counts import FEW_AND_MANY, FaultCounts
from tests.helpers.ranks import run_ranks

CPU_SECONDS, SECONDS, BYTES = 3.0, 60.0, 2 << 30  # wall time depends on the machine's load
HUGE = 10**4000  # Python parses at most 4,300 digits, and prints no more


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch exploded",)


PICKLE = pickle.dumps(Bomb())


def torch_archive() -> bytes:
    buffer = io.BytesIO()
    torch.save({"model": Bomb()}, buffer)
    return buffer.getvalue()


def file(name: str, data: bytes) -> Damage:
    """Creates or replaces a file."""
    return lambda path: (path / name).write_bytes(data)


def sparse(name: str, size: int, data: bytes = b"") -> Damage:
    """A sparse file of ``size`` bytes."""
    return both(file(name, data), lambda path: os.truncate(path / name, size))


def both(one: Damage, other: Damage) -> Damage:
    def apply(path: Path) -> None:
        one(path)
        other(path)

    return apply


def listed(name: str, data: bytes) -> Damage:
    """A data file with valid hashes in the manifest."""
    return both(file(name, data), vouched(name, lambda data: data))


def manifest_of(body: bytes) -> Damage:
    return sealed(lambda manifest: body)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def header_of(text: bytes, data: bytes = b"") -> Damage:
    return vouched(R0, lambda _: len(text).to_bytes(8, "little") + text + data)


def of_first_file(**values: Any) -> Damage:
    return sealed(lambda manifest: put(next(f for f in manifest["files"] if f["name"] == R0), **values))


REFUSED: dict[str, Damage] = {
    # code
    "pickle as manifest": file(MANIFEST, PICKLE),
    "pickle as manifest with its hash": manifest_of(PICKLE),
    "pickle as data with its hash": listed(R0, PICKLE),
    "pickle as a header": header_of(PICKLE),
    "torch archive as data": listed(R0, torch_archive()),
    "extra pickle": file("optimizer.pt", PICKLE),
    "extra module": file("__init__.py", b"import os; os.system('touch exploded')"),
    "yaml as manifest": manifest_of(b"!!python/object/apply:os.system ['touch exploded']"),
    # paths
    "path with NUL": of_first_file(name="r0000\0.safetensors"),
    "path with another dot": of_first_file(name="r0000\u2024safetensors"),
    "long path": of_first_file(name="a" * 100_000 + ".safetensors"),
    "link to a device": instead(lambda path: path.symlink_to("/dev/zero"), R0),
    "link to itself": instead(lambda path: path.symlink_to(path.name), R0),
    "fifo as manifest": instead(os.mkfifo, MANIFEST),
    "name that steers a terminal": file("\x1b[2J\x1b]0;x\x07", b""),
    # time and memory
    "sparse data": sparse(R0, 1 << 40),
    "sparse manifest": sparse(MANIFEST, 1 << 40),
    "sparse data that is listed": both(sparse(R0, 1 << 40), of_first_file(bytes=1 << 40)),
    "large header": header_of(b" " * 20_000_000),
    "header of the largest length": vouched(R0, lambda data: b"\xff" * 8 + data[8:]),
    "deep manifest": manifest_of(b'{"state":' + b"[" * 500_000),
    "wide manifest": sealed(lambda m: m["tensors"].extend([{}] * 100_000)),
    "number of many digits": manifest_of(b'{"step":' + b"9" * 1_000_000 + b"}"),
    "shape": of_tensor(shape=[HUGE, HUGE]),
    "shape of many": of_tensor(shape=[1 << 62] * 20_000),
    "header's shape of many": of_header(shape=[1 << 62] * 20_000),
    "header's offsets of many digits": of_header(data_offsets=[0, 10**4299 * 9]),
    "header's key": header(lambda fields: put(fields, **{"\x1b[2J\ud800" + "k" * 9999: fields.pop("exp_avg:weight")})),
    "time": sealed(lambda m: put(m, saved_at="\x1b[2J\ud800")),
    "dtype": of_tensor(dtype="__reduce__"),
}  # fmt: skip

IGNORED: dict[str, Damage] = {
    # beside the checkpoints: never read
    "pickle beside": lambda path: (path.parent / "latest").write_bytes(PICKLE),
    "module beside": lambda path: (path.parent / "sitecustomize.py").write_bytes(b"open('exploded', 'w')"),
    "other digits": lambda path: shutil.copytree(path, path.parent / ("step-" + "\u0660" * 5 + "300")),
    "unfinished": lambda path: (path.parent / "step-00000300.tmp-ab").mkdir(),
    # in the state, which is only passed on
    "deep state": sealed(lambda m: put(m, state={"a": nested(200)})),
    "state with a terminal": sealed(lambda m: put(m, state={"engine": "\x1b[2J\ud800", "metrics": {"val_loss": 1e9}})),
    "state of other types": sealed(lambda m: put(m, state={"metrics": [1], "engine": {}, "world_size": HUGE})),
}


def printed_by_commands(directory: Path, *, refused: bool) -> None:
    """``verify`` fails if a checkpoint is refused, ``list`` does not, and neither can steer a terminal."""
    found = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with redirect_stdout(found), redirect_stderr(found):
        assert [main([verb, str(directory)]) for verb in ("verify", "list")] == [int(refused), 0]
    found.seek(0)
    text = found.read()
    assert text.replace("\n", "").isprintable(), f"prints {text!r}"


def is_refused(directory: Path) -> None:
    printed_by_commands(directory, refused=True)
    assert_refused(directory)


def is_used(directory: Path) -> None:
    printed_by_commands(directory, refused=False)
    assert verify(directory / NEWEST).ok
    assert_holds(open_newest(directory, ALONE), make_tensors(200))


LEASE = "lease-00000001.json"


def lease(**values: Any) -> Damage:
    """A valid lease with some values replaced."""
    own = {"token": 1, "counter": 0, "id": "0" * 32, "host": "here", "pid": 1}
    fields = own | dict.fromkeys(("boot_id", "pid_start", "pid_namespace"))
    return file(LEASE, json.dumps({**fields, **values}).encode())


LEASES: dict[str, Damage] = {  # in a directory of checkpoints
    "lease: pickle": file(LEASE, PICKLE),
    "lease: nothing": file(LEASE, b""),
    "lease: sparse": sparse(LEASE, 1 << 40),
    "lease: fifo": instead(os.mkfifo, LEASE),
    "lease: directory": instead(Path.mkdir, LEASE),
    "lease: huge process": lease(pid=HUGE),
    "lease: process group": lease(pid=-1),
    "lease: huge counter": lease(counter=HUGE // 10**500),
    "lease: start": lease(pid_start="\x1b[2J" * 100),
    "lease: last": file("lease-99999999.json", b"x"),
    "lease: other digits": file("lease-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0667.json", b"x"),
    "lease: temporary": file("lease-00000001.tmp-abcdef01", PICKLE),
}


def can_be_saved_in(directory: Path) -> None:
    """A save beside the lease succeeds, or fails with one readable line or the name of a file."""
    failure: CheckpointError | OSError | None = None
    try:
        with hold(directory, LeaseTiming(limit_s=0)):
            save_good(directory, 300, 1)
    except (CheckpointError, OSError) as error:
        failure = error
    if failure is None:
        assert open_newest(directory, ALONE).step == 300
    elif isinstance(failure, OSError):
        assert failure.filename, f"no file named: {failure}"
    else:
        assert len(str(failure)) < 2000
        assert str(failure).isprintable()


_FORBIDDEN = (
    "pickle.", "marshal.", "exec", "compile", "import", "code.", "ctypes.", "socket.", "subprocess.", "os.system",
    "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.startfile", "os.kill", "pty.", "shutil.", "webbrowser.",
)  # fmt: skip
_AT_A_PATH = ("open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link")
_OF_A_PROCESS = re.compile(r"/proc/(self|\d+)/stat|/proc/sys/kernel/random/boot_id", re.ASCII)  # read for the lease
_watching: list[tuple[Path, list[str]]] = []  # the hook stays: audit hooks cannot be removed


def _hook(event: str, args: tuple[Any, ...]) -> None:
    """Records forbidden acts: code, processes, sockets, files outside the watched folder."""
    if not _watching:
        return
    folder, seen = _watching[-1]
    if event.startswith(_FORBIDDEN) and event != "socket.gethostname":
        seen.append(f"{event} {args!r:.200}")
    elif event in _AT_A_PATH and not _is_harmless(event, args, folder):
        seen.append(f"{event} {args[0]!r:.200}")


def _is_harmless(event: str, args: tuple[Any, ...], folder: Path) -> bool:
    if not isinstance(args[0], str | bytes | os.PathLike):
        return False
    path = os.fsdecode(args[0])
    if event == "open" and args[2] & os.O_DIRECTORY and folder.is_relative_to(path):
        return True  # a folder above is opened as such, which reads nothing (NFS looks again)
    # ".." counts; links do not, because they are not to be followed
    return Path(os.path.abspath(path)).is_relative_to(folder) or _OF_A_PROCESS.fullmatch(path) is not None


@contextmanager
def watched(folder: Path) -> Iterator[list[str]]:
    """Yields the list of forbidden acts in the block; files inside ``folder`` are allowed."""
    seen: list[str] = []
    _watching.append((folder, seen))
    try:
        yield seen
    finally:
        _watching.pop()


def out_of_time(*_: object) -> None:
    raise TimeoutError(f"it takes more than {CPU_SECONDS} s of CPU time or {SECONDS} s")


def watch_one(folder: Path, damage: Damage, check: Callable[[Path], None]) -> str:
    """Returns what one hostile file made this process do, or that it took too long."""
    directory = shutil.copytree(folder / "template", folder / "hostile" / "checkpoints")
    damage(directory)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    problem = ""
    try:
        with watched(directory.parent) as seen:
            check(directory)
    except BaseException as error:
        problem = f"{type(error).__name__}: {error!s:.300}"
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    shutil.rmtree(directory.parent)
    return "; ".join(filter(None, [problem, *seen]))


def try_all(rank: int, world: int, folder: Path, many: bool) -> dict[str, str]:
    """Tries each hostile file; returns name -> what was wrong."""
    os.chdir(folder)
    make_good(folder / "template")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, hard))
    sys.addaudithook(_hook)
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, out_of_time)

    def at_newest(damage: Damage) -> Damage:
        return lambda directory: damage(directory / NEWEST)

    for check in (is_refused, can_be_saved_in):  # so that all lazy imports are done
        watch_one(folder, at_newest(file(R0, b"")), check)
    more = {name: damage for name, (damage, *_) in CASES.items() if many and "link as" not in name}
    found = {name: watch_one(folder, at_newest(damage), is_refused) for name, damage in (REFUSED | more).items()}
    found |= {name: watch_one(folder, at_newest(damage), is_used) for name, damage in IGNORED.items()}
    found |= {name: watch_one(folder, damage, can_be_saved_in) for name, damage in LEASES.items()}
    return found


@FEW_AND_MANY
def test_hostile_files(tmp_path: Path, many: bool, faults: FaultCounts) -> None:
    (found,) = run_ranks(1, try_all, tmp_path, many, fresh=True)
    assert not any(found.values()), "\n".join(f"{name}: {what}" for name, what in found.items() if what)
    assert not list(tmp_path.rglob("exploded"))
    faults.passed("F6", len(found), ignored=len(IGNORED), leases=len(LEASES))


def test_audit_hook_detects_misbehavior(tmp_path: Path) -> None:
    """The control: the audit hook detects a reader that unpickles or leaves the directory."""
    assert run_ranks(1, misbehave, tmp_path, fresh=True) == [True]


def misbehave(rank: int, world: int, folder: Path) -> bool:
    os.chdir(folder)
    sys.addaudithook(_hook)
    (folder / "inside").mkdir()
    with watched(folder / "inside") as seen:
        pickle.loads(PICKLE)
        compile("1 + 1", "", "eval")
        (folder / "inside" / ".." / "elsewhere").touch()
        os.close(os.open(folder / "inside", os.O_RDONLY | os.O_DIRECTORY))  # these two read nothing
        os.close(os.open(str(folder), os.O_RDONLY | os.O_DIRECTORY))
        os.listdir("/")
    events = {event.split()[0] for event in seen}
    expected = {"pickle.find_class", "os.system", "compile", "open", "os.listdir"}
    return (folder / "exploded").exists() and expected <= events
