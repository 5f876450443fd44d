from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dtrain.data.shards.format import KINDS, shard_file
from dtrain.tools.data.writer import ShardWriter
from tests.helpers.token_files import write_shards


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_files_equal_those_of_an_independent_writer(tmp_path: Path, vocab_size: int, itemsize: int) -> None:
    generator = np.random.default_rng(0)
    end = vocab_size - 1
    documents = [generator.integers(vocab_size, size=length) for length in (3, 2_500_000, 1, 32_768, 7)]
    writer = ShardWriter(tmp_path, 0, vocab_size, end, tmp_path)
    for batch in (documents[:2], [], documents[2:]):
        writer.add([document.tolist() for document in batch])
    entry = writer.finish(["source"])
    writer.close()
    write_shards(tmp_path / "expected", [[np.append(document, end) for document in documents]], vocab_size, end)
    for kind in KINDS:
        assert shard_file(tmp_path, 0, kind).read_bytes() == shard_file(tmp_path / "expected", 0, kind).read_bytes()
    assert (entry.tokens, entry.documents, entry.max_token) == (2_532_784, 5, end)
    assert shard_file(tmp_path, 0, "bin").stat().st_size == itemsize * entry.tokens
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000.bin", "00000.crc", "00000.ends", "expected"]
