"""``dtrain data tokenize``: the tokens of the library, whatever interrupts it."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from dtrain.__main__ import main
from dtrain.data.shards.format import MANIFEST, ShardManifest
from dtrain.data.shards.reader import TokenShards
from dtrain.data.tokenizer import TokenizerFile
from dtrain.errors import ConfigError, DataError, RankError, StorageError
from dtrain.tools.data import inputs, pool, unfinished, writer
from dtrain.tools.data.inputs import find_files, plan_units
from dtrain.tools.data.worker import TokenizeJob, tokenize_unit
from tests.helpers.corpora import STDLIB, mixed_corpus, stdlib_texts, write_jsonl, write_tokenizer
from tests.helpers.launch import ROOT, is_gone


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return write_tokenizer(tmp_path / "model" / "tokenizer.json")


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work units of 20 kB, so that small files give several shards."""
    monkeypatch.setattr(inputs, "MIN_UNIT_BYTES", 20_000)


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_text("text")
    return str(tmp_path / "a.txt")


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def tokenize(files: str, tokenizer: Path, out: Path, *words: str) -> int:
    return main(["data", "tokenize", f"files={files}", f"tokenizer={tokenizer}", f"out={out}", *words])


def job(tmp_path: Path, tokenizer: Path) -> tuple[TokenizeJob, TokenizerFile]:
    (tmp_path / "scratch").mkdir()
    return TokenizeJob(str(tmp_path), str(tmp_path / "scratch"), str(tokenizer), "text", 0), TokenizerFile(tokenizer)


