"""Where a path is expected, ``~`` is the home folder, and a URL is refused: neither leaves a folder of that name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dtrain
from dtrain import checkpoint
from dtrain.__main__ import _with_home, main
from dtrain.checkpoint import Retention, Snapshot
from dtrain.checkpoint.huggingface.importer import import_hf
from dtrain.checkpoint.inspection import lease_holder, newest_checkpoint
from dtrain.cli.resolve import compose
from dtrain.config.data import ArraysDataConfig, ChatDataConfig, ImagesDataConfig, TextDataConfig, TokensDataConfig
from dtrain.config.model import ModelConfig
from dtrain.config.probe import ProbeConfig
from dtrain.config.schema import RunConfig
from dtrain.errors import CheckpointError, ConfigError, DtrainError
from dtrain.local_paths import local_path, require_local
from dtrain.tools.checkpoint.prune import prune
from tests.helpers.checkpoints import ALONE
from tests.helpers.one_rank import start, train_step

URL = "s3://bucket/run"
URLS = [URL, "gs://b", "abfs://c@a.dfs.core.windows.net/x", "memory://x", "file:///data/x", "dbfs:/x"]
PATHS = ["runs/a", "/data/a:b/c", "./s3:/x", "C:/runs", "a=1:2/x", "runs/s3:/x", "", "2024-01-01T10:00/x", "auto"]


@pytest.fixture(autouse=True)
def nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("url", [*URLS, "simplecache::s3://b/x"])
def test_a_url_is_refused_as_text_and_as_a_path(url: str) -> None:
    for path in (url, Path(url)):  # a Path has one slash left of two
        with pytest.raises(ConfigError, match=r"is the URL .*expected a path.*aws s3 sync.*dtrain checkpoint verify"):
            require_local(path, "run_dir")


@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_none(path: str) -> None:
    assert local_path(path, "run_dir") == Path(path)


RECORDS: list[Callable[[], Any]] = [
    lambda: RunConfig(run_dir=URL),
    lambda: ModelConfig(path=URL),
    lambda: ProbeConfig(run_dir=URL),
    lambda: TextDataConfig(files=f"{URL}/**/*.txt"),
    lambda: TokensDataConfig(mixture={"a": 1.0, URL: 2.0}),
    lambda: dtrain.FrozenSource(URL),
]
CALLS: list[Callable[[], Any]] = [
    lambda: checkpoint.verify(URL),
    lambda: checkpoint.list_checkpoints(Path(URL)),
    lambda: checkpoint.export(URL, "out"),
    lambda: checkpoint.export("run", URL),
    lambda: checkpoint.export("run", "out", base=URL),
    lambda: checkpoint.open_newest(Path(URL), ALONE),
    lambda: checkpoint.save(Path(URL), Snapshot(1, (), {}), ALONE),
    lambda: import_hf(URL, "run"),
    lambda: import_hf("folder", URL),
    lambda: newest_checkpoint(URL),
    lambda: lease_holder(URL),
    lambda: prune(Path(URL), Retention()),
    lambda: dtrain.load_exported(URL),
    lambda: start().save(URL),
    lambda: start().save(Path(URL), asynchronous=True),
    lambda: start().load(URL),
]


@pytest.mark.parametrize("call", RECORDS + CALLS)
def test_every_record_and_function_with_a_path_refuses_a_url(call: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match="is the URL s3:/"):
        call()


LINES = [f"train run_dir={URL}", f"checkpoint verify {URL}", f"checkpoint export runs/a out --base={URL}"]
LINES += [f"data tokenize files={URL}/*.jsonl tokenizer=t.json out=tokens", f"bench engine bench.out={URL}"]


@pytest.mark.parametrize("line", [*LINES, f"report runs/a out={URL}"])
def test_the_command_line_refuses_a_url(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert "is the URL s3://bucket/run" in capsys.readouterr().err


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    return folder


def test_a_tilde_in_a_key_is_the_home_folder(home: Path) -> None:
    assert RunConfig(run_dir="~/runs/x", resume="~/runs/y").run_dir == f"{home}/runs/x"
    assert compose(["experiment=smoke", "run_dir='~/runs/x'", "resume='~/y'"]).resume == f"{home}/y"
    assert compose(["experiment=smoke", "run_dir='~/runs/x'"]).run_dir == f"{home}/runs/x"
    assert ProbeConfig(run_dir="~/p/").run_dir == f"{home}/p/"
    assert TextDataConfig(files="~/**/*.txt").files == f"{home}/**/*.txt"
    assert TokensDataConfig(mixture={"a": 1.0, "~/b": 2.0}).mixture == {"a": 1.0, f"{home}/b": 2.0}
    assert dtrain.FrozenSource("~/model").path == f"{home}/model"
    for kept in ("./~/x", "runs/~", "x~", "a=~/b"):
        assert RunConfig(run_dir=kept).run_dir == kept


def test_a_tilde_in_a_path_of_the_library_is_the_home_folder(home: Path) -> None:
    engine = start()
    train_step(engine)
    saved = engine.save("~/run/checkpoints")
    assert saved == home / "run" / "checkpoints" / "step-00000001"
    assert engine.load(Path("~/run")) == {}
    assert checkpoint.open_newest(Path("~/run"), ALONE).step == 1
    assert [status.path for status in checkpoint.list_checkpoints("~/run")] == [saved]
    assert checkpoint.verify("~/run").ok
    assert newest_checkpoint("~/run") == saved
    prune(Path("~/run"), Retention())
    with pytest.raises(CheckpointError, match=f"{home}/run exists; an export creates a new folder"):
        checkpoint.export("~/run", "~/run")
    task: Any = SimpleNamespace(name="classification", input_shape=(3, 8, 8), is_image=True)
    for call in (lambda: dtrain.load_exported("~/none"), lambda: dtrain.read_image("~/none.png", task)):
        with pytest.raises(DtrainError, match=f"{home}/none"):
            call()


@pytest.mark.parametrize("line", ["report ~/none", "checkpoint verify ~/none"])
def test_a_tilde_in_an_argument_of_a_tool_is_the_home_folder(
    home: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell replaces it at the start of a word only, so not in ``out=~/a``."""
    assert main(line.split()) != 0
    assert str(home) in capsys.readouterr().err
    assert _with_home("out=~/a") == f"out={home}/a"
    assert _with_home("--base=~/a") == f"--base={home}/a"
    assert _with_home("x=a~/b") == "x=a~/b"


def test_every_key_that_names_a_file_or_folder_is_marked() -> None:
    """So it is refused like the keys of RECORDS. A new key must be marked, or be named here."""
    records = [RunConfig(), TextDataConfig(files="a"), ChatDataConfig(files="a", tokenizer="a")]
    records += [TokensDataConfig(path="a"), ImagesDataConfig(path="a"), ArraysDataConfig(path="a")]

    def unmarked(record: Any, prefix: str) -> set[str]:
        found = set()
        for item in fields(record):
            value = getattr(record, item.name)
            key = f"{prefix}{item.name}"
            if is_dataclass(value):
                found |= unmarked(value, f"{key}.")
            elif re.search("folder|directory| path|file", item.metadata.get("doc", "").lower()):
                found |= set() if item.metadata.get("is_path") or not isinstance(value, (str, type(None))) else {key}
        return found

    assert set().union(*(unmarked(record, "") for record in records)) == {"model.weights"}
