"""The scripts of docs/examples learn what they say, on one rank and on two."""

from __future__ import annotations

import io
import math
import multiprocessing
import os
import re
import runpy
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.launch import LAUNCHER, Job
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

exhaustive = pytest.mark.exhaustive
EXAMPLES = Path(__file__).parents[2] / "docs/examples"


class Output(io.StringIO):
    """Standard output that sends this process SIGTERM once ``trigger`` is printed."""

    def __init__(self, trigger: str | None) -> None:
        super().__init__()
        self._trigger = trigger

    def write(self, text: str) -> int:
        if self._trigger is not None and text.startswith(self._trigger):
            signal.raise_signal(signal.SIGTERM)
        return super().write(text)


def run_script(folder: Path, command: str, stop_at: str | None = None) -> str:
    """Returns what ``python COMMAND`` prints in ``folder``; rank 0 is told to stop after it has printed ``stop_at``."""
    # how DataLoader starts its workers: a rank of the tests inherits forkserver, whose workers would import torch again
    multiprocessing.set_start_method("fork", force=True)
    name, *arguments = command.split()
    os.chdir(folder)
    sys.argv = [name, *arguments]
    with redirect_stdout(Output(stop_at)) as output:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return output.getvalue()


def run_one(rank: int, world: int, folder: Path, command: str) -> str:
    for variable in LAUNCHER:
        os.environ.pop(variable, None)
    return run_script(folder, command)


def run_and_resume(rank: int, world: int, folder: Path) -> list[str]:
    return [
        run_script(folder, "own_loop.py --steps 60 --out whole"),
        run_script(folder, "own_loop.py --steps 60 --out stopped", stop_at="step 50:"),
        run_script(folder, "own_loop.py --steps 60 --out stopped"),
    ]


def skipped(steps: int, world: int) -> list[tuple[int, int, int]]:
    """(step, rank, micro-batch) of sample 1234, which is broken, among 9,999 in batches of 256."""
    found = []
    for epoch in range(math.ceil(steps / 40)):
        order = torch.randperm(9999, generator=torch.Generator().manual_seed(epoch))
        index, place = divmod(int((order == 1234).nonzero()), 256)
        size = 256 // world // 64  # micro-batches of a rank; the last batch of an epoch, of 15 samples, has one
        micro_batch, rank = divmod(place // 64, world) if index < 39 else (0, place * world // 15)
        assert micro_batch < size
        if epoch * 40 + index < steps:
            found.append((epoch * 40 + index + 1, rank, micro_batch))
    return found


def test_own_loop_reports_skips_and_resumes_as_if_never_stopped(tmp_path: Path) -> None:
    (whole, stopped, resumed), *others = run_ranks(2, run_and_resume, tmp_path)
    assert others == [["", "", ""]]  # rank 0 alone prints
    reported = re.findall(r"step (\d+) skipped \(nonfinite_loss\): .* is NaN on rank (\d), micro-batch (\d)", whole)
    assert [tuple(map(int, numbers)) for numbers in reported] == skipped(60, 2)
    assert reported
    assert f"\napplied {60 - len(reported)} of 60 steps; held-out accuracy " in whole
    assert float(whole.split()[-1]) > 0.8

    assert stopped.splitlines()[-1] == "saved stopped/step-00000051"
    assert resumed.startswith("starts after step 51\n")
    tail = [line for line in whole.splitlines() if re.match(r"step (5[2-9]|60)|applied", line)]
    assert [line for line in resumed.splitlines() if line.startswith(("step", "applied"))] == tail


@exhaustive
def test_own_loop_under_torchrun_then_on_one_rank(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    with Job([*launcher, str(EXAMPLES / "own_loop.py"), "--steps=60", f"--out={tmp_path}/run"], tmp_path) as job:
        assert job.wait() == 0, job.output
        assert job.output.count("held-out accuracy") == 1
    (output,) = run_ranks(1, run_one, tmp_path, "own_loop.py --steps 120 --out run")
    assert output.startswith("starts after step 60\n")
    assert float(output.split()[-1]) > 0.97


@pytest.mark.parametrize(("steps", "modes", "percent"), [(20, 0, 0), pytest.param(900, 8, 50, marks=exhaustive)])
def test_gan_covers_more_and_more_modes(tmp_path: Path, steps: int, modes: int, percent: int) -> None:
    (output,) = run_ranks(1, run_one, tmp_path, f"gan.py --steps {steps}")
    found = re.findall(r"step (\d+): covers (\d) of 8 modes; (\d+)% of samples near one", output)
    (_, before, _), *_, (last, covered, near) = [tuple(map(int, numbers)) for numbers in found]
    assert before < 2
    assert last == steps
    assert covered >= modes  # after 600 steps the eighth may be missing, by the rounding of the CPU
    assert near >= percent


@exhaustive  # transformers and peft take seconds to import
def test_lora_trains_adapters_that_peft_loads(tmp_path: Path) -> None:
    output, _ = run_ranks(2, run_one, tmp_path, "lora.py --steps 60 --out adapters")
    numbers = re.search(r"held-out loss ([\d.]+) -> ([\d.]+)\nadapters: held-out loss ([\d.]+) in peft", output)
    assert numbers is not None, output
    before, after, loaded = map(float, numbers.groups())
    assert before > math.log(256)  # of guesses that are equal for all bytes
    assert after < 3.3
    assert loaded == pytest.approx(after, abs=0.01)  # the same products, in other kernels
    adapters = load_file(tmp_path / "adapters/adapter_model.safetensors")
    assert {adapter.dtype for adapter in adapters.values()} == {torch.float32}
    assert all(adapter.any() for adapter in adapters.values())
    # two layers of seven Linears, and the head; hidden 128, intermediate 256, vocabulary 256, r 16
    elements = 16 * (2 * (4 * (128 + 128) + 3 * (128 + 256)) + 128 + 256)
    assert sum(adapter.numel() for adapter in adapters.values()) == elements
    frozen, masters = map(float, re.findall(r"([\d.]+) MB", output))
    assert masters == pytest.approx(4 * elements / 2 / 1e6, rel=0.1)  # FP32, a half on each rank, and padding
    assert frozen == pytest.approx(2 * (2 * (4 * 128**2 + 3 * 128 * 256) + 2 * 256 * 128) / 2 / 1e6, rel=0.1)


@exhaustive
def test_image_folder_counts_each_image_once(tmp_path: Path) -> None:
    output, _ = run_ranks(2, run_one, tmp_path, "image_folder.py --epochs 6")
    scores = re.findall(r"epoch (\d): loss ([\d.]+) over (\d+) images, accuracy ([\d.]+) over (\d+)", output)
    # of 1,300 images 33 batches to train and 9 to test, so rank 1 is short of one in both
    counts = [(int(epoch), int(seen), int(tested)) for epoch, _, seen, _, tested in scores]
    assert counts == [(epoch, 1040, 260) for epoch in range(1, 7)]
    accuracy = float(scores[-1][3])
    assert accuracy > 0.9
    assert float(scores[-1][1]) < 1.0, "2.3 by equal guesses for ten digits"
    pair = re.search(r"worst pair: (\d) taken for (\d), (\d+) times", output)
    assert pair is not None, output
    assert int(pair[3]) <= round(260 * (1 - accuracy))
    assert pair[1] != pair[2]
