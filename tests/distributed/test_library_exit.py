"""A user's own script under torchrun, which calls ``dtrain.initialize`` and nothing to end it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SCRIPT = """
import atexit, sys
import torch
import torch.distributed as dist

# runs after what initialize registers; one write, since both ranks write to one pipe
atexit.register(lambda: sys.stdout.write(f"group left: {dist.is_initialized()}\\n"))
torch.set_num_threads(1)
import dtrain

engine = dtrain.initialize(torch.nn.Linear(64, 64), precision="fp32", seed=0)
for _ in range(3):
    engine.backward(engine(torch.ones(2, 64)).square().mean())
    if sys.argv[1:] == ["fail"] and engine.rank == 1:
        raise ZeroDivisionError("on purpose")
    engine.step()
"""


def run_script(folder: Path, *arguments: str) -> tuple[int, str]:
    script = folder / "script.py"
    script.write_text(SCRIPT, encoding="ascii")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*command, str(script), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


def test_the_group_that_initialize_made_ends_with_the_script(tmp_path: Path) -> None:
    code, said = run_script(tmp_path)
    assert code == 0, said
    assert said.count("group left: False") == 2, said


def test_an_exception_ends_the_script_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    code, said = run_script(tmp_path, "fail")
    assert code == 1, said
    assert "ZeroDivisionError: on purpose" in said
    assert time.monotonic() - start < 60, "it must not wait for ranks that may never answer"
