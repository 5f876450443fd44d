"""Where the time of the tests goes: by test, by folder, and by what the processes do.

``python -m tests.measure.suite_time OUT.json [PYTEST ARGUMENTS]`` runs pytest and writes the record; its table goes to
standard output. ``... suite_time read OUT.json`` prints it again. Each worker is looked at 20 times a second: it waits
if it took no processor time since the last look, or else its stack says what it does. All other processes count by
their processor time and their command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

FOLDER = "DTRAIN_TEST_TIMES"
"""Environment variable: the folder of the records of one run."""
_PERIOD = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")
# the first class that any frame of the stack belongs to, from the outside in
_CLASSES = {
    "imports": ("importlib._bootstrap",),
    "compilation": ("torch/_dynamo/convert_frame", "torch/_inductor", "torch/utils/cpp_extension", "triton/compiler"),
    "starts of processes": ("multiprocessing/popen", "multiprocessing/forkserver", "subprocess.py"),
    "training": ("dtrain/engine", "dtrain/sharding", "torch/autograd", "torch/nn/modules/module", "dtrain/train"),
}
_COMMANDS = {
    "ranks": ("forkserver", "multiprocessing"),
    "compilers": ("cc1plus", "c++", "/as ", "/ld ", "collect2", "ptxas"),
    "launchers": ("torch.distributed.run", "torchrun", "deepspeed", "slurm"),
    "commands": ("dtrain",),
}


# -- in a worker of pytest ---------------------------------------------------------------------------------------------


def _class_of(frame: FrameType | None) -> str:
    stack = []
    while frame is not None:
        stack.append(frame.f_code.co_filename)
        frame = frame.f_back
    for name, marks in _CLASSES.items():
        if any(mark in file for file in stack for mark in marks):
            return name
    return "other code of tests"


class _Sampler(threading.Thread):
    """Counts what the main thread does."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.counts: Counter[str] = Counter()
        self._main = threading.main_thread().ident
        self._clock = time.pthread_getcpuclockid(self._main or 0)
        self.ends = threading.Event()

    def run(self) -> None:
        used, began = time.clock_gettime(self._clock), time.monotonic()
        while not self.ends.wait(_PERIOD):
            name = _class_of(sys._current_frames().get(self._main or 0))
            now, moment = time.clock_gettime(self._clock), time.monotonic()
            busy = (now - used) / (moment - began)
            self.counts["waiting" if busy < 0.05 and name != "starts of processes" else name] += 1
            used, began = now, moment


class _Recorder:
    """The plugin: a line for each phase of a test, and the samples of this worker."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{os.getpid()}.jsonl").open("w")
        self._sampler = _Sampler()
        self._sampler.start()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write({"test": report.nodeid, "phase": report.when, "s": report.duration, "outcome": report.outcome})

    def pytest_sessionfinish(self) -> None:
        self._sampler.ends.set()
        self._write({"samples": dict(self._sampler.counts)})
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def pytest_configure(config: pytest.Config) -> None:
    """Records in the workers of pytest-xdist, or in the only process."""
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        config.pluginmanager.register(_Recorder(Path(os.environ[FOLDER])))


# -- around pytest -----------------------------------------------------------------------------------------------------


def _processes() -> Iterator[tuple[int, int, float, str]]:
    """Yields (pid, parent, processor seconds, command line) of all living processes."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it is gone
                continue
            yield int(entry.name), int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS, command


def _watch(root: int, ends: threading.Event) -> dict[int, tuple[float, str]]:
    """Returns processor seconds and command of every descendant of ``root`` that was seen, with a look every 0.1 s."""
    known: dict[int, tuple[float, str]] = {root: (0.0, "pytest")}
    while not ends.wait(0.1):
        for pid, parent, seconds, command in sorted(_processes()):
            if pid in known or parent in known:
                known[pid] = (seconds, command or known.get(pid, (0.0, ""))[1])  # one that has ended has no command
    return known


def _kind(command: str) -> str:
    if "import sys;exec(eval(" in command or "pytest" in command:  # the first is how execnet starts a worker
        return "pytest and its workers"
    return next((kind for kind, marks in _COMMANDS.items() if any(mark in command for mark in marks)), "other")


