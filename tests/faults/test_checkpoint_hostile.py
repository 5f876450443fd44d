"""Files that want to run code, read elsewhere, or use up time and memory are refused, and none of it happens (F6)."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import shutil
import signal
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.checkpoint import list_checkpoints, open_newest, verify
from dtrain.checkpoint.format.manifest import canonical_json
from dtrain.checkpoint.lease.lease import LeaseTiming, hold
from dtrain.errors import CheckpointError
from dtrain.tools.checkpoint.cli import main
from tests.helpers.audit import install, watched
from tests.helpers.checkpoints import ALONE, assert_holds, make_tensors, save_good
from tests.helpers.damage import MANIFEST, R0, R1, Damage, header, put, sealed, tensor, vouched
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.ranks import run_ranks

NEWEST = "step-00000200"
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


def zip_archive(name: str = "../../../exploded") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, "boo")
    return buffer.getvalue()


def file(name: str, data: bytes) -> Damage:
    """Creates or replaces a file."""
    return lambda path: (path / name).write_bytes(data)


def instead(name: str, make: Callable[[Path], Any]) -> Damage:
    """Replaces a file by something else."""

    def apply(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        make(path / name)

    return apply


def sparse(name: str, size: int, data: bytes = b"") -> Damage:
    """A sparse file of ``size`` bytes."""

    def make(path: Path) -> None:
        path.write_bytes(data)
        os.truncate(path, size)

    return instead(name, make)


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


def entry(**values: Any) -> Damage:
    return header(lambda fields: put(fields["master:weight"], **values))


REFUSED: dict[str, Damage] = {
    # code
    "pickle as manifest": file(MANIFEST, PICKLE),
    "pickle as manifest with its hash": manifest_of(PICKLE),
    "pickle as data": file(R0, PICKLE),
    "pickle as data with its hash": listed(R0, PICKLE),
    "pickle as a header": header_of(PICKLE),
    "torch archive as data": listed(R0, torch_archive()),
    "torch archive as manifest": manifest_of(torch_archive()),
    "old torch file as data": listed(R0, b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03." + PICKLE),
    "zip as data": listed(R0, zip_archive()),
    "zip as manifest": manifest_of(zip_archive()),
    "zip behind the data": vouched(R1, lambda data: data + zip_archive()),
    "numpy objects as data": listed(R0, b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'shape': (1,)}" + PICKLE),
    "extra pickle": file("optimizer.pt", PICKLE),
    "extra model": file("pytorch_model.bin", torch_archive()),
    "extra shard": file("r0002.safetensors", PICKLE),
    "extra module": file("__init__.py", b"import os; os.system('touch exploded')"),
    "extra path file": file("x.pth", b"import os; os.system('touch exploded')"),
    "extra latest": file("latest", b"../../../../etc"),
    "extra manifest": file("manifest.json.bak", PICKLE),
    "yaml as manifest": manifest_of(b"!!python/object/apply:os.system ['touch exploded']"),
    "python as manifest": manifest_of(b"__import__('os').system('touch exploded')"),
    "text pickle as manifest": manifest_of(b"cos\nsystem\n(S'touch exploded'\ntR."),
    "text pickle as data": listed(R0, b"cos\nsystem\n(S'touch exploded'\ntR."),
    "script as manifest": manifest_of(b"#!/bin/sh\ntouch exploded\n"),
    "entities as manifest": manifest_of(b'<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><x>&a;</x>'),
    "extra script": file("run.sh", b"#!/bin/sh\ntouch exploded\n"),
    "extra start-up module": file("sitecustomize.py", b"import os; os.system('touch exploded')"),
    # paths
    "path upwards": sealed(lambda m: put(m["files"][0], name="../step-00000100/r0000.safetensors")),
    "absolute path": sealed(lambda m: put(m["files"][0], name="/etc/passwd")),
    "path with NUL": sealed(lambda m: put(m["files"][0], name="r0000\0.safetensors")),
    "path with a line end": sealed(lambda m: put(m["files"][0], name=R0 + "\n")),
    "path with other digits": sealed(lambda m: put(m["files"][0], name="r\u0660\u0660\u0660\u0660.safetensors")),
    "path with another dot": sealed(lambda m: put(m["files"][0], name="r0000\u2024safetensors")),
    "path turned around": sealed(lambda m: put(m["files"][0], name="\u202er0000.safetensors")),
    "path of a surrogate": sealed(lambda m: put(m["files"][0], name="\ud800.safetensors")),
    "long path": sealed(lambda m: put(m["files"][0], name="a" * 100_000 + ".safetensors")),
    "manifest as data": sealed(lambda m: put(m["files"][0], name=MANIFEST)),
    "chunk upwards": sealed(lambda m: put(tensor(m)["chunks"][0], file="../../" + R0)),
    "link to a device": instead(R0, lambda path: path.symlink_to("/dev/zero")),
    "link upwards": instead(MANIFEST, lambda path: path.symlink_to("../../../../etc/passwd")),
    "link to itself": instead(R0, lambda path: path.symlink_to(path.name)),
    "fifo": instead(R0, os.mkfifo),
    "fifo as manifest": instead(MANIFEST, os.mkfifo),
    "directory as manifest": instead(MANIFEST, Path.mkdir),
    "name that steers a terminal": file("\x1b[2J\x1b]0;x\x07", b""),
    "name of no text": lambda path: Path(os.fsdecode(os.fsencode(path) + b"/\xff\xfe")).touch(),
    # time and memory
    "sparse data": sparse(R0, 1 << 40),
    "sparse manifest": sparse(MANIFEST, 1 << 40),
    "sparse data that is listed": both(
        sparse(R0, 1 << 40), sealed(lambda m: put(next(f for f in m["files"] if f["name"] == R0), bytes=1 << 40))
    ),
    "sparse header": both(
        sparse(R0, 1 << 40, (1 << 39).to_bytes(8, "little")),
        sealed(lambda m: put(next(f for f in m["files"] if f["name"] == R0), bytes=1 << 40)),
    ),
    "large header": header_of(b" " * 20_000_000),
    "header of the largest length": vouched(R0, lambda data: b"\xff" * 8 + data[8:]),
    "deep manifest": manifest_of(b'{"state":' + b"[" * 500_000),
    "deep header": header_of(b"[" * 500_000),
    "wide header": header_of(canonical_json({f"k{i}": {} for i in range(20_000)})),
    "wide manifest": sealed(lambda m: m["tensors"].extend([{}] * 100_000)),
    "number of many digits": manifest_of(b'{"step":' + b"9" * 1_000_000 + b"}"),
    "step": sealed(lambda m: put(m, step=HUGE)),
    "size": sealed(lambda m: put(m["files"][0], bytes=HUGE)),
    "shape": sealed(lambda m: put(tensor(m), shape=[HUGE, HUGE])),
    "shape of many": sealed(lambda m: put(tensor(m), shape=[1 << 62] * 20_000)),
    "shape of nothing": sealed(lambda m: put(tensor(m), shape=[0, HUGE])),
    "chunk": sealed(lambda m: put(tensor(m)["chunks"][-1], stop=HUGE)),
    "infinite number": manifest_of(b'{"step":1e400}'),
    "header's shape": entry(shape=[HUGE, HUGE]),
    "header's shape of many": entry(shape=[1 << 62] * 20_000),
    "header's offsets": entry(data_offsets=[HUGE, 10 * HUGE]),
    "header's offsets of many digits": entry(data_offsets=[0, 10**4299 * 9]),
    "header's key": header(lambda fields: put(fields, **{"\x1b[2J\ud800" + "k" * 9999: fields.pop("exp_avg:weight")})),
    "time": sealed(lambda m: put(m, saved_at="\x1b[2J\ud800")),
    "dtype": sealed(lambda m: put(tensor(m), dtype="__reduce__")),
    "fingerprint": sealed(lambda m: put(tensor(m), fingerprint="\u0660" * 16)),
    "kind": sealed(lambda m: put(tensor(m), kind="../../x\ud800")),
}  # fmt: skip

IGNORED: dict[str, Damage] = {
    # beside the checkpoints: never read
    "pickle beside": lambda path: (path.parent / "latest").write_bytes(PICKLE),
    "module beside": lambda path: (path.parent / "sitecustomize.py").write_bytes(b"open('exploded', 'w')"),
    "other digits": lambda path: shutil.copytree(path, path.parent / ("step-" + "\u0660" * 5 + "300")),
    "unfinished": lambda path: (path.parent / "step-00000300.tmp-ab").mkdir(),
    "long number": lambda path: (path.parent / f"step-{'9' * 200}x").mkdir(),
    # in the state, which is only passed on
    "deep state": sealed(lambda m: put(m, state={"a": nested(200)})),
    "state with a terminal": sealed(lambda m: put(m, state={"engine": "\x1b[2J\ud800", "metrics": {"val_loss": 1e9}})),
    "state of other types": sealed(lambda m: put(m, state={"metrics": [1], "engine": {}, "world_size": HUGE})),
}


def outcome(path: Path, *, refused: bool) -> str:
    """Lists, verifies and opens a checkpoint; returns what was wrong."""
    found = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with redirect_stdout(found), redirect_stderr(found):
        codes = [main([verb, str(path.parent)]) for verb in ("verify", "list")]
    found.seek(0)
    text = found.read()
    problems = []
    if codes != [int(refused), 0]:
        problems.append(f"exit codes {codes}")
    if any(not char.isprintable() for char in text.replace("\n", "")):
        problems.append(f"prints {text!r}")
    if verify(path).ok == refused or (not refused and not list_checkpoints(path)[0].ok):
        problems.append("verified" if refused else str(verify(path).checkpoints[0].problem))
    if refused:
        with pytest.raises(CheckpointError) as error:
            open_newest(path, ALONE)
        if len(str(error.value)) > 2000:
            problems.append(f"message too long: {len(str(error.value))} characters")
    reader = open_newest(path.parent, ALONE)
    assert_holds(reader, make_tensors(100 if refused else 200))
    return "; ".join(problems)


LEASE = "lease-00000001.json"


def lease(**values: Any) -> Damage:
    """A valid lease with some values replaced."""
    fields = {
        "token": 1,
        "counter": 0,
        "id": "0" * 32,
        "host": "here",
        "boot_id": None,
        "pid": 1,
        "pid_start": None,
        "pid_namespace": None,
    }
    return file(LEASE, json.dumps({**fields, **values}).encode())


LEASES: dict[str, Damage] = {  # in a directory of checkpoints
    "lease: pickle": file(LEASE, PICKLE),
    "lease: nothing": file(LEASE, b""),
    "lease: list": file(LEASE, b"[]"),
    "lease: deep": file(LEASE, b"[" * 4000),
    "lease: long": file(LEASE, b" " * 10_000_000),
    "lease: sparse": sparse(LEASE, 1 << 40),
    "lease: fifo": instead(LEASE, os.mkfifo),
    "lease: device": instead(LEASE, lambda path: path.symlink_to("/dev/zero")),
    "lease: link": instead(LEASE, lambda path: path.symlink_to("/etc/passwd")),
    "lease: directory": instead(LEASE, Path.mkdir),
    "lease: huge process": lease(pid=HUGE),
    "lease: process group": lease(pid=-1),
    "lease: path as process": lease(pid="../../self"),
    "lease: huge counter": lease(counter=HUGE // 10**500),
    "lease: host": lease(host="\x1b[2J\ud800"),
    "lease: boot": lease(boot_id={"a": [1]}),
    "lease: start": lease(pid_start="\x1b[2J" * 100),
    "lease: last": file("lease-99999999.json", b"x"),
    "lease: other digits": file("lease-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0667.json", b"x"),
    "lease: temporary": file("lease-00000001.tmp-abcdef01", PICKLE),
}


def save_where(directory: Path) -> str:
    """Saves in a directory with a hostile lease; returns what was wrong."""
    try:
        with hold(directory, LeaseTiming(limit_s=0)):
            save_good(directory, 300, 1)
    except CheckpointError as error:
        return "" if len(str(error)) < 2000 and str(error).isprintable() else f"message {error!s:.300}"
    except OSError as error:
        return "" if error.filename else f"no file named: {error}"
    return "" if open_newest(directory, ALONE).step == 300 else "it is not saved"


def out_of_time(*_: object) -> None:
    raise TimeoutError(f"it takes more than {CPU_SECONDS} s of CPU time or {SECONDS} s")


def watch_one(folder: Path, template: Path, damage: Damage, check: Callable[[Path], str]) -> str:
    """Returns what one hostile file made this process do, or that it took too long."""
    directory = folder / "hostile" / "checkpoints"
    shutil.copytree(template, directory)
    damage(directory)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with watched(directory.parent) as seen:
            problem = check(directory)
    except BaseException as error:
        problem = f"{type(error).__name__}: {error!s:.300}"
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    shutil.rmtree(directory.parent)
    return "; ".join(filter(None, [problem, *seen]))


def try_all(rank: int, world: int, folder: Path) -> dict[str, str]:
    """Tries each hostile file; returns name -> what was wrong."""
    os.chdir(folder)
    template = folder / "template"
    for step in (100, 200):
        save_good(template, step)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, hard))
    install()
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, out_of_time)

    def at_newest(damage: Damage) -> Damage:
        return lambda directory: damage(directory / NEWEST)

    def refused(directory: Path) -> str:
        return outcome(directory / NEWEST, refused=True)

    def ignored(directory: Path) -> str:
        return outcome(directory / NEWEST, refused=False)

    for check in (refused, save_where):  # so that all lazy imports are done
        watch_one(folder, template, at_newest(file(R0, b"")), check)
    found = {name: watch_one(folder, template, at_newest(damage), refused) for name, damage in REFUSED.items()}
    found |= {name: watch_one(folder, template, at_newest(damage), ignored) for name, damage in IGNORED.items()}
    found |= {name: watch_one(folder, template, damage, save_where) for name, damage in LEASES.items()}
    return {name: what for name, what in found.items() if what}


def test_hostile_files(tmp_path: Path, faults: FaultCounts) -> None:
    (wrong,) = run_ranks(1, try_all, tmp_path)
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
    assert not list(tmp_path.rglob("exploded"))
    count = len(REFUSED) + len(IGNORED) + len(LEASES)
    faults.passed("F6", count, refused=len(REFUSED), ignored=len(IGNORED), leases=len(LEASES))


def test_audit_hook_detects_misbehavior(tmp_path: Path) -> None:
    """The control: the audit hook detects a reader that unpickles or leaves the directory."""
    assert run_ranks(1, misbehave, tmp_path) == [True]


def misbehave(rank: int, world: int, folder: Path) -> bool:
    os.chdir(folder)
    install()
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
