"""``dtrain doctor`` as users run it: its statements about this machine are true, and it prints no secrets."""

from __future__ import annotations

import os
import platform
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dtrain.__main__ import main
from dtrain.config.capabilities import CAPABILITIES
from dtrain.precision.policy import PrecisionPolicy
from dtrain.telemetry.gpu import GPUState
from dtrain.tools.doctor import machine
from dtrain.tools.doctor.machine import _machine, _measure, _software

ROOT = Path(__file__).parents[4]
CPU = torch.device("cpu")
KEY = "0123456789abcdef0123456789abcdef01234567"


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, "-m", "dtrain", "doctor", *words],
        capture_output=True,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1"} | env,
        timeout=120,
        check=False,
    )


def cells(output: str, first: str) -> list[str]:
    """The cells of the row that begins with ``first``."""
    (row,) = [line for line in output.splitlines() if line.startswith(f"| {first} ")]
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.processes
def test_machine_tables_are_true_and_hide_the_api_key(tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine api.wandb.ai login user password {KEY}\n", encoding="ascii")
    done = run(NETRC=str(netrc), COLUMNS="40")
    assert done.returncode == 0, done.stderr
    output = done.stdout
    assert re.findall("^## (.*)$", output, re.M)[:3] == ["Software", "Machine", "Ranks"]
    assert cells(output, "torch")[1] == torch.__version__
    assert cells(output, "python")[1] == platform.python_version()
    assert cells(output, "backend gloo")[1] == "yes"
    assert Path(cells(output, "launcher torchrun")[1]).exists()
    assert re.fullmatch(r"[\d.]+ GiB free", cells(output, "disk of this folder")[1])
    assert cells(output, "tracker=wandb")[1] == "online: logged in"
    assert KEY not in output + done.stderr
    for dtype in ("fp32", "bf16", "fp16"):
        _, gflops, matrices = cells(output, dtype)
        assert float(gflops) > 0
        assert re.fullmatch(r"(\d+) x \1", matrices)
    chosen = PrecisionPolicy.named("auto").on(CPU)
    assert cells(output, "`precision=auto`")[1:] == [f"chooses {chosen.name}", f"because {chosen.reason}"]


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that the machine has an H100 whose power is limited, with a cublasLt of CUDA 12.8."""
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30, major=9, minor=0)
    kernels = {16: "flash", 4: "cudnn"}
    files = {"libcudnn.so": "/opt/libcudnn.so.9", "libcublasLt.so": "/opt/libcublasLt.so.12"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: properties.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(machine, "describe_state", lambda index: GPUState(500, 700, 700, 1200, 1980, mig="Disabled"))
    monkeypatch.setattr(machine, "loaded_library", files.get)
    monkeypatch.setattr(machine, "cublaslt_version", lambda: "12.8.4")
    monkeypatch.setattr(machine, "attention_kernel", lambda device, dtype, *, kv_heads, **shape: kernels[kv_heads])


def test_a_gpu_is_shown_with_its_limits_libraries_and_attention(one_gpu: None) -> None:
    rows = dict(_machine())
    assert rows["GPU 0"] == "NVIDIA H100 80GB HBM3, 80.0 GiB, compute capability 9.0"
    assert rows["GPU 0 power and clocks"] == (
        "power limit 500 W (default 700, at most 700), SM clock 1,200 of 1,980 MHz"
    )
    assert rows["GPU 0 MIG mode"] == "disabled"
    assert rows["cuDNN"] == "9.10.2, /opt/libcudnn.so.9"
    assert rows["cublasLt"] == "12.8.4, /opt/libcublasLt.so.12; FP8 products with blockwise scales need 12.9"
    assert rows["attention of 16 heads of 128"] == "flash; with 4 key heads: cudnn (BF16, causal, 2,048 tokens)"
    assert {"GPU driver", "compiler for GPUs"} <= rows.keys()
    assert "GPU" not in rows


def test_without_a_gpu_no_row_of_one_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = dict(_machine())
    assert rows["GPU"] == "none visible to PyTorch"
    assert not rows.keys() & {"GPU driver", "cuDNN", "cublasLt", "attention of 16 heads of 128"}


@pytest.mark.parametrize(("version", "text"), [("12.9.0", "12.9.0, /opt/libcublasLt.so.12"), (None, "unknown version")])
def test_a_cublaslt_with_blockwise_products_is_not_commented(
    version: str | None, text: str, one_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cublaslt_version", lambda: version)
    assert dict(_machine())["cublasLt"] == text


def test_a_cudnn_that_pytorch_refuses_is_reported(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise RuntimeError("cuDNN version incompatibility: compiled against (9, 10)\nmore")

    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    assert dict(_machine())["cuDNN"] == "no: cuDNN version incompatibility: compiled against (9, 10)"


@pytest.mark.parametrize(("number", "is_bad"), [("3.8.0", True), ("3.7.1", False)])
def test_a_triton_known_as_bad_is_named(number: str, is_bad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "package_version", lambda name: number)
    monkeypatch.setattr(platform, "platform", lambda terse: "Linux")  # it may start uname
    purposes = {name: purpose for name, _, purpose in _software()}
    assert ("3.8.0 may store garbage" in purposes["triton"]) == is_bad
    assert purposes["triton"].startswith("kernels on a GPU")
    assert purposes["numpy"] == "data"


@pytest.mark.processes
def test_engines_are_markdown_when_piped() -> None:
    done = run("engines")
    assert done.returncode == 0, done.stderr
    assert cells(done.stdout, "`zero_stage`")[1:] == ["0, 1, 2, 3", "2, 3", "0, 1, 2, 3", "0"]
    for name, capabilities in CAPABILITIES.items():
        for supported in capabilities.supported.values():
            assert supported.reason in done.stdout
        assert cells(done.stdout, f"`{name}`")[1].startswith("no" if capabilities.missing_requirement else "yes")


@pytest.mark.processes
def test_engines_are_drawn_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "dtrain", "doctor", "engines"], stdout=theirs, cwd=ROOT) as process:
        os.close(theirs)
        output = b""
        while chunk := _read(ours):
            output += chunk
        assert process.wait(timeout=60) == 0
    os.close(ours)
    text = output.decode()
    assert "━" in text
    assert "##" not in text
    assert "`" not in text


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux raises this when the other end is closed
        return b""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine"], "no topic 'engine'; did you mean 'engines'?"),
        (["engines", "now"], "one topic; got 'now' too"),
        (["precision=bf16"], "no topic 'precision=bf16'; valid: engines, folder, keys"),
    ],
)
def test_unknown_topic_is_a_one_line_error(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert len(err.splitlines()) == 1


def test_help_prints_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: dtrain doctor")


def test_unsupported_dtype_is_reported_with_its_error() -> None:
    def make(size: int) -> Callable[[], Tensor]:
        return lambda: torch.zeros(size, size, dtype=torch.float8_e4m3fn) @ torch.zeros(size, size)

    speed = _measure("odd", make, CPU)
    assert speed.gflops is None
    assert "dtype" in speed.error


@pytest.mark.parametrize(("seconds", "sizes"), [(0.0, {256, 512, 1024}), (0.06, {256})])
def test_slow_matrix_products_stop_at_the_time_budget(seconds: float, sizes: set[int]) -> None:
    calls = []

    def make(size: int) -> Callable[[], None]:
        def product() -> None:
            calls.append(size)
            time.sleep(seconds)

        return product

    speed = _measure("any", make, CPU)
    assert set(calls) == sizes
    assert speed.size == max(sizes)
