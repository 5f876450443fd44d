from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dtrain.__main__ import main
from dtrain.config.data import TokensDataConfig
from dtrain.data import load_dataset
from dtrain.data.packing import pack_documents, plan_folder, write_plan
from dtrain.data.shards.format import BLOCK, KINDS, MANIFEST, shard_file
from dtrain.data.shards.reader import TokenShards
from dtrain.errors import ConfigError
from dtrain.tools.data.writer import ShardWriter
from tests.helpers.token_shards import rewrite_manifest, write_shards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    documents = [[generator.integers(1000, size=length) for length in (70_000, 5, 33_000)] for _ in range(2)]
    write_shards(tmp_path / "tokens", documents, 1000)
    return tmp_path / "tokens"


def verify(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    code = main(["data", "verify", str(folder), *words])
    return code, capsys.readouterr().out.splitlines()


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "offset", "expected"),
    [
        ("00001.bin", 3 * BLOCK + 17, f"the first bad block is bytes {3 * BLOCK} to {4 * BLOCK}"),
        ("00000.bin", 0, f"the first bad block is bytes 0 to {BLOCK}"),
        ("00000.ends", 8, "SHA-256 is not the one in manifest.json"),
        ("00000.ends", 11, "document 1 ends at 16847221 of 103005, after 70000 (offset 8)"),
        ("00001.crc", 5, "SHA-256 is not the one in manifest.json"),
        ("tokenizer.json", 0, "SHA-256 is not the one in manifest.json"),
        ("manifest.json", 100, "manifest.json"),
    ],
)
def test_a_flipped_bit_is_found_in_each_kind_of_file(
    folder: Path, capsys: pytest.CaptureFixture[str], file: str, offset: int, expected: str
) -> None:
    flip(folder / file, offset)
    code, lines = verify(folder, capsys)
    assert code == 1
    (line,) = lines
    assert line.startswith(f"BAD {folder / file}")
    assert expected in line


def test_each_bad_file_has_its_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "00000.crc").unlink()
    flip(folder / "00000.bin", 5)
    with (folder / "00001.bin").open("ab") as file:
        file.write(b"x")
    code, lines = verify(folder, capsys)
    assert code == 1
    assert lines == [
        f"BAD {folder}/00000.crc: missing",
        f"BAD {folder}/00000.bin: its SHA-256 is not the one in manifest.json",
        f"BAD {folder}/00001.bin: 206011 bytes; manifest.json states 206010",
    ]


def test_wrong_content_with_right_hashes_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hashes are those of the files, but a token is beyond the vocabulary, and a document is empty."""
    write_shards(tmp_path, [[np.array([1, 2, 3]), np.array([], np.int64), np.array([9])]], 10)
    rewrite_manifest(
        tmp_path,
        (tmp_path / MANIFEST)
        .read_text()
        .replace('"vocab_size":10', '"vocab_size":9')
        .replace('"max_token":9', '"max_token":3'),
    )
    code, lines = verify(tmp_path, capsys)
    assert code == 1
    assert lines == [
        f"BAD {tmp_path}/00000.bin: token 9 at offset 6 is not below 9",
        f"BAD {tmp_path}/00000.ends: written wrongly; document 1 ends at 3 of 4, after 3 (offset 8)",
    ]


def test_shards_of_llmc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, 4
    (tmp_path / "x.bin").write_bytes(header.tobytes() + np.array([1, 2, 700, 3], dtype="<u2").tobytes())
    assert main(["data", "verify", str(tmp_path)]) == 2
    assert "set vocab_size=N to check their tokens" in capsys.readouterr().err
    assert verify(tmp_path, capsys, "vocab_size=1000")[0] == 0
    code, lines = verify(tmp_path, capsys, "vocab_size=700")
    assert code == 1
    assert lines == [f"BAD {tmp_path}/x.bin: token 700 at position 2 is not below 700"]
    assert main(["data", "info", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "| not stated" in shown
    assert "| x.bin" in shown


def test_plans_of_packing_are_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = TokenShards.open(folder)
    write_plan(folder, pack_documents(shards.document_ends[:], 64), 64, shards.fingerprint)
    assert verify(folder, capsys)[0] == 0
    assert main(["data", "info", str(folder)]) == 0
    assert "64 tokens" in capsys.readouterr().out
    flip(plan_folder(folder, 64) / "starts.npy", 200)
    code, lines = verify(folder, capsys)
    assert code == 1
    assert len(lines) == 1
    assert f"BAD data.pack=best_fit: the plan {folder}/packing/64 is damaged: starts.npy" in lines[0]


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_files_equal_those_of_an_independent_writer(tmp_path: Path, vocab_size: int, itemsize: int) -> None:
    generator = np.random.default_rng(0)
    end = vocab_size - 1
    documents = [generator.integers(vocab_size, size=length) for length in (3, 2_500_000, 1, 32_768, 7)]
    shard = ShardWriter(tmp_path, 0, vocab_size, end, tmp_path)
    for batch in (documents[:2], [], documents[2:]):
        shard.add([document.tolist() for document in batch])
    entry = shard.finish(["source"])
    shard.close()
    write_shards(tmp_path / "expected", [[np.append(document, end) for document in documents]], vocab_size, end)
    for kind in KINDS:
        assert shard_file(tmp_path, 0, kind).read_bytes() == shard_file(tmp_path / "expected", 0, kind).read_bytes()
    assert (entry.tokens, entry.documents, entry.max_token) == (2_532_784, 5, end)
    assert shard_file(tmp_path, 0, "bin").stat().st_size == itemsize * entry.tokens
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000.bin", "00000.crc", "00000.ends", "expected"]


def test_a_plan_of_packing_is_written_and_trained_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = np.random.default_rng(0).integers(1, 90, size=200)
    documents = [np.full(length, length) for length in lengths]
    write_shards(tmp_path / "tokens", [documents[:120], documents[120:]], 1000)
    config = TokensDataConfig(path=str(tmp_path / "tokens"), pack="best_fit")
    with pytest.raises(ConfigError, match=r"run dtrain data pack \S+tokens seq_len=64"):
        load_dataset(config, 64)
    assert main(["data", "pack", str(tmp_path / "tokens"), "seq_len=64"]) == 0
    assert " % filled, from " in capsys.readouterr().out
    data = load_dataset(config, 64)
    counted = 0
    for source in (data.train, data.validation):
        batch = source.batch(np.arange(source.num_samples))
        is_target = batch["targets"] != -100
        counted += int(is_target.sum())
        # every document has one token, its own length: nothing of a neighbor is a target
        assert bool((batch["targets"] == batch["tokens"])[is_target].all())
    assert counted == (lengths - 1).sum()
    write_shards(tmp_path / "short", [[np.array([3]), np.array([4])]], 1000)
    assert main(["data", "pack", str(tmp_path / "short"), "seq_len=64"]) == 2
    assert "has no document of two tokens or more" in capsys.readouterr().err
