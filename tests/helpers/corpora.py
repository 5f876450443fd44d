"""Folders of text in all formats, and a small tokenizer trained on the standard library."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

STDLIB = Path(sysconfig.get_path("stdlib"))


@cache
def stdlib_texts() -> tuple[str, ...]:
    """Sources of the standard library in a fixed order, about 2 MB."""
    return tuple(path.read_text(encoding="utf-8") for path in sorted(STDLIB.glob("[a-f]*.py")) if path.stat().st_size)


@cache
def tokenizer_text() -> str:
    """A ``tokenizer.json`` with 512 tokens."""
    from dtrain.tools.data.train_tokenizer import train

    return train(str(STDLIB / "json" / "*.py"), 512)[0]


def write_tokenizer(path: Path) -> Path:
    path.write_text(tokenizer_text(), encoding="utf-8")
    return path


def write_jsonl(path: Path, texts: Sequence[Any], key: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"id": number, key: text}) for number, text in enumerate(texts))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_parquet(path: Path, texts: Sequence[Any], key: str = "text", rows: int = 3) -> Path:
    """Writes a ``.parquet`` with ``rows`` rows in each row group."""
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"id": list(range(len(texts))), key: list(texts)})
    parquet.write_table(table, path, row_group_size=rows)
    return path


def mixed_corpus(folder: Path) -> list[str]:
    """Writes text, JSON lines and Parquet; returns the documents in the order of the shards."""
    texts = [text[:8_000] for text in stdlib_texts()[:40]]
    folder.mkdir()
    (folder / "a.txt").write_text(texts[0], encoding="utf-8")
    write_jsonl(folder / "b" / "part.jsonl", texts[1:20])
    write_parquet(folder / "c.parquet", texts[20:38])
    (folder / "d.txt").write_text("", encoding="utf-8")  # is left out
    (folder / "e.txt").write_text("caf\u00e9 \U0001f600 " + texts[38], encoding="utf-8")
    return [*texts[:38], (folder / "e.txt").read_text(encoding="utf-8")]
