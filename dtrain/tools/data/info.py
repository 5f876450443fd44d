"""``dtrain data info``: what a folder of token shards holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.data.packing import plan_folder
from dtrain.data.shards.format import MANIFEST, ShardManifest
from dtrain.data.shards.reader import TokenShards
from dtrain.tools.tables import Table, show

_ANY_TOKEN = 1 << 32
_PERCENTILES = (10, 50, 90, 99)
_LISTED = 50  # shards


def run(values: Mapping[str, Any]) -> int:
    """Prints a table of the folder, and one of its shards."""
    folder: Path = values["folder"]
    show(tables(folder, values["vocab_size"]))
    return 0


def tables(folder: Path, vocab_size: int | None) -> list[Table]:
    """Returns the tables of a folder; raises as ``TokenShards.open``."""
    manifest_file = folder / MANIFEST
    manifest = (
        ShardManifest.from_bytes(manifest_file.read_bytes(), str(manifest_file)) if manifest_file.is_file() else None
    )
    shards = TokenShards.open(folder, vocab_size if manifest else vocab_size or _ANY_TOKEN)
    facts = {
        "tokens": f"{shards.num_tokens:,}",
        "documents": f"{shards.num_documents:,}",
        "shards": f"{len(shards.shards):,}",
        "bytes of tokens": f"{sum(shard.tokens.nbytes for shard in shards.shards):,}",
        "dtype": ", ".join(sorted({shard.dtype.name for shard in shards.shards})),
        "vocabulary": f"{shards.vocab_size:,}" if manifest or vocab_size else "not stated",
    }
    if manifest:
        facts |= {
            "largest token": f"{max(shard.max_token for shard in manifest.shards):,}",
            "end token": _end_token(manifest),
            "tokenizer": f"sha256 {manifest.tokenizer_sha256}",
            "written by": ", ".join(f"{name} {number}" for name, number in manifest.versions.items()),
        }
    facts |= _lengths(shards)
    facts["packing plans"] = ", ".join(f"{length:,} tokens" for length in packed_lengths(folder)) or "none"
    facts["fingerprint"] = shards.fingerprint
    return [Table(str(folder), ("what", "value"), list(facts.items())), _shard_table(shards, manifest)]


def packed_lengths(folder: Path) -> list[int]:
    """Returns the lengths of samples for which a folder has plans of best-fit packing."""
    return sorted(int(path.name) for path in plan_folder(folder, 0).parent.glob("*") if path.name.isdigit())


def _end_token(manifest: ShardManifest) -> str:
    if manifest.end_id is None:
        return "none"
    return f"{manifest.end_id}{'' if manifest.append_end else ', not appended to documents'}"


def _lengths(shards: TokenShards) -> dict[str, str]:
    """Returns mean and percentiles of the tokens of a document."""
    lengths = np.concatenate([np.diff(shard.ends, prepend=0) for shard in shards.shards] or [np.empty(0)])
    if not len(lengths):
        return {}
    values = np.percentile(lengths, _PERCENTILES, method="lower")
    names = ", ".join(f"{percent} %: {int(value):,}" for percent, value in zip(_PERCENTILES, values, strict=True))
    return {"mean length": f"{lengths.mean():,.1f}", "lengths": f"{names}, longest: {int(lengths.max()):,}"}


def _shard_table(shards: TokenShards, manifest: ShardManifest | None) -> Table:
    sources = [_short(shard.sources) for shard in manifest.shards] if manifest else [""] * len(shards.shards)
    rows = [
        (shard.path.name, f"{shard.num_tokens:,}", f"{len(shard.ends):,}", source)
        for shard, source in zip(shards.shards[:_LISTED], sources, strict=False)
    ]
    more = len(shards.shards) - len(rows)
    title = f"Shards, the first {_LISTED} of {len(shards.shards)}" if more else "Shards"
    return Table(title, ("file", "tokens", "documents", "from"), rows)


def _short(sources: tuple[str, ...]) -> str:
    return ", ".join(sources) if len(sources) <= 3 else f"{sources[0]} to {sources[-1]}"
