"""First uses of a machine, the bits of its casts, and what nvidia-smi says of a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtrain.measure.accept import first_uses
from dtrain.measure.accept.job import DONE, Ended, Lines
from dtrain.measure.accept.lines import read_lines
from dtrain.measure.accept.run import driver_facts
from dtrain.measure.accept.uses import USES, require
from dtrain.precision.float8 import matmul, proof
from dtrain.precision.float8.cast import Quantized, Scaling


def shown(folder: Path) -> Lines:
    return read_lines(Ended("uses", "environment", "", DONE, 1.0, "r.json"), folder)


def test_a_run_on_a_cpu_goes_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        if name in ("deepspeed", "dtrain.engine.adapters.native"):
            raise ImportError(f"No module named '{name}'")
        return import_module(name)

    monkeypatch.setattr(first_uses, "import_module", find)
    assert first_uses.main(["device=cpu", f"out={tmp_path}/r.json"]) == 1
    assert not dist.is_initialized()
    results = json.loads((tmp_path / "r.json").read_text())
    assert {row["step"]: row["error"] or row["found"] for row in results["steps"]} == {
        "import torch": torch.__version__,
        "import dtrain's engine": "ImportError: No module named 'dtrain.engine.adapters.native'",
        "import deepspeed": "ImportError: No module named 'deepspeed'",
        "process group of one rank": "gloo",
    }
    # one that need not work is a fact
    wrong = "import dtrain's engine: ImportError: No module named 'dtrain.engine.adapters.native'"
    assert shown(tmp_path).failures == [wrong]
    assert shown(tmp_path).conclusions[1:] == ["import deepspeed fails: ImportError: No module named 'deepspeed'"]


def test_each_step_is_written_as_it_ends_and_one_that_fails_stops_no_other(tmp_path: Path, monkeypatch: Any) -> None:
    written: list[int] = []

    def fail() -> None:
        written.append(len(json.loads((tmp_path / "r.json").read_text())["steps"]))
        raise ArithmeticError("the result is 1.0\nexpected 2.0")

    uses = {"device": lambda: "x" * 500, "Triton kernel": fail, "scaled_mm, blocks of 128": fail, "last": lambda: 4}
    monkeypatch.setattr(first_uses, "first_uses", lambda device: iter(uses.items()))
    assert first_uses.main([f"out={tmp_path}/r.json"]) == 1
    assert written == [1, 2]
    lines = shown(tmp_path)
    assert lines.failures == ["Triton kernel: ArithmeticError: the result is 1.0 expected 2.0"]
    assert lines.conclusions == [
        "2 of 4 work: all within 0.05 s",
        "scaled_mm, blocks of 128 fails: ArithmeticError: the result is 1.0 expected 2.0",
        f"device: {'x' * 400}",
    ]
    require(2.01, 2.0, 1e-2)
    for wrong in (2.1, float("nan")):
        with pytest.raises(ArithmeticError, match="expected 2"):
            require(wrong, 2.0, 1e-2)


def test_a_wrong_scale_of_a_product_is_found(monkeypatch: Any) -> None:
    """On a CPU, by the emulation; a GPU multiplies them itself."""
    uses, real = [use for name, use in USES.items() if name.startswith("scaled_mm")], matmul.multiply
    monkeypatch.setattr(matmul, "multiply", lambda *sides, emulate: real(*sides, emulate=True))
    cpu = torch.device("cpu")
    kinds = ("(0, 0) by (0, 0)", "(1, 0) by (1, 0)", "(1, 128) by (128, 128)", "(1, 128) by (1, 128)")
    assert [use(cpu) for use in uses] == [f"torch.nn.functional.scaled_mm, scales of {kind}" for kind in kinds]

    def turned(left: Quantized, right: Quantized, *rest: Any, emulate: bool) -> torch.Tensor:
        return real(left, Quantized(right.values, right.scale.flip(0)), *rest, emulate=True)

    monkeypatch.setattr(matmul, "multiply", turned)
    for use in uses[1:]:
        with pytest.raises(ArithmeticError, match="expected 0"):
            use(cpu)


def test_each_variant_of_the_casts_is_compared_and_a_wrong_one_is_a_failure(tmp_path: Path, monkeypatch: Any) -> None:
    seen: list[Any] = []

    def check_quantize(*variant: Any, **options: bool) -> str:
        seen.append((*variant, *options.items()))
        is_wrong = variant[1] == torch.float32 and variant[4] is Scaling.ROWS and all(options.values())
        return f"{variant[2]} of {variant[0]}: other bits" if is_wrong else ""

    monkeypatch.setattr(proof, "check_quantize", check_quantize)
    monkeypatch.setattr(
        proof, "check_weights", lambda device, scaling: "weights: other bits" if scaling is Scaling.ROWS else ""
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.8.0"))
    assert first_uses.main(["what=casts", f"out={tmp_path}/r.json"]) == 1
    # two sources, two formats, three shapes, three scalings, two flags
    assert len(set(seen)) == len(seen) == 2 * 2 * 3 * 3 * 4
    lines = shown(tmp_path)
    assert lines.failures[0] == "weights, scales of (1, 0): ArithmeticError: weights: other bits"
    assert len(lines.failures) == 7
    assert lines.conclusions[0].startswith(f"{148 - 7} of 148 work")
    assert lines.conclusions[1].startswith("Triton: 3.8.0: this version may store garbage")
    assert first_uses.main(["what=casts", "device=cpu"]) == 0


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
