"""A user's own script under torchrun, which calls ``dtrain.initialize`` and nothing to end it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.launch import Job

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


FAILS = """
import atexit, os, sys

atexit.register(sum, range(15_000_000))  # the last exit function: it keeps the interpreter's lock beyond those 100 ms
import torch
import torch.distributed as dist
from dtrain.distributed.setup import connect_by_file, disconnect

folder, rank, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
connect_by_file(f"{folder}/store", rank, 2, torch.device("cpu"))
group = dist.group.WORLD  # as an engine keeps it
dist.barrier()
if rank == 1:
    os.environ["SLOW_GLOO"] = "1"
dist.all_reduce(torch.ones(8))
if rank == 0:
    os._exit(0)
if how == "raise":
    raise ZeroDivisionError("on purpose")
disconnect(failed=True)
sys.exit(1)
"""


@pytest.mark.compile
@pytest.mark.parametrize("how", ["raise", "disconnect"])
def test_a_thread_of_gloo_that_is_late_does_not_abort_a_rank_that_failed(tmp_path: Path, how: str) -> None:
    """It takes the interpreter's lock to release a tensor; at the end of the interpreter that was exit code -6."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path / "slow_gloo.so"
    source = Path(__file__).parents[1] / "helpers/slow_gloo.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    (tmp_path / "script.py").write_text(FAILS, encoding="ascii")
    command = [sys.executable, "script.py", str(tmp_path)]
    with (
        Job([*command, "0", how], tmp_path),
        Job([*command, "1", how], tmp_path, {"LD_PRELOAD": str(library)}) as job,
    ):
        assert job.wait() == 1, job.output
        assert ("ZeroDivisionError: on purpose" in job.output) == (how == "raise"), job.output
