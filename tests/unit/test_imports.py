"""The graph of imports between modules has no cycle, imports for type checkers included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.glob("dtrain/**/*.py"))
}


def module_level_imports(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements outside functions; those under ``if TYPE_CHECKING`` and in ``try`` and ``with`` count."""
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            for block in ("body", "orelse", "finalbody"):
                yield from module_level_imports(getattr(statement, block, []))


def imported_modules(module: str, path: Path) -> set[str]:
    """Modules of the project that ``module`` imports when it is imported itself."""
    found = set()
    for statement in module_level_imports(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
            continue
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