def product_ms() -> float:
    """The speed of this machine: milliseconds of an FP32 product of 1,024 x 1,024 matrices on one thread."""
    torch.set_num_threads(1)
    matrix = torch.rand(1024, 1024)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        matrix @ matrix
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times)[len(times) // 2]


def measure(arguments: list[str]) -> dict[str, Any]:
    """Runs pytest with ``arguments`` and returns the record."""
    speed = [product_ms()]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-p", "tests.measure.suite_time", *arguments]
        began = time.monotonic()
        process = subprocess.Popen(command, env={**os.environ, FOLDER: folder})
        ends = threading.Event()
        found: dict[int, tuple[float, str]] = {}
        watcher = threading.Thread(target=lambda: found.update(_watch(process.pid, ends)))
        watcher.start()
        code = process.wait()
        wall = time.monotonic() - began
        ends.set()
        watcher.join()
        lines = [json.loads(line) for file in Path(folder).glob("*.jsonl") for line in file.read_text().splitlines()]
    processes: Counter[str] = Counter()
    starts: Counter[str] = Counter()
    for seconds, name in found.values():
        processes[_kind(name)] += seconds  # type: ignore[assignment]
        starts[_kind(name)] += 1
    samples: Counter[str] = Counter()
    for line in lines:
        samples.update(line.get("samples", {}))
    speed.append(product_ms())
    return {
        "arguments": arguments,
        "exit_code": code,
        "wall_s": round(wall, 1),
        "cores": os.cpu_count(),
        "product_1024_ms": [round(value, 1) for value in speed],
        "processor_s": {kind: round(value, 1) for kind, value in processes.most_common()},
        "processes": dict(starts.most_common()),
        "workers_s": {name: round(count * _PERIOD, 1) for name, count in samples.most_common()},
        "tests": _by_test(lines),
    }


def _by_test(lines: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """Returns outcome and seconds of set-up, call and teardown of each test."""
    tests: dict[str, list[Any]] = defaultdict(lambda: ["passed", 0.0, 0.0, 0.0])
    for line in lines:
        if "test" in line:
            entry = tests[line["test"]]
            entry[1 + ("setup", "call", "teardown").index(line["phase"])] = round(line["s"], 3)
            if line["outcome"] != "passed":
                entry[0] = line["outcome"]
    return dict(tests)


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    tests = record["tests"]
    outcomes = Counter(entry[0] for entry in tests.values())
    folders: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name, (_, *phases) in tests.items():
        path = name.split("::")[0]
        parts = path.split("/")
        folders["/".join(parts[1:3] if parts[1] == "unit" else parts[1:2])] += sum(phases)
        files[path] += sum(phases)
    setup, call, teardown = (sum(entry[place] for entry in tests.values()) for place in (1, 2, 3))
    rows = [
        ("pytest " + " ".join(record["arguments"]), f"{record['wall_s']:.0f} s"),
        ("product of 1,024 x 1,024, before and after", " and ".join(f"{v:g} ms" for v in record["product_1024_ms"])),
        ("outcomes", ", ".join(f"{count:,} {name}" for name, count in outcomes.most_common())),
        ("set-up, call, teardown of tests", f"{setup:.0f}, {call:.0f}, {teardown:.0f} s"),
        *((f"workers: {name}", f"{seconds:.0f} s") for name, seconds in record["workers_s"].items()),
        *(
            (f"processor: {kind} ({record['processes'][kind]:,} processes)", f"{seconds:.0f} s")
            for kind, seconds in record["processor_s"].items()
        ),
        *((f"folder {name}", f"{seconds:.0f} s") for name, seconds in folders.most_common(16)),
        *((f"file {name}", f"{seconds:.0f} s") for name, seconds in files.most_common(16)),
    ]
    return "\n".join(["| What | Time |", "| --- | --- |", *(f"| {what} | {value} |" for what, value in rows)])


def main(arguments: list[str]) -> int:
    """See the head of this file."""
    if arguments[0] == "read":
        print(table(json.loads(Path(arguments[1]).read_text(encoding="utf-8"))))
        return 0
    record = measure(arguments[1:])
    Path(arguments[0]).write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(table(record))
    return int(record["exit_code"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
