from pathlib import Path

import pytest

from dtrain.checkpoint import NoCheckpointError, list_checkpoints, verify
from dtrain.checkpoint.cli import _size, main
from dtrain.errors import CheckpointError
from tests.helpers.checkpoints import save_good


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_good(tmp_path / "checkpoints", 100, 2)
    save_good(tmp_path / "checkpoints", 200, 3)
    return tmp_path


def flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_verify_takes_a_run_a_directory_and_one_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 0
    everything = capsys.readouterr().out
    assert main(["verify", str(run / "checkpoints")]) == 0
    assert capsys.readouterr().out == everything
    assert everything.splitlines() == ["ok  step-00000100  1.8 kB  2 files", "ok  step-00000200  2.3 kB  3 files"]
    assert main(["verify", str(run / "checkpoints" / "step-00000200")]) == 0
    assert capsys.readouterr().out == "ok  step-00000200  2.3 kB  3 files\n"


def test_verify_names_the_bad_file_and_renames_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_last(run / "checkpoints" / "step-00000200" / "r0001.safetensors")
    assert main(["verify", str(run)]) == 1
    good, bad = capsys.readouterr().out.splitlines()
    assert good.startswith("ok  step-00000100")
    assert bad.startswith("BAD step-00000200 r0001.safetensors: sha256 differs (expected ")
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000100", "step-00000200"]
    assert verify(run, fast=True).ok  # sizes and headers are as they were
    assert not verify(run).ok


def test_list_shows_each_checkpoint_and_what_was_set_aside(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step-00000300").mkdir()
    (run / "checkpoints" / "bad-step-00000050-sha256").mkdir()
    (run / "checkpoints" / "step-00000400.tmp-ab12cd34").mkdir()
    assert main(["list", str(run)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "saved", "size", "files", "world", "size", "status"]
    assert rows[0].split()[0] == "step-00000100"
    assert rows[0].split()[2:] == ["1.8", "kB", "2", "2", "ok"]
    assert rows[2].split(maxsplit=5) == ["step-00000300", "?", "?", "?", "?", "BAD manifest.json: missing"]
    assert rows[3:] == ["set aside: bad-step-00000050-sha256"]


def test_reports_carry_what_the_manifest_says(run: Path) -> None:
    first, second = list_checkpoints(run)
    assert (first.step, first.num_files, first.world_size, first.ok, first.problem) == (100, 2, 2, True, None)
    assert second.num_bytes == sum(p.stat().st_size for p in second.path.glob("*.safetensors"))
    assert second.saved_at is not None
    assert second.saved_at.endswith("+00:00")


@pytest.mark.parametrize("arguments", [["verify", "/no/such/place"], ["list", "/no/such/place"]])
def test_missing_path_is_one_clear_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("dtrain: /no/such/place does not exist; give a run directory")
    assert output.err.count("\n") == 1


def test_nothing_to_verify_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"dtrain: there is no checkpoint in {tmp_path}\n"
    assert list_checkpoints(tmp_path) == []
    with pytest.raises(NoCheckpointError):
        verify(tmp_path)


def test_unfinished_save_is_never_read(tmp_path: Path) -> None:
    path = tmp_path / "step-00000100.tmp-ab12cd34"
    path.mkdir()
    with pytest.raises(CheckpointError, match="a save that never finished"):
        verify(path)


@pytest.mark.parametrize(
    "arguments", [[], ["verify"], ["prune", "x"], ["verify", "a", "b"], ["verify", "--quick", "a"]]
)
def test_bad_usage_exits_2_with_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: dtrain checkpoint")


def test_help_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "list" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_230_000, "1.2 MB"), (5 * 10**15, "5000.0 TB")]
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert _size(count) == text
