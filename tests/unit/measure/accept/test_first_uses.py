"""First uses of a machine, what nvidia-smi says of a GPU, and one run of a case of training."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtrain.config.dump import from_plain
from dtrain.measure.accept import steps
from dtrain.measure.accept.models import MODELS, count_flops
from dtrain.measure.accept.parts import environment, step
from dtrain.measure.accept.parts.environment import conclusions, driver_facts
from dtrain.measure.accept.parts.step import CaseJob, measure
from tests.unit.measure.accept.made import request

CPU = torch.device("cpu")


def test_a_run_on_a_cpu_goes_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        if name in ("deepspeed", "dtrain.engine.adapters.native"):
            raise ImportError(f"No module named '{name}'")
        return import_module(name)

    monkeypatch.setattr(environment, "import_module", find)
    *_, results = environment.run(request(tmp_path))
    assert not dist.is_initialized()
    found = {row["step"]: row["error"] or row["found"] for row in results["steps"]}
    assert found == {
        "import torch": torch.__version__,
        "import dtrain's engine": "ImportError: No module named 'dtrain.engine.adapters.native'",
        "import deepspeed": "ImportError: No module named 'deepspeed'",
        "process group of one rank": "gloo",
    }
    # one that need not work is a fact
    assert results["failures"] == [
        "import dtrain's engine: ImportError: No module named 'dtrain.engine.adapters.native'"
    ]
    assert conclusions(results)[1:] == ["import deepspeed fails: ImportError: No module named 'deepspeed'"]


def test_each_step_is_written_as_it_ends_and_one_that_fails_stops_no_other() -> None:
    def fail() -> None:
        raise ArithmeticError("the result is 1.0\nexpected 2.0")

    results: dict[str, Any] = {"steps": []}
    uses = {"device": lambda: "x" * 500, "Triton kernel": fail, "scaled_mm, blocks of 128": fail, "last": lambda: 4}
    assert [len(found["steps"]) for found in environment._timed(uses, results)] == [1, 2, 3, 4]
    assert [row["found"] for row in results["steps"]] == ["x" * 400, "", "", "4"]
    assert results["failures"] == ["Triton kernel: ArithmeticError: the result is 1.0 expected 2.0"]
    assert conclusions(results)[1] == "scaled_mm, blocks of 128 fails: ArithmeticError: the result is 1.0 expected 2.0"
    environment._require(2.01, 2.0, 1e-2)
    for wrong in (2.1, float("nan")):
        with pytest.raises(ArithmeticError, match="expected 2"):
            environment._require(wrong, 2.0, 1e-2)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("H100, 81559, 580.65, 700.00, 1980\nT4, 15360, 5, 70.00, 1590\n", ["H100", 79.6, "580.65", 700.0, 1980.0]),
        ("NVIDIA GB10, [N/A], 580.65.06, [N/A], [Unknown Error]\n", ["NVIDIA GB10", None, "580.65.06", None, None]),
        ("No devices were found\n", None),
        ("", None),
        (FileNotFoundError("nvidia-smi"), None),
        (subprocess.CalledProcessError(9, "nvidia-smi"), None),
        (subprocess.TimeoutExpired("nvidia-smi", 30), None),
    ],
)
def test_the_driver_describes_the_first_visible_gpu(
    answer: str | Exception, expected: list[Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        given.append(command[-2:])
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(command, 0, answer, "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = ("name", "memory_gib", "driver", "power_limit_w", "max_sm_clock_mhz")
    assert driver_facts() == ({} if expected is None else dict(zip(names, expected, strict=True)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    driver_facts()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert driver_facts() == {}
    assert given == [["-i", "0"], ["-i", "3"]]


def job(name: str, number: int = 0, **changes: Any) -> CaseJob:
    planned = steps.step_job("tiny", name, number, device="cpu", threads=1, size=2)
    return replace(from_plain(CaseJob, planned.options["job"]), warmup=1, windows=1, steps=1, **changes)


def test_a_peer_and_dtrain_start_from_the_same_weights_and_tokens(tmp_path: Path) -> None:
    plain = measure(job(steps.PLAIN))
    planned = steps.step_job("tiny", steps.DTRAIN, 0, device="cpu", threads=1, size=2)
    (results,) = step.run(request(tmp_path, **planned.options))
    own = results["figures"]
    assert own["losses"][:2] == pytest.approx(plain.losses, rel=2e-3)
    # a step before two windows of three, as planned for a CPU
    assert (own["micro_batch"], len(own["losses"]), len(own["window_ms"])) == (2, 7, 2)
    flops = count_flops(MODELS["tiny"])
    assert (own["flops_causal"], own["flops_full"], own["state"]) == (flops.causal, flops.full, None)
    assert plain.formula is None
    held, formula = steps.device_states(own)
    assert formula <= held < 1.02 * formula
    assert own["num_parameters"] == plain.num_parameters
