"""First uses on the CPU, and what nvidia-smi says of a GPU."""

from __future__ import annotations

import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtrain.tools.accept.parts import environment
from dtrain.tools.accept.parts.environment import conclusions, driver_facts, run, section
from tests.unit.tools.accept.made import request


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    def find(name: str) -> Any:
        if name in missing:
            raise ImportError(f"No module named '{name}'")
        return import_module(name)

    monkeypatch.setattr(environment, "import_module", find)


def test_a_run_on_a_cpu_goes_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "deepspeed", "dtrain.engine.native")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    *_, results = run(request(tmp_path))
    assert not dist.is_initialized()
    found = {row["step"]: row["error"] or row["found"] for row in results["steps"]}
    assert found == {
        "import torch": import_module("torch").__version__,
        "import dtrain's engine": "ImportError: No module named 'dtrain.engine.native'",
        "import deepspeed": "ImportError: No module named 'deepspeed'",
        "process group of one rank": "gloo",
    }
    # one that need not work is a fact
    assert results["failures"] == ["import dtrain's engine: ImportError: No module named 'dtrain.engine.native'"]
    assert conclusions(results)[1:] == ["import deepspeed fails: ImportError: No module named 'deepspeed'"]
    assert results["host"]["packages"]["pytest"] == pytest.__version__
    assert results["host"]["environment"]["NCCL_DEBUG"] == "INFO"
    text = "\n".join(section(results))
    assert "| FAILS: ImportError: No module named 'deepspeed'" in text
    assert "- memory_gib: " in text


def test_each_step_is_written_as_it_ends_and_one_that_fails_stops_no_other() -> None:
    def fail() -> None:
        raise ArithmeticError("the result is 1.0\nexpected 2.0")

    results: dict[str, Any] = {"steps": []}
    steps = {"device": lambda: "x" * 500, "Triton kernel": fail, "scaled_mm, blocks of 128": fail, "last": lambda: 4}
    counts = [len(found["steps"]) for found in environment._timed(steps, results)]
    assert counts == [1, 2, 3, 4]
    assert [row["found"] for row in results["steps"]] == ["x" * 400, "", "", "4"]
    assert results["failures"] == ["Triton kernel: ArithmeticError: the result is 1.0 expected 2.0"]
    assert conclusions(results) == [
        "first uses: all within 0.05 s",
        "scaled_mm, blocks of 128 fails: ArithmeticError: the result is 1.0 expected 2.0",
        f"device: {'x' * 400}",
    ]


def test_a_first_use_with_a_wrong_result_fails() -> None:
    environment._require(2.01, 2.0, 1e-2)
    for wrong in (2.1, float("nan")):
        with pytest.raises(ArithmeticError, match="expected 2"):
            environment._require(wrong, 2.0, 1e-2)


# -- nvidia-smi --------------------------------------------------------------------------------------------------------


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[list[str]]:
    """Commands that were given to an nvidia-smi which answers with the test's parameter."""
    given: list[list[str]] = []

    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        given.append(command)
        if isinstance(request.param, Exception):
            raise request.param
        return subprocess.CompletedProcess(command, 0, request.param, "")

    monkeypatch.setattr(subprocess, "run", answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return given


TWO_GPUS = "NVIDIA H100 80GB HBM3, 81559, 580.65.06, 700.00, 1980\nNVIDIA T4, 15360, 580.65.06, 70.00, 1590\n"


@pytest.mark.parametrize("commands", [TWO_GPUS], indirect=True)
def test_the_driver_describes_the_first_visible_gpu(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver_facts() == {
        "name": "NVIDIA H100 80GB HBM3",
        "memory_gib": 79.6,
        "driver": "580.65.06",
        "power_limit_w": 700.0,
        "max_sm_clock_mhz": 1980.0,
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    driver_facts()
    assert [command[-2:] for command in commands] == [["-i", "0"], ["-i", "3"]]
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert driver_facts() == {}
    assert len(commands) == 2


@pytest.mark.parametrize("commands", ["NVIDIA GB10, [N/A], 580.65.06, [N/A], [Unknown Error]\n"], indirect=True)
def test_a_value_that_the_driver_does_not_tell_is_none(commands: list[list[str]]) -> None:
    facts = driver_facts()
    assert (facts["name"], facts["driver"]) == ("NVIDIA GB10", "580.65.06")
    assert [facts[key] for key in ("memory_gib", "power_limit_w", "max_sm_clock_mhz")] == [None] * 3
    assert commands


@pytest.mark.parametrize(
    "commands",
    [
        FileNotFoundError("nvidia-smi"),
        subprocess.CalledProcessError(9, "nvidia-smi"),
        subprocess.TimeoutExpired("nvidia-smi", 30),
        "",
        "No devices were found\n",
    ],
    indirect=True,
)
def test_without_a_driver_there_are_no_facts(commands: list[list[str]]) -> None:
    assert driver_facts() == {}
    assert len(commands) == 1


@pytest.mark.parametrize("what", ["scaled_mm_blocks", "scaled_mm"])
def test_the_scales_of_products_have_the_shapes_that_torch_requires(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """On the meta device torch checks the operands as on a GPU."""
    monkeypatch.setattr(environment, "_error", lambda got, want: 0.0 if got.shape == want.shape else 1.0)
    uses = environment._FirstUses(torch.device("meta"))
    for options in [{"rowwise": False}, {"rowwise": True}] if what == "scaled_mm" else [{}]:
        assert getattr(uses, what)(**options)
