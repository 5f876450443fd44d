"""What must answer at once does not import torch, and the package is whole all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dtrain
from dtrain.version import version

_IS_THERE = "import sys; sys.exit('torch' in sys.modules)"


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.processes
@pytest.mark.parametrize(
    "code",
    [
        "import dtrain; dir(dtrain); dtrain.__version__",
        "import dtrain.errors, dtrain.config.schema",
        "import dtrain; dtrain.Native(zero_stage=3); dtrain.AdamW(); dtrain.LossScale('dynamic'); dtrain.Cosine(1, 2)",
        "from dtrain.__main__ import main; assert main(['--help']) == 0",
        "from dtrain.__main__ import main; assert main(['trian']) == 2",
        "from dtrain.__main__ import main; assert main(['checkpoint', 'export', 'a', 'b', '--dtype', 'fp8']) == 2",
        "import dtrain.checkpoint; dir(dtrain.checkpoint)",
        "import dtrain.telemetry.metrics, dtrain.telemetry.console, dtrain.tools.accept.worker",
        "from dtrain.__main__ import main; assert main(['watch', 'no-such-run']) == 2",
    ],
)
def test_no_torch(code: str) -> None:
    done = run_python(f"{code}\n{_IS_THERE}")
    assert done.returncode == 0, done.stderr or "torch was imported"


@pytest.mark.processes
def test_help_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "dtrain", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    assert "usage: dtrain VERB" in done.stdout
    assert " dtrain.errors" in done.stderr
    assert "torch" not in done.stderr


def test_every_public_name_is_there() -> None:
    for name in dtrain.__all__:
        assert name in dir(dtrain)
        assert getattr(dtrain, name).__name__.rpartition(".")[2] == name
    assert dtrain.__version__ == version()
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        _ = dtrain.initialise


@pytest.mark.processes
def test_submodules_need_no_import_of_their_own() -> None:
    done = run_python(
        "import dtrain; dtrain.checkpoint.verify; dtrain.errors.ConfigError; from dtrain import *; AdamW()"
    )
    assert done.returncode == 0, done.stderr
