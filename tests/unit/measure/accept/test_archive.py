from __future__ import annotations

import io
import os
import tarfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from dtrain.errors import ConfigError
from dtrain.measure.accept.archive import use_caches, write_archive, write_caches


@pytest.fixture(autouse=True)
def _no_cache_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.setenv(name, "")  # so that what the code sets is undone
        monkeypatch.delenv(name)


def fill(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_archive_has_no_caches_and_no_half_written_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, path = tmp_path / "results", tmp_path / "out" / "results.tar.gz"
    kept = {"accept.json": b"{}", "jobs/a.json": b"[1]", "logs/caches/x.log": b"line"}
    fill(folder, kept | {"caches/triton/k.cubin": b"k", "jobs/b.json.tmp": b"{", "logs/open.log": b"secret"})
    fill(folder, {"gone": b"", "logs/caches/y.log.tmp": b""})
    read = Path.read_bytes  # a job removes one file after it was listed
    monkeypatch.setattr(Path, "read_bytes", lambda file: read(file if file.name != "gone" else tmp_path / "none"))
    write_archive(path, folder, leave_out={"caches", "logs/open.log"})
    with tarfile.open(path) as tar:
        tar.extractall(tmp_path / "copy", filter="data")
    assert contents(tmp_path / "copy" / "results") == kept
    first = path.read_bytes()
    assert os.listdir(path.parent) == [path.name]

    def full(self: tarfile.TarFile, *_: object) -> None:
        assert path.read_bytes() == first  # a reader never meets half a file
        raise OSError("No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", full)
    with pytest.raises(OSError, match="No space"):
        write_archive(path, folder, leave_out={"caches"})
    assert path.read_bytes() == first


CACHES = {"triton/ABC/kernel.cubin": b"c" * 99, "inductor/fx/ab/graph": b"g", "inductor/top": b"t"}


def write_into(folder: Path, path: Path, files: dict[str, bytes]) -> None:
    use_caches(folder, None)
    fill(folder, files)
    write_caches(path)


def test_caches_come_back_in_the_folders_of_the_next_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "caches.tar.gz"
    write_into(tmp_path / "first", path, CACHES)
    assert sorted(os.listdir(tmp_path)) == ["caches.tar.gz", "first"]
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert Path(os.environ.pop(variable)).parent == tmp_path / "first"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own" / "triton"))  # the user's choice stays
    use_caches(tmp_path / "second", path)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "own" / "triton")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "second" / "inductor")
    assert contents(tmp_path / "own") | contents(tmp_path / "second") == CACHES
    use_caches(tmp_path / "second", tmp_path / "none")  # the first time there is no file


@pytest.mark.parametrize("name", ["triton/../../outside", "inductor//tmp/dtrain-outside", "../outside", "/outside"])
def test_a_member_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    path, folder = tmp_path / "caches.tar.gz", tmp_path / "caches"
    with tarfile.open(path, "w:gz") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = 1
        tar.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(ConfigError, match="outside") if "/.." in name else nullcontext():
        use_caches(folder, path)
    written = {str(found.relative_to(tmp_path)) for found in tmp_path.rglob("*") if found.is_file()} - {path.name}
    assert written <= {"caches/inductor/tmp/dtrain-outside"}
    assert not Path("/tmp/dtrain-outside").exists()
