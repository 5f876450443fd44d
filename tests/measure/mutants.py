"""Plants faults in a copy of dtrain, one at a time, and runs the tests that cover the line until one fails.

``python -m tests.measure.mutants map FOLDER`` runs the default tests under coverage (of the extra ``dev``). It
prints the branch coverage, and keeps which test file runs which line. ``... run FOLDER OUT.jsonl [SEED] [COUNT]`` draws
faults and writes a line for each: which test found it, or that it survived. It may be interrupted: a fault that
OUT.jsonl has is not tried again. ``... show OUT.jsonl`` prints the survivors.
"""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = (
    "sharding",
    "engine",
    "distributed",
    "checkpoint",
    "precision",
    "optim",
    "parameters",
    "data",
    "train",
    "supervision",
)
_OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_SWAPPED = {
    "reduce_scatter_sum": "all_to_all",
    "all_gather": "reduce_scatter_sum",
    "all_reduce_max": "broadcast",
    "unshard": "reshard",
    "reshard": "unshard",
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "maximum": "minimum",
    "minimum": "maximum",
    "float32": "bfloat16",
    "bfloat16": "float32",
    "float64": "float32",
    "int64": "int32",
}
_WAITS = {"wait", "synchronize", "wait_stream", "wait_event", "record_stream", "barrier", "flush", "join", "fsync"}
_HASHES = {"update", "digest", "hexdigest", "fingerprint", "sha256"}


@dataclass(frozen=True)
class Mutant:
    """A replacement of a piece of one file."""

    file: str
    line: int
    kind: str
    start: int
    stop: int
    old: str
    new: str

    @property
    def room(self) -> str:
        return self.file.split("/")[1]

    def apply(self, root: Path) -> str:
        """Changes the file under ``root``; returns what it held."""
        path = root / self.file
        text = path.read_bytes()
        assert text[self.start : self.stop].decode() == self.old
        path.write_bytes(text[: self.start] + self.new.encode() + text[self.stop :])
        return text.decode()


# -- drawing -----------------------------------------------------------------------------------------------------------


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Yields (kind, the node that is replaced, its new text)."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = _name(node.value.func)
        yield "wait" if name in _WAITS else "hash" if name in _HASHES else "drop", node, "pass"
    elif (
        isinstance(node, ast.AugAssign)
        or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript))
        or isinstance(node, ast.Raise)
    ):
        yield "drop", node, "pass"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield "compare", node, ast.unparse(ast.Compare(node.left, [_OPPOSITES[type(node.ops[0])]()], node.comparators))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "condition", node, ast.unparse(ast.BoolOp(other, node.values))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "condition", node, ast.unparse(node.operand)
    elif (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add | ast.Sub)
        and not isinstance(node.left, ast.Constant)
    ):
        yield "bound", node, ast.unparse(node.left)
    elif isinstance(node, ast.Constant) and type(node.value) is int and node.value in (0, 1, 2):
        yield "bound", node, str(node.value + 1)
    elif isinstance(node, ast.Attribute) and node.attr in _SWAPPED:
        kind = "dtype" if "float" in node.attr or "int" in node.attr else "swap"
        yield kind, node, ast.unparse(ast.Attribute(node.value, _SWAPPED[node.attr]))
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in ("min", "max", "any", "all"):
        yield "swap", node, _SWAPPED[node.id]


def _is_text(node: ast.AST) -> bool:
    """Whether a fault in the node changes only a message, a type or a constant of the module."""
    return isinstance(node, ast.JoinedStr | ast.Raise | ast.arguments | ast.AnnAssign | ast.ImportFrom | ast.Assert)


def _within_functions(tree: ast.Module) -> Iterator[ast.AST]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            todo: list[ast.AST] = list(function.body)
            while todo:
                node = todo.pop()
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    continue  # it comes by itself
                yield node
                if not _is_text(node):
                    todo += ast.iter_child_nodes(node)


