"""Finds the files of a glob, and cuts them into work units.

[Note: work units] One unit gives one shard. Units depend on the input alone: consecutive small files, byte ranges of a
large ``.jsonl`` and row groups of a large ``.parquet``. So the number of workers changes no byte of the output.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.errors import ConfigError, nearest

JSONL = (".jsonl", ".ndjson")
PARQUET = ".parquet"
NEEDS_PYARROW = "needs the library pyarrow; install it with pip install 'dtrain[data]'"
MIN_UNIT_BYTES, MAX_UNIT_BYTES = 16 << 20, 256 << 20
_FINE_UNITS = 256  # units have the least size until there are that many, so that all cores are busy also on little text

_LISTED = 20  # keys in a message
_SPECIAL = re.compile(r"[*?\[{]")
_UNREADABLE = {".json": "write one object a line into a .jsonl", ".csv": "convert it to .jsonl or .parquet"}


@dataclass(frozen=True)
class Source:
    """A file, or a part of it.

    Attributes:
        name: POSIX path relative to the fixed part of the glob.
        path: the file.
        start: first byte of a ``.jsonl``, or first row group of a ``.parquet``; 0 for text.
        stop: the end, exclusive; None: of the file.
        size: bytes of text, about.
    """

    name: str
    path: str
    start: int
    stop: int | None
    size: int

    @property
    def is_jsonl(self) -> bool:
        return self.path.lower().endswith(JSONL)

    @property
    def is_parquet(self) -> bool:
        return self.path.lower().endswith(PARQUET)

    def __str__(self) -> str:
        if self.stop is None:
            return self.name
        return f"{self.name} {'row groups' if self.is_parquet else 'bytes'} {self.start} to {self.stop}"


def find_files(pattern: str, key: str = "files") -> dict[str, Path]:
    """Returns the files that a glob with ``**`` and ``{a,b}`` matches, by name, sorted.

    Raises:
        ConfigError: no file matches, or a file is of an unsupported kind.
    """
    expanded = os.path.expandvars(os.path.expanduser(pattern))
    is_file = os.path.isfile(expanded)
    patterns = [expanded] if is_file else [os.path.expanduser(one) for one in _without_braces(expanded)]
    globs = [glob.escape(expanded)] if is_file else patterns
    found = {os.path.abspath(path) for one in globs for path in glob.iglob(one, recursive=True) if os.path.isfile(path)}
    if not found:
        inside = "; it is a folder: add '/**/*.jsonl'" if os.path.isdir(expanded) else ""
        raise ConfigError(f"{key}={pattern} matches no file (working directory {os.getcwd()}){inside}")
    fixed = (one if is_file else one[: _fixed_end(one)] + "x" for one in patterns)
    root = os.path.commonpath([os.path.dirname(os.path.abspath(one)) for one in fixed])
    files = {path.relative_to(root).as_posix(): path for path in map(Path, found)}
    for path in files.values():
        if hint := _UNREADABLE.get(path.suffix.lower()):
            raise ConfigError(
                f"{key}={pattern} matches {path}; expected .jsonl, .parquet, or text with a document in each file: "
                f"{hint}, or narrow the glob"
            )
    return dict(sorted(files.items()))


def _fixed_end(pattern: str) -> int:
    special = _SPECIAL.search(pattern)
    return special.start() if special else len(pattern)


def _without_braces(pattern: str) -> Iterator[str]:
    """Yields the patterns that ``{a,b}`` stands for, as a shell does; braces without a comma are characters."""
    innermost = re.search(r"\{([^{}]*,[^{}]*)\}", pattern)
    if innermost is None:
        yield pattern
        return
    for choice in innermost[1].split(","):
        yield from _without_braces(pattern[: innermost.start()] + choice + pattern[innermost.end() :])


def plan_units(files: Mapping[str, Path], text_key: str) -> list[list[Source]]:
    """Returns the sources of each work unit, see [Note: work units].

    Raises:
        ConfigError: a file cannot be read, or a ``.parquet`` has no such column of text, or no text in it.
    """
    sizes = {name: _size(path) for name, path in files.items()}
    target = min(max(sum(sizes.values()) // _FINE_UNITS, MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    units: list[list[Source]] = []
    room = 0
    for name, path in files.items():
        for source in _sources(name, path, sizes[name], target, text_key):
            if not units or source.size > room:
                units.append([])
                room = target
            units[-1].append(source)
            room -= source.size
    return units


def _size(path: Path) -> int:
    try:
        with path.open("rb"):  # refuses here what a worker could not read
            return path.stat().st_size
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; make it readable or narrow the glob") from None


def _sources(name: str, path: Path, size: int, target: int, text_key: str) -> Iterator[Source]:
    whole = Source(name, str(path), 0, None, size)
    if whole.is_parquet:
        yield from _row_groups(whole, target, text_key)
    elif whole.is_jsonl and size > target:
        for start in range(0, size, target):
            stop = min(start + target, size)
            yield Source(name, str(path), start, stop, stop - start)
    else:
        yield whole


def _row_groups(whole: Source, target: int, text_key: str) -> Iterator[Source]:
    """Yields the file, or groups of consecutive row groups of about ``target`` bytes of text."""
    with open_parquet(whole.path) as file:
        column = _text_column(file.schema_arrow, whole.path, text_key)
        metadata = file.metadata
        index = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == column)
        chunks = [metadata.row_group(number).column(index) for number in range(metadata.num_row_groups)]
        statistics = [chunk.statistics for chunk in chunks]
        num_nulls = [found.null_count if found is not None and found.has_null_count else 0 for found in statistics]
        if sum(num_nulls) == metadata.num_rows:
            state = "has no rows" if not metadata.num_rows else f"has only nulls in column '{text_key}'"
            raise ConfigError(f"{whole.path} {state}; remove it or narrow the glob")
        sizes = [chunk.total_uncompressed_size for chunk in chunks]
    if sum(sizes) <= target:
        yield Source(whole.name, whole.path, 0, None, sum(sizes))
        return
    start = 0
    for number in range(1, len(sizes) + 1):
        if number == len(sizes) or sum(sizes[start : number + 1]) > target:
            yield Source(whole.name, whole.path, start, number, sum(sizes[start:number]))
            start = number


def open_parquet(path: str) -> Any:
    """Opens a ``.parquet``; raises ``ConfigError`` if it is none, or pyarrow is not installed."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(f"{path} {NEEDS_PYARROW}") from None
    try:
        return parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{path} cannot be read as .parquet: {str(error).splitlines()[0]}") from None


def _text_column(schema: Any, path: str, text_key: str) -> str:
    if text_key not in schema.names:
        raise ConfigError(f"{path} has no column '{text_key}'{key_hint(text_key, schema.names)}")
    kind = schema.field(text_key).type
    value = str(kind.value_type if str(kind).startswith("dictionary<") else kind)
    if value == "null":
        raise ConfigError(f"{path} has only nulls in column '{text_key}'; remove it or narrow the glob")
    if value not in ("string", "large_string", "string_view"):
        raise ConfigError(f"{path}: column '{text_key}' has the type {kind}; expected text, so set another text_key")
    return text_key


def key_hint(key: str, keys: Sequence[str]) -> str:
    """Returns the end of a message about a missing key: the closest one, and those that there are."""
    close = nearest(key, keys)
    listed = ", ".join(keys[:_LISTED]) or "none"
    return f"{close if close.endswith('?') else ';'} its keys: {listed}; set text_key"