@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
def test_1_and_2_workers_give_the_tokens_of_the_library_in_order(
    tmp_path: Path, tokenizer: Path, small_units: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    documents = mixed_corpus(tmp_path / "corpus")
    files = f"{tmp_path}/corpus/**/*.{{txt,jsonl,parquet}}"
    for workers in (1, 2):
        assert tokenize(files, tokenizer, tmp_path / f"out{workers}", f"workers={workers}") == 0
    assert "; 1 empty document skipped" in capsys.readouterr().out
    assert hashes(tmp_path / "out1") == hashes(tmp_path / "out2")
    library = Tokenizer.from_file(str(tokenizer))
    end = library.token_to_id("<|endoftext|>")
    expected = [[*library.encode(text, add_special_tokens=False).ids, end] for text in documents]
    shards = TokenShards.open(tmp_path / "out1")
    assert len(shards.shards) > 5
    assert shards.document_ends[:].tolist() == np.cumsum([len(ids) for ids in expected]).tolist()
    tokens = shards.read(np.array([0]), shards.num_tokens)[0]
    assert tokens.tolist() == [token for ids in expected for token in ids]
    manifest = ShardManifest.from_bytes((tmp_path / "out1" / MANIFEST).read_bytes(), MANIFEST)
    assert manifest.shards[0].sources[0] == "a.txt"
    assert (manifest.vocab_size, manifest.dtype, manifest.end_id, manifest.append_end) == (512, "uint16", end, True)
    assert (tmp_path / "out1" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    assert (tmp_path / "out1" / "tokenizer_config.json").exists()
    assert str(tmp_path).encode() not in (tmp_path / "out1" / MANIFEST).read_bytes()
    assert main(["data", "info", str(tmp_path / "out1")]) == 0
    shown = capsys.readouterr().out
    assert f"| {shards.num_tokens:,} " in shown
    assert "| b/part.jsonl bytes 0 to 20000" in shown


@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
def test_a_killed_command_resumes(tmp_path: Path, tokenizer: Path, small_units: None, capfd: Any) -> None:
    files = write_jsonl(tmp_path / "corpus.jsonl", stdlib_texts()[:35])
    out = tmp_path / "out"
    words = ["tokenize", f"files={files}", f"tokenizer={tokenizer}", f"out={out}", "workers=2"]
    code = (
        f"import dtrain.tools.data.inputs as i; i.MIN_UNIT_BYTES = {inputs.MIN_UNIT_BYTES}; "
        f"from dtrain.__main__ import main; main(['data', *{words!r}])"
    )
    command = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(list(out.glob("unfinished/0*.json"))) < 3:
        assert command.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    os.killpg(command.pid, signal.SIGKILL)
    command.wait()
    assert len(children) == 2
    while not all(map(is_gone, children)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not (out / MANIFEST).exists()
    with pytest.raises(ConfigError, match="was interrupted; the same command finishes it"):
        TokenShards.open(out)
    recorded = [out / f"{path.stem}.bin" for path in out.glob("unfinished/0*.json")]
    written = {path: path.stat().st_mtime_ns for path in recorded}
    assert len(written) >= 3

    (tmp_path / "other.jsonl").write_text('{"text": "x"}')
    for change, message in (
        (f"files={tmp_path}/other.jsonl", "the input corpus.jsonl is gone"),
        (f"files={tmp_path}/*.jsonl", "the input other.jsonl is new"),
        ("append_end=false", "append_end was True, and is False"),
    ):
        changed = [word for word in words if word.partition("=")[0] != change.partition("=")[0]]
        assert main(["data", *changed, change]) == 2
        assert message in capfd.readouterr().err
    assert main(["data", *words]) == 0
    assert "resuming: " in capfd.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert main(["data", *[word.replace(str(out), str(tmp_path / "whole")) for word in words]]) == 0
    assert hashes(out) == hashes(tmp_path / "whole")
    assert main(["data", "verify", str(out)]) == 0

    assert main(["data", *words]) == 2
    assert "holds finished token shards; choose another folder, or remove this one" in capfd.readouterr().err


@pytest.mark.processes
def test_the_whole_way_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process, of the commands and of a worker, would write a line if it connected, and one that it could."""
    (tmp_path / "block").mkdir()
    (tmp_path / "block" / "sitecustomize.py").write_text(
        "import socket, os\n"
        f"def note(name): open({str(tmp_path / 'log')!r}, 'a').write(name + '\\n')\n"
        "def connect(self, address):\n"
        "    note(f'connect {address}'); raise OSError('blocked')\n"
        "socket.socket.connect = socket.socket.connect_ex = connect\n"
        "note('started')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'block'}{os.pathsep}{ROOT}")
    files = f"files={STDLIB}/json/*.py"
    commands = [["train-tokenizer", files, f"out={name}", "vocab_size=300"] for name in ("one.json", "two.json")]
    commands.append(["tokenize", files, "tokenizer=one.json", "out=tokens", "workers=1"])
    code = f"from dtrain.__main__ import main\nfor words in {commands!r}: assert main(['data', *words]) == 0"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert (tmp_path / "log").read_text().splitlines() == ["started"] * 2
    shards = TokenShards.open(tmp_path / "tokens")
    first = shards.read(np.array([0]), shards.document_ends[0])[0].tolist()
    text = TokenizerFile(tmp_path / "one.json").decode(first)
    assert text == (STDLIB / "json" / "__init__.py").read_text() + "<|endoftext|>"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"files": "*.none"}, r"matches no file"),
        ({"tokenizer": "none.json"}, r"none.json cannot be read: No such file"),
        ({"tokenizer": "no-end.json"}, r"name one with end_token=\.\.\., or set append_end=false"),
        ({"end_token": "</s>"}, r"has no token '</s>'"),
        ({"out": "corpus"}, r"out=corpus is not empty \(it holds a.txt\); choose another folder"),
        ({"out": "corpus/a.txt"}, r"out=corpus/a.txt cannot be created: "),
        ({"out": "finished"}, r"out=finished holds finished token shards"),
        ({"without": "tokenizers"}, r"needs the library tokenizers; install it with pip install 'dtrain\[data\]'"),
        ({"without": "pyarrow", "files": "*.parquet"}, r"needs the library pyarrow; install it with pip install"),
    ],
)
def test_mistakes_before_the_work(
    tmp_path: Path, tokenizer: Path, capsys: Any, monkeypatch: Any, words: dict[str, str], expected: str
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("text")
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    (tmp_path / "no-end.json").write_text(tokenizer.read_text().replace("<|endoftext|>", "<|stop|>"))
    (tmp_path / "finished/unfinished").mkdir(parents=True)  # as a kill leaves it that comes while records are removed
    (tmp_path / "finished/unfinished/00000.json").write_text("{}")
    (tmp_path / "finished" / MANIFEST).write_text("{}")
    monkeypatch.chdir(tmp_path)
    values = {"files": "corpus/*.txt", "tokenizer": str(tokenizer), "out": "out", **words}
    if library := values.pop("without", None):
        monkeypatch.setitem(sys.modules, library, None)
    assert main(["data", "tokenize", *(f"{key}={value}" for key, value in values.items())]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(expected, error)


@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
def test_the_error_of_a_worker_takes_one_line(tmp_path: Path, tokenizer: Path, capfd: Any) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["fine", "half \ud83d"])
    assert tokenize(f"{tmp_path}/*.jsonl", tokenizer, tmp_path / "out", "workers=1") == 1
    error = capfd.readouterr().err
    assert error == (
        f"dtrain: {tmp_path}/a.jsonl, line 2 cannot be tokenized: the text holds half of a surrogate pair, which has "
        "no UTF-8\n"
    )


def unit_of(folder: Path, *texts: str) -> Any:
    (unit,) = plan_units(find_files(str(write_jsonl(folder / "a.jsonl", texts))), "text")
    return unit


def test_only_empty_documents(tmp_path: Path, tokenizer: Path) -> None:
    finished = tokenize_unit(*job(tmp_path, tokenizer), 0, unit_of(tmp_path, "", ""))
    assert (finished.entry.tokens, finished.entry.documents, finished.num_empty) == (0, 0, 2)
    assert (tmp_path / "00000.bin").read_bytes() == b""


def test_a_token_beyond_the_vocabulary_is_found(tmp_path: Path, tokenizer: Path, monkeypatch: Any) -> None:
    own_job, loaded = job(tmp_path, tokenizer)
    monkeypatch.setattr(loaded, "encode_batch", lambda texts: [[5, 512]])
    with pytest.raises(DataError, match="token 512, which is beyond its vocabulary of 512"):
        tokenize_unit(own_job, loaded, 0, unit_of(tmp_path, "text"))
    assert not list((tmp_path / "scratch").iterdir())


def test_a_full_disk_takes_one_line(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "_sync", full)
    with pytest.raises(StorageError, match=r"No space left on device \(errno 28\); free some space"):
        tokenize_unit(*job(tmp_path, tokenizer), 0, unit_of(tmp_path, "text"))
    assert not list((tmp_path / "scratch").iterdir())
    assert not (tmp_path / "00000.bin").exists()


def test_an_interrupt_and_a_lock_take_one_line(
    tmp_path: Path, tokenizer: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("dtrain.tools.data.tokenize.run_units", interrupt)
    assert tokenize(text, tokenizer, tmp_path / "out") == 130
    assert capsys.readouterr().err == "interrupted; the same command resumes\n"
    with unfinished.open_out(tmp_path / "out"):
        assert tokenize(text, tokenizer, tmp_path / "out") == 2
    assert "another dtrain data tokenize writes to out=" in capsys.readouterr().err
    monkeypatch.setattr(unfinished.fcntl, "flock", refuse)
    assert tokenize(text, tokenizer, tmp_path / "out") == 2
    assert "cannot be locked: No locks available; choose a folder on another disk" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.timeout(20)
def test_a_worker_that_ends_within_a_line_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.stdin.readline(); sys.stdin.readline(); sys.stdout.write('{\"finished\": {')"

    def start(module: str, *, threads: int, stdout: int, stderr: Any) -> Popen[str]:
        return Popen([sys.executable, "-c", code], stdin=PIPE, stdout=stdout, stderr=stderr, text=True)

    monkeypatch.setattr(pool, "start_rank", start)
    monkeypatch.setattr(pool, "kill_group", Popen.kill)
    with pytest.raises(RankError, match="a process that tokenizes ended"):
        list(pool.run_units(TokenizeJob("x", "x", "x", "x", None), {0: []}, 1, lambda tokens, characters: None))