def mutants_of(file: str) -> list[Mutant]:
    """All faults that can be planted in a file of the repository."""
    text = (ROOT / file).read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in _within_functions(ast.parse(text)):
        for kind, replaced, new in _replacements(node):
            assert isinstance(replaced, ast.expr | ast.stmt)
            start = starts[replaced.lineno - 1] + replaced.col_offset
            stop = starts[(replaced.end_lineno or 0) - 1] + (replaced.end_col_offset or 0)
            new = new if kind in ("drop", "wait", "hash") or isinstance(replaced, ast.Constant) else f"({new})"
            found.append(Mutant(file, replaced.lineno, kind, start, stop, text[start:stop].decode(), new))
    return found


def draw(seed: int, count: int, lines: dict[str, dict[int, list[str]]]) -> list[Mutant]:
    """Draws faults in lines that any test runs: the same number of each room, and of each kind where there are any."""
    rng = random.Random(seed)
    pools: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for room in ROOMS:
        for path in sorted((ROOT / "dtrain" / room).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            for mutant in mutants_of(file):
                if mutant.line in lines.get(file, {}):
                    pools[room, mutant.kind].append(mutant)
    chosen: list[Mutant] = []
    while len(chosen) < count and any(pools.values()):
        for room in ROOMS:
            kinds = [kind for (other, kind), pool in pools.items() if other == room and pool]
            if kinds:
                pool = pools[room, rng.choice(kinds)]
                chosen.append(pool.pop(rng.randrange(len(pool))))
    return chosen[:count]


# -- which test file runs which line -----------------------------------------------------------------------------------

_COVERAGE = """[run]
branch = true
parallel = true
source_pkgs = dtrain
data_file = {folder}/data
concurrency = multiprocessing,thread
patch = subprocess
sigterm = true
disable_warnings = no-data-collected,module-not-measured,couldnt-parse
[report]
include = {root}/dtrain/*
ignore_errors = true
"""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Says to coverage which test file runs; this module is a plugin of ``map``."""
    import coverage

    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid.split("::")[0])
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keeps how long each file takes, for the order of ``run``."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        with Path(os.environ["DTRAIN_MUTANTS"], f"times-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps([report.nodeid.split("::")[0], report.duration]) + "\n")


def make_map(folder: Path, arguments: list[str]) -> None:
    """Runs the default tests under coverage."""
    folder.mkdir(parents=True)
    settings = folder / "coveragerc"
    settings.write_text(_COVERAGE.format(folder=folder.resolve(), root=ROOT))
    coverage = [sys.executable, "-m", "coverage"]
    options = ["-n", "2", "--dist", "worksteal", "-p", "tests.measure.mutants", "--timeout", "1800", *arguments]
    env = {**os.environ, "DTRAIN_MUTANTS": str(folder.resolve()), "OMP_NUM_THREADS": "1"}
    subprocess.run([*coverage, "run", f"--rcfile={settings}", "-m", "pytest", *options], cwd=ROOT, env=env, check=False)
    subprocess.run([*coverage, "combine", f"--rcfile={settings}", "--quiet"], cwd=ROOT, check=True)
    subprocess.run(
        [*coverage, "report", f"--rcfile={settings}", "--format=total", "--precision=2"], cwd=ROOT, check=True
    )


def read_map(folder: Path) -> dict[str, dict[int, list[str]]]:
    """Returns the test files that run each line, the fastest first, by file of dtrain."""
    import coverage

    times: Counter[str] = Counter()
    for record in folder.glob("times-*.jsonl"):
        for line in record.read_text().splitlines():
            file, seconds = json.loads(line)
            times[file] += seconds
    data = coverage.CoverageData(str(folder / "data"))
    data.read()
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in data.measured_files():  # among them copies that tests have installed
        for line, names in data.contexts_by_lineno(path).items():
            tests = {name.rpartition("|")[2] for name in names} & times.keys()
            if tests:
                found[path[path.rindex("/dtrain/") + 1 :]][line] |= tests
    return {
        file: {line: sorted(names, key=lambda name: times[name]) for line, names in lines.items()}
        for file, lines in found.items()
    }


# -- trying ------------------------------------------------------------------------------------------------------------


def _relevance(mutant: Mutant, test: str) -> int:
    """Tests of the same room find a fault soonest."""
    name = Path(mutant.file).stem
    return -2 * (f"/{mutant.room}/" in test) - (name in test)


def attempt(mutant: Mutant, root: Path, tests: list[str], seconds: float) -> dict[str, Any]:
    """Runs ``tests`` on the copy with the fault in it; returns what is found."""
    healthy = mutant.apply(root)
    ordered = sorted(tests, key=lambda test: _relevance(mutant, test))
    began = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-m", "pytest", "-x", "--tb=line", "--timeout=300", *ordered]
    try:
        result = subprocess.run(
            command, cwd=root, env=env, capture_output=True, text=True, timeout=seconds, check=False
        )
        text = result.stdout
        found = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
        by = (found or text.splitlines()[-3:] or [""])[0][:200]
        outcome = "survived" if result.returncode == 0 else "found"
        if outcome == "found" and not found and "conftest" not in text + result.stderr:
            raise RuntimeError(f"no test of {ordered} ran:\n{text}{result.stderr}")
    except subprocess.TimeoutExpired as error:
        by = (error.stdout or b"").decode(errors="replace")[-200:]
        outcome = "time is over"
    finally:
        (root / mutant.file).write_text(healthy)
    return {
        **asdict(mutant),
        "outcome": outcome,
        "by": by,
        "s": round(time.monotonic() - began, 1),
        "tests": len(tests),
    }


def run(folder: Path, out: Path, seed: int, count: int) -> None:
    """Tries the faults drawn with ``seed``, two at a time."""
    lines = read_map(folder)
    known = {(r["file"], r["start"], r["new"]) for r in read_results(out)}
    todo = [m for m in draw(seed, count, lines) if (m.file, m.start, m.new) not in known]
    skipped = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".mypy_cache", ".ruff_cache", "outputs", "runs")
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as threads:
        roots: SimpleQueue[Path] = SimpleQueue()
        for number in range(2):
            roots.put(Path(scratch) / str(number))
            shutil.copytree(ROOT, Path(scratch) / str(number), ignore=skipped)

        def try_one(mutant: Mutant) -> dict[str, Any]:
            root = roots.get()
            try:
                return attempt(mutant, root, lines[mutant.file][mutant.line], seconds=1800)
            finally:
                roots.put(root)

        for future in as_completed([threads.submit(try_one, mutant) for mutant in todo]):
            result = future.result()
            with out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print("{outcome:12} {s:6.0f} s  {file}:{line} {kind}".format(**result), flush=True)


def read_results(out: Path) -> list[dict[str, Any]]:
    """The lines of a record; none if there is no file."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def show(out: Path) -> None:
    """Prints how many were found, by room and by kind, and the others in full."""
    results = read_results(out)
    for key in ("outcome", "kind"):
        print(dict(Counter(str(result[key]) for result in results)))
    print(dict(Counter(result["file"].split("/")[1] for result in results)))
    for result in results:
        if result["outcome"] != "found":
            place = f"{result['file']}:{result['line']}"
            print(f"{result['outcome']}: {place} {result['kind']}\n  - {result['old']}\n  + {result['new']}")


def main(arguments: list[str]) -> None:
    """See the head of this file."""
    match arguments:
        case ["map", folder, *options]:
            make_map(Path(folder), options)
        case ["run", folder, out, *numbers]:
            seed, count = (*map(int, numbers), *(1, 80)[len(numbers) :])
            run(Path(folder), Path(out), seed, count)
        case ["show", out]:
            show(Path(out))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
