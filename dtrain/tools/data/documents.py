"""Reads the documents of a source, one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dtrain.errors import DataError
from dtrain.tools.data.inputs import Source, key_hint, open_parquet

_PARQUET_ROWS = 512  # read at a time
_BOM = "\ufeff"


def documents(source: Source, text_key: str) -> Iterator[tuple[str, int]]:
    """Yields the text of each document and its position for ``place``; empty ones too.

    Raises:
        DataError: a document is not readable text; the message names file and line or row.
    """
    if source.is_parquet:
        return _rows(source, text_key)
    return _lines(source, text_key) if source.is_jsonl else _whole(source)


def place(source: Source, position: int) -> str:
    """Returns the file of a document, with its line or row, counted from 1."""
    if source.is_parquet:
        with open_parquet(source.path) as file:
            before = sum(file.metadata.row_group(number).num_rows for number in range(source.start))
        return f"{source.path}, row {before + position + 1}"
    if source.is_jsonl:
        with open(source.path, "rb") as lines:
            number = 1 + _count_newlines(lines, position)
        return f"{source.path}, line {number}"
    return source.path


@contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; make it readable or narrow the glob") from None


def _whole(source: Source) -> Iterator[tuple[str, int]]:
    with _readable(source.path), open(source.path, "rb") as file:
        data = file.read()
    yield _decode(data, source, 0).removeprefix(_BOM), 0


def _lines(source: Source, text_key: str) -> Iterator[tuple[str, int]]:
    """A line belongs to the source that holds its first byte; its position is that byte."""
    with _readable(source.path), open(source.path, "rb") as file:
        at = source.start
        if at:
            file.seek(at - 1)
            at += len(file.readline()) - 1
        while source.stop is None or at < source.stop:
            line = file.readline()
            if not line:
                break
            text = _decode(line, source, at).removeprefix(_BOM if not at else "")
            if not text.isspace():
                yield _text_of(text, text_key, source, at), at
            at += len(line)


def _text_of(line: str, text_key: str, source: Source, at: int) -> str:
    try:
        record = json.loads(line.rstrip())
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(f"{place(source, at)}: not readable as JSON: {reason}") from None
    if not isinstance(record, dict):
        raise DataError(f"{place(source, at)}: expected an object with the key '{text_key}', got {line.strip():.60}")
    if text_key not in record:
        raise DataError(f"{place(source, at)} has no key '{text_key}'{key_hint(text_key, list(record))}")
    return _checked(record[text_key], text_key, source, at)


def _rows(source: Source, text_key: str) -> Iterator[tuple[str, int]]:
    with _readable(source.path), open_parquet(source.path) as file:
        from pyarrow import ArrowException

        groups = None if source.stop is None else list(range(source.start, source.stop))
        position = 0
        batches = file.iter_batches(_PARQUET_ROWS, row_groups=groups, columns=[text_key], use_threads=False)
        while True:
            try:
                batch = next(batches, None)
                texts = batch.column(0).to_pylist() if batch is not None else None
            except (ArrowException, UnicodeDecodeError) as error:
                reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else f"is damaged: {error}"
                raise DataError(f"{place(source, position)} or after: column '{text_key}' {reason}") from None
            if texts is None:
                return
            for text in texts:
                yield _checked(text, text_key, source, position), position
                position += 1


def _checked(text: Any, text_key: str, source: Source, position: int) -> str:
    if not isinstance(text, str):
        found = "null" if text is None else f"{type(text).__name__} {text!r:.40}"
        raise DataError(f"{place(source, position)}: '{text_key}' is {found}; expected text")
    return text


def _decode(data: bytes, source: Source, position: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place(source, position)} is not UTF-8 (byte {error.start}: {data[error.start]:#04x}); convert it, or "
            "narrow the glob"
        ) from None


def _count_newlines(file: Any, stop: int) -> int:
    count = 0
    while stop > 0 and (data := file.read(min(stop, 1 << 20))):
        count += data.count(b"\n")
        stop -= len(data)
    return count
