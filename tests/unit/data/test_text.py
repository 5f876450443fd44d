from __future__ import annotations

import os
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from dtrain.config.data import DataConfig, StdlibDataConfig, TextDataConfig
from dtrain.data import END_OF_DOCUMENT, Dataset, load_dataset
from dtrain.errors import ConfigError


def write(folder: Path, count: int = 60, size: int = 50) -> None:
    for i in range(count):
        path = folder / f"part{i % 3}" / f"{i}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([i]) * size)


def load(pattern: object, seq_len: int = 8, percent: float = 20.0) -> Dataset:
    return load_dataset(TextDataConfig(files=str(pattern), validation_percent=percent), seq_len)


def files_in(tokens: np.ndarray) -> set[int]:
    return set(tokens.tolist()) - {END_OF_DOCUMENT}


def test_stdlib_loads_quickly_and_is_real_text() -> None:
    start = time.process_time()  # not the clock: others may be at work here
    data = load_dataset(StdlibDataConfig(), 256)
    assert time.process_time() - start < 20
    assert data.train.num_samples > 10_000
    assert data.validation.num_samples > 100
    assert data.train.tokens.dtype == np.uint16
    assert "import" in data.codec.decode(data.train.tokens[:100_000])
    assert data.fingerprint == load_dataset(StdlibDataConfig(), 64).fingerprint


def test_stdlib_leaves_out_tests_and_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"a.py": b"x" * 100, "json/b.py": b"y" * 100}
    left_out = ["test/c.py", "a/tests/d.py", "site-packages/e.py", "idlelib/idle_test/f.py", "__pycache__/g.py", "h.so"]
    for name, content in kept.items() | {(name, b"z" * 100) for name in left_out}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere.py")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    data = load_dataset(StdlibDataConfig(), 16)
    assert files_in(data.train.tokens) | files_in(data.validation.tokens) == {ord("x"), ord("y")}
    assert "2 files" in data.description


def test_windows_overlap_by_one_token_and_targets_are_one_ahead(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(200)))
    train = load(tmp_path / "a.txt").train
    batch = train.batch(np.array([0, 3]))
    assert batch["tokens"].tolist() == [list(range(8)), list(range(24, 32))]
    assert batch["targets"].tolist() == [list(range(1, 9)), list(range(25, 33))]
    assert {(t.dtype, t.is_contiguous()) for t in batch.values()} == {(torch.int64, True)}
    assert train.batch(np.array([train.num_samples - 1]))["targets"].shape == (1, 8)


def test_files_are_split_whole_by_name_permanently(tmp_path: Path) -> None:
    write(tmp_path)
    data = load(tmp_path / "**" / "*.txt")
    assert (data.train.tokens[50::51] == END_OF_DOCUMENT).all()
    train, validation = files_in(data.train.tokens), files_in(data.validation.tokens)
    assert train | validation == set(range(60))
    assert not train & validation
    assert 4 <= len(validation) <= 22
    (tmp_path / "part0" / "new.txt").write_bytes(bytes([99]) * 50)
    (tmp_path / "part1" / "1.txt").write_bytes(bytes([1]) * 5000)
    grown = load(tmp_path / "**" / "*.txt")
    assert files_in(grown.train.tokens) - {99} == train
    assert files_in(grown.validation.tokens) - {99} == validation


def test_the_split_does_not_depend_on_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("one", "two/deeper"):
        (tmp_path / folder).mkdir(parents=True)
        write(tmp_path / folder)
    monkeypatch.chdir(tmp_path / "two")
    monkeypatch.setenv("CORPUS", str(tmp_path / "one"))
    monkeypatch.setenv("HOME", str(tmp_path))
    same = [load(p) for p in ("deeper/**/*.txt", "$CORPUS/**/*.txt", "~/one/**/*.txt", "deeper/part*/*.txt")]
    assert len({data.fingerprint for data in same}) == 1
    assert len({data.validation.tokens.tobytes() for data in same}) == 1


def test_the_fingerprint_sees_names_contents_and_boundaries(tmp_path: Path) -> None:
    seen: set[str] = set()
    long = b"." * 100
    cases: list[dict[str, bytes]] = [
        {"a": long, "b": long},
        {"a": long, "c": long},
        {"a": long, "b": long[1:] + b","},
        {"a": long[1:], "b": long + b"."},
        {"a": long + long},
        {"a": long + (1).to_bytes(8, "big") + b"b" + long},  # what two files become without their lengths
    ]
    for number, files in enumerate(cases):
        (folder := tmp_path / str(number)).mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        seen.add(load(folder / "*").fingerprint)
    assert len(seen) == len(cases)


@pytest.mark.parametrize("percent", [0.0, 5.0, 25.0])
def test_one_file_gives_its_tail_to_validation(tmp_path: Path, percent: float) -> None:
    content = bytes(i % 251 for i in range(3999))
    (tmp_path / "a.txt").write_bytes(content)
    data = load(tmp_path / "a.txt", percent=percent)
    windows = max(1, 4000 * percent / 100 / 8)
    assert abs(data.validation.num_samples - windows) <= 1
    assert data.train.num_samples >= (3999 - 8 * windows) // 8 - 2
    whole = np.concatenate((data.train.tokens, data.validation.tokens))
    assert whole[:-1].astype(np.uint8).tobytes() == content
    assert "% of the text held out for validation" in data.description


def test_the_shortest_text_gives_one_window_each_and_less_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 17)
    data = load(tmp_path / "a.txt", percent=50.0)
    assert (data.train.num_samples, data.validation.num_samples) == (1, 1)
    (tmp_path / "a.txt").write_bytes(b"x" * 16)
    with pytest.raises(ConfigError, match=r"holds 17 tokens, but .* model\.max_seq_len=8 need 18; add text or lower"):
        load(tmp_path / "a.txt")


def test_any_bytes_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(256)) * 2)
    data = load(tmp_path / "a.bin")
    assert data.task.num_outputs == 257
    assert data.codec.decode(torch.tensor([104, 105, END_OF_DOCUMENT, 195, 169, 255])) == "hi<|end|>é�"
    assert data.codec.decode([104, 257, 50256, 105]) == "h\ufffd\ufffdi"  # of a model with a larger vocabulary


def test_mistakes_are_named_with_the_folder_or_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"data\.files=none/\*\.txt matches no file .working directory {tmp_path}.$"):
        load("none/*.txt")
    with pytest.raises(ConfigError, match=r"it is a folder: add /\*\*/\*\.txt"):
        load(tmp_path)
    write(tmp_path, count=3)
    locked = tmp_path / "part1" / "1.txt"
    denied = Mock(side_effect=PermissionError(13, os.strerror(13)))  # root may read everything, whatever the mode bits
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: denied() if path == locked else read_bytes(path))
    with pytest.raises(ConfigError, match=rf"cannot read {locked}: Permission denied; make it readable or narrow"):
        load(tmp_path / "**" / "*.txt")
    with pytest.raises(ConfigError, match="is no source of data"):
        load_dataset(DataConfig(), 8)
