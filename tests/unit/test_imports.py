"""The graph of imports between modules has no cycle; imports in functions and for type checkers count."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import dtrain
from dtrain.version import version

ROOT = Path(__file__).parents[2]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.glob("dtrain/**/*.py"))
}


def imported_modules(module: str, path: Path) -> set[str]:
    """Modules of the project that ``module`` imports at any time."""
    found = set()
    for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"{path.relative_to(ROOT)}:{statement.lineno}: relative import"
            for alias in statement.names:
                submodule = f"{statement.module}.{alias.name}"
                found.add(submodule if submodule in MODULES else str(statement.module))
    return found & MODULES.keys() - {module}


def test_imports_have_no_cycle() -> None:
    graph = {module: imported_modules(module, path) for module, path in MODULES.items()}
    assert sum(map(len, graph.values())) > len(graph)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError("import cycle: " + " <- ".join(error.args[1])) from None


WITHOUT_TORCH = (
    "import dtrain; dir(dtrain); dtrain.__version__",
    "import dtrain.errors, dtrain.config.schema, dtrain.config.capabilities, dtrain.telemetry.gpu",
    "import dtrain; dtrain.Native(zero_stage=3); dtrain.AdamW(); dtrain.LossScale('dynamic'); dtrain.Cosine(1, 2)",
    "import dtrain.checkpoint; dir(dtrain.checkpoint)",
    "import dtrain.telemetry.metrics, dtrain.telemetry.console, dtrain.measure.accept.start, dtrain.measure.accept.run",
    "from dtrain.__main__ import main; assert main(['--help']) == 0",
    "from dtrain.__main__ import main; assert main(['trian']) == 2",
    "from dtrain.__main__ import main; assert main(['checkpoint', 'export', 'a', 'b', '--dtype', 'fp8']) == 2",
    "from dtrain.__main__ import main; assert main(['watch', 'no-such-run']) == 2",
    "from dtrain.__main__ import main; assert main(['train', '--help']) == 0",
    "from dtrain.__main__ import main; assert main(['plan', '--help']) == 0",
    "from dtrain.__main__ import main; assert main(['plan', 'time', 'efficiency=2']) == 2",
    "from dtrain.__main__ import main; assert main(['doctor', 'engines']) == 0",
)
"""Run one after the other, so each starts without torch."""
CODE = f"""
import sys
import dtrain.data.images.decode
assert not {{"torch", "numpy"}} & set(sys.modules), "the processes that decode images are small"
for code in {WITHOUT_TORCH!r}:
    exec(code, {{}})
    assert "torch" not in sys.modules, code
import dtrain.planning.scale
assert "matplotlib" not in sys.modules, "a plan without picture= draws nothing"
"""


@pytest.mark.processes
def test_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: dtrain VERB" in done.stdout


def test_every_public_name_is_there() -> None:
    for name in dtrain.__all__:
        assert name in dir(dtrain)
        assert getattr(dtrain, name).__name__.rpartition(".")[2] == name
    assert dtrain.__version__ == version()
    for name in ("checkpoint", "errors"):  # submodules need no import of their own
        assert dtrain.__getattr__(name) is sys.modules[f"dtrain.{name}"]
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        _ = dtrain.initialise
