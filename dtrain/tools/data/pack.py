"""``dtrain data pack``: plans samples of whole documents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.data.packing import pack_documents, plan_folder, write_plan
from dtrain.data.shards.reader import TokenShards
from dtrain.errors import ConfigError


def run(values: Mapping[str, Any]) -> int:
    """Writes the plan beside the shards, and says what it gives."""
    folder: Path = values["folder"]
    seq_len: int = values["seq_len"]
    shards = TokenShards.open(folder, values["vocab_size"])
    packing = pack_documents(shards.document_ends[:], seq_len)
    if not packing.num_samples:
        raise ConfigError(f"{folder} has no document of two tokens or more, so there is nothing to pack")
    plan = write_plan(folder, packing, seq_len, shards.fingerprint)
    print(
        f"wrote {plan_folder(folder, seq_len)}: {plan['samples']:,} samples of {seq_len:,} tokens, "
        f"{plan['fill_percent']:g} % filled, from {plan['fragments']:,} documents and fragments"
    )
    print(f"train with data=tokens data.path={folder} data.pack=best_fit model.max_seq_len={seq_len}")
    return 0
