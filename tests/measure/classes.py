"""Prints the size of each class of some packages, the largest first, and the lines of each of their files.

``python -m tests.measure.classes [FOLDER]...``, by default of ``dtrain/engine`` and ``dtrain/sharding``. A class's own
methods are the functions and properties in its body; its own attributes are the names in its body, and what its methods
assign to ``self``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("dtrain/engine", "dtrain/sharding")


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    """Yields what a statement assigns to, each element of a tuple by itself."""
    found = list(node.targets) if isinstance(node, ast.Assign) else []
    if isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For)):
        found = [node.target]
    if isinstance(node, ast.With):
        found = [item.optional_vars for item in node.items if item.optional_vars is not None]
    while found:
        target = found.pop(0)
        if isinstance(target, (ast.Tuple, ast.List)):
            found[:0] = target.elts
        else:
            yield target.value if isinstance(target, ast.Starred) else target


def members_of(node: ast.ClassDef) -> tuple[set[str], set[str]]:
    """Returns the names of a class's own methods and of its own attributes."""
    functions = [item for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))]
    attributes = {target.id for item in node.body for target in targets_of(item) if isinstance(target, ast.Name)}
    for target in (target for function in functions for item in ast.walk(function) for target in targets_of(item)):
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            attributes.add(target.attr)
    return {function.name for function in functions}, attributes


def classes_of(source: str) -> Iterator[tuple[str, set[str], set[str]]]:
    """Yields name, methods and attributes of each class, also of those inside of others."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield (node.name, *members_of(node))


def main() -> None:
    files = [path for folder in sys.argv[1:] or FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    rows = [
        (len(methods), len(attributes), name, path)
        for path, source in sources.items()
        for name, methods, attributes in classes_of(source)
    ]
    print("methods attributes class")
    for number, other, name, path in sorted(rows, key=lambda row: (-row[0] - row[1], row[2])):
        print(f"{number:7} {other:10} {name} ({path})")
    lines = {path: len(source.splitlines()) for path, source in sources.items()}
    print("\n  lines file")
    for path, count in sorted(lines.items(), key=lambda item: (-item[1], item[0])):
        print(f"{count:7} {path}")
    print(f"{len(rows)} classes, {len(lines)} files, {sum(lines.values()):,} lines")


if __name__ == "__main__":
    main()
