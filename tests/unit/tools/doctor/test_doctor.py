"""``dtrain doctor`` as users run it: true statements about a machine, without secrets, and about a shared folder."""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.__main__ import main
from dtrain.checkpoint import shared_folder, storage
from dtrain.config.capabilities import CAPABILITIES
from dtrain.errors import ConfigError
from dtrain.precision.policy import PrecisionPolicy
from dtrain.telemetry.gpu import GPUState
from dtrain.tools.doctor import folder, machine
from dtrain.tools.doctor.folder import answer, check_folder
from dtrain.tools.doctor.machine import _machine, _measure, _software

CPU = torch.device("cpu")
KEY = "0123456789abcdef0123456789abcdef01234567"


def cells(output: str, first: str) -> list[str]:
    """The cells of the row that begins with ``first``."""
    (row,) = [line for line in output.splitlines() if line.startswith(f"| {first} ")]
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.processes
def test_machine_tables_are_true_and_hide_the_api_key(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine api.wandb.ai login user password {KEY}\n", encoding="ascii")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("COLUMNS", "40")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "_SIZES", {"cpu": (64, 128)})
    monkeypatch.setattr(machine, "_BUDGET_S", 0.01)
    assert main(["doctor"]) == 0
    output, errors = capsys.readouterr()
    assert re.findall("^## (.*)$", output, re.M)[:3] == ["Software", "Machine", "Ranks"]
    assert cells(output, "torch")[1] == torch.__version__
    assert cells(output, "python")[1] == platform.python_version()
    assert cells(output, "backend gloo")[1] == "yes"
    assert Path(cells(output, "launcher torchrun")[1]).exists()
    assert re.fullmatch(r"[\d.]+ GiB free", cells(output, "disk of this folder")[1])
    assert cells(output, "tracker=wandb")[1] == "online: logged in"
    assert KEY not in output + errors
    for dtype in ("fp32", "bf16", "fp16"):
        _, gflops, matrices = cells(output, dtype)
        assert float(gflops) > 0
        assert re.fullmatch(r"(\d+) x \1", matrices)
    chosen = PrecisionPolicy.named("auto").on(CPU)
    assert cells(output, "`precision=auto`")[1:] == [f"chooses {chosen.name}", f"because {chosen.reason}"]


def test_a_gpu_is_shown_with_its_limits_libraries_and_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 whose power is limited, with a cublasLt of CUDA 12.8."""
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30, major=9, minor=0)
    kernels = {16: "FlashAttention 2", 4: "cuDNN"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = dict(_machine())
    assert rows["GPU"] == "none visible to PyTorch"
    assert not rows.keys() & {"GPU driver", "cuDNN", "cublasLt", "attention of 16 heads of 128"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: properties.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    old = "9.10.2, /opt/libcudnn.so.9", ["cuDNN is loaded from /opt", "cuDNN 9.10.2 is old"]
    monkeypatch.setattr(machine, "describe_cudnn", {(9, 0): old}.get)
    monkeypatch.setattr(machine, "describe_state", lambda index: GPUState(500, 700, 700, 1200, 1980, mig="Disabled"))
    monkeypatch.setattr(machine, "loaded_library", {"libcublasLt.so": "/opt/libcublasLt.so.12"}.get)
    monkeypatch.setattr(machine, "cublaslt_version", lambda: "12.8.4")
    monkeypatch.setattr(machine, "attention_kernel", lambda device, dtype, *, kv_heads, **shape: kernels[kv_heads])
    rows = dict(_machine())
    assert rows["GPU 0"] == "NVIDIA H100 80GB HBM3, 80.0 GiB, compute capability 9.0"
    power = "power limit 500 W (default 700, at most 700), SM clock 1,200 of 1,980 MHz"
    limited = "WARNING: the GPU's power limit is 500 W and the card's default 700 W"
    assert rows["GPU 0 power and clocks"].startswith(f"{power}; {limited}")
    assert rows["GPU 0 MIG mode"] == "disabled"
    warned = "WARNING: cuDNN is loaded from /opt; WARNING: cuDNN 9.10.2 is old"
    assert rows["cuDNN"] == f"9.10.2, /opt/libcudnn.so.9; {warned}"
    assert rows["cublasLt"] == (
        "12.8.4, /opt/libcublasLt.so.12; FP8 products with blockwise scales need 12.9: install the wheel of CUDA 13.0 "
        "(cu130)"
    )
    assert rows["attention of 16 heads of 128"] == (
        "FlashAttention 2; with 4 key heads: cuDNN (BF16, causal, 2,048 tokens)"
    )
    assert rows["attention, `reproducible=true`"].startswith("not FlashAttention 3: no package has a module")
    monkeypatch.setattr(machine, "flash_attention_3_problem", {(9, 0): ""}.get)
    assert dict(_machine())["attention, `reproducible=true`"] == "FlashAttention 3"
    assert {"GPU driver", "compiler for GPUs"} <= rows.keys()
    assert "GPU" not in rows
    for version, text in (("12.9.0", "12.9.0, /opt/libcublasLt.so.12"), (None, "unknown version")):
        monkeypatch.setattr(machine, "cublaslt_version", lambda version=version: version)
        assert dict(_machine())["cublasLt"] == text


@pytest.mark.parametrize(("number", "is_bad"), [("3.8.0", True), ("3.7.1", False)])
def test_a_triton_known_as_bad_is_named(number: str, is_bad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "package_version", lambda name: number)
    monkeypatch.setattr(platform, "platform", lambda terse: "Linux")  # it may start uname
    purposes = {name: purpose for name, _, purpose in _software()}
    assert ("3.8.0 may store garbage" in purposes["triton"]) == is_bad
    assert purposes["triton"].startswith("kernels on a GPU")
    assert purposes["numpy"] == "data"


def test_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "engines"]) == 0
    output = capsys.readouterr().out
    assert cells(output, "`zero_stage`")[1:] == ["0, 1, 2, 3", "2, 3", "0, 1, 2, 3", "0"]
    for name, capabilities in CAPABILITIES.items():
        assert all(supported.reason in output for supported in capabilities.supported.values())
        assert cells(output, f"`{name}`")[1].startswith("no" if capabilities.missing_requirement else "yes")


def test_unsupported_dtype_is_reported_with_its_error() -> None:
    def make(size: int) -> Callable[[], Tensor]:
        return lambda: torch.zeros(size, size, dtype=torch.float8_e4m3fn) @ torch.zeros(size, size)

    speed = _measure("odd", make, CPU)
    assert speed.gflops is None
    assert "dtype" in speed.error


def results(path: Path, *, other_host: bool = True) -> tuple[list[str], bool]:
    table, is_good = check_folder(path, other_host=other_host)
    assert os.listdir(path) == []
    return [row[1] for row in table.rows], is_good


def with_answers(path: Path) -> tuple[list[str], bool]:
    """The other host is a thread."""

    def other() -> None:
        with suppress(Exception):
            answer(path)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        return results(path)
    finally:
        thread.join()


@pytest.mark.processes
def test_a_local_folder_has_all_properties(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.count("| yes") == 7
    assert "NO" not in text
    assert os.listdir(tmp_path) == []


def refuse(*_: object) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def copying_rename(source: Path, target: Path) -> None:
    """As an object store: each object is copied, and not yet removed."""
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


@pytest.mark.parametrize(
    ("function", "stand_in", "row", "reason"),
    [
        ("link", refuse, 1, "NO: Invalid argument"),
        ("create", lambda path: os.open(path, os.O_WRONLY | os.O_CREAT), 0, "NO: a file was created twice"),
        ("sync_directory", refuse, 2, "NO: Invalid argument"),
        ("rename", copying_rename, 3, "NO: the old name is still there"),
        ("overwrite", lambda descriptor, data: None, 6, "NO: this process on host"),  # it uploads when the file closes
    ],
)
def test_a_missing_property_is_named(
    function: str, stand_in: Callable[..., Any], row: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "LIMIT_S", 0.3)
    monkeypatch.setattr(storage, function, stand_in)
    found, is_good = with_answers(tmp_path)
    assert not is_good
    assert found[row].startswith(reason), found


def test_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_START_S", 0.2)
    monkeypatch.setattr(shared_folder, "LIMIT_S", 0.2)
    found, is_good = results(tmp_path)
    assert not is_good
    assert all("does not see" in result for result in found[4:])


@pytest.mark.processes
def test_a_second_process_that_ends_at_once_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    monkeypatch.setattr(folder, "_START_S", 20.0)
    monkeypatch.setattr(shared_folder, "LIMIT_S", 0.2)
    began = time.monotonic()
    found, is_good = results(tmp_path, other_host=False)
    assert time.monotonic() - began < 10
    assert not is_good
    assert found[4:] == ["NO: the other process has ended without an answer; see its message above"] * 3


def test_files_of_others_are_read_with_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that never ends, and a probe that leads elsewhere."""
    monkeypatch.setattr(shared_folder, "LIMIT_S", 0.2)

    def link_answer(path: Path) -> None:
        os.mkdir(path)
        (path / "answer-start").symlink_to("/dev/zero")

    monkeypatch.setattr(storage, "make_directory", link_answer)
    found, _ = results(tmp_path)
    assert found[4].startswith("NO: answer-start: not a regular file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "dtrain-doctor").symlink_to("elsewhere")
    with pytest.raises(ConfigError, match="must be a folder"):
        answer(tmp_path)


def test_a_probe_of_another_command_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dtrain-doctor").mkdir()
    assert main(["doctor", "folder", str(tmp_path)]) == 2
    assert "remove it, unless another dtrain doctor runs there" in capsys.readouterr().err
    assert (tmp_path / "dtrain-doctor").is_dir()
