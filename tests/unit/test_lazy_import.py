from __future__ import annotations

import subprocess
import sys

import pytest

import dtrain
from dtrain.version import version

WITHOUT_TORCH = (
    "import dtrain; dir(dtrain); dtrain.__version__",
    "import dtrain.errors, dtrain.config.schema, dtrain.config.capabilities, dtrain.telemetry.gpu",
    "import dtrain; dtrain.Native(zero_stage=3); dtrain.AdamW(); dtrain.LossScale('dynamic'); dtrain.Cosine(1, 2)",
    "import dtrain.checkpoint; dir(dtrain.checkpoint)",
    "import dtrain.telemetry.metrics, dtrain.telemetry.console, dtrain.tools.accept.worker",
    "from dtrain.__main__ import main; assert main(['--help']) == 0",
    "from dtrain.__main__ import main; assert main(['trian']) == 2",
    "from dtrain.__main__ import main; assert main(['checkpoint', 'export', 'a', 'b', '--dtype', 'fp8']) == 2",
    "from dtrain.__main__ import main; assert main(['watch', 'no-such-run']) == 2",
    "from dtrain.__main__ import main; assert main(['train', '--help']) == 0",
    "from dtrain.__main__ import main; assert main(['doctor', 'engines']) == 0",
)
"""Run one after the other, so each starts without torch."""
CODE = f"""
import sys
import dtrain.data.images.decode
assert not {{"torch", "numpy"}} & set(sys.modules), "the processes that decode images are small"
for code in {WITHOUT_TORCH!r}:
    exec(code, {{}})
    assert "torch" not in sys.modules, code
"""


@pytest.mark.processes
def test_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: dtrain VERB" in done.stdout


def test_every_public_name_is_there() -> None:
    for name in dtrain.__all__:
        assert name in dir(dtrain)
        assert getattr(dtrain, name).__name__.rpartition(".")[2] == name
    assert dtrain.__version__ == version()
    for name in ("checkpoint", "errors"):  # submodules need no import of their own
        assert dtrain.__getattr__(name) is sys.modules[f"dtrain.{name}"]
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        _ = dtrain.initialise
