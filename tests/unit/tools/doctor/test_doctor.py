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

import pytest
import torch
from torch import Tensor

from dtrain.__main__ import main
from dtrain.config.capabilities import CAPABILITIES
from dtrain.precision.policy import PrecisionPolicy
from dtrain.tools.doctor.machine import _measure

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
