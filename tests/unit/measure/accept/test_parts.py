"""The parts that measure: one run of each on a CPU, their arithmetic by hand, and what they conclude."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtrain.measure.accept.parts import casts, gpu_tests, memory, optimizer, profile, rates
from dtrain.measure.accept.parts.gpu_tests import conclusions, counts, read_records, section
from tests.unit.measure.accept.made import last, request

CPU = torch.device("cpu")


def test_a_rate_counts_two_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "repeated_ms", lambda operation, device, *, budget_s: [9.0, 2.0, 1.0])
    measurement = rates.Measurement(CPU, float("inf"), 0.01)
    measurement.measure_product(rates.Product("bf16", "square", 100, 200, 300))
    measurement.measure_copy("copy", lambda: (lambda: None, 6_000_000))
    assert measurement.results["matmuls"][0]["tflops"] == pytest.approx(0.006)  # 12 million in 2 ms
    assert measurement.results["copies"][0]["gb_per_s"] == pytest.approx(3.0)


def test_the_optimizer_phase_on_a_cpu(tmp_path: Path) -> None:
    results = last(optimizer.run(request(tmp_path, seconds=5.0)))
    assert (results["failures"], results["device"]) == ([], "cpu")
    (found,) = results["cases"]
    assert {key: len(values) for key, values in found["ms"].items()} == {"dtrain": 5, "torch": 5, "copy": 5}
    assert 26 < found["bytes_a_parameter"] < 36
    assert found["trace"]["num_launches"] > 0
    states = {"master": 4000, "moments": 8000, "compute": 2000, "buffers": 17}
    assert [optimizer.moved_bytes({**states, "main_grad": 1000 * size}) for size in (2, 4)] == [30_000, 34_000]


def test_engines_on_a_cpu_hold_what_the_formula_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PRECISIONS", ("bf16",))
    results = last(memory.run(request(tmp_path, what="states")))
    assert (results["failures"], results["left_out"]) == ([], {})
    assert [found["stage"] for found in results["states"]] == [0, 1, 2, 3]
    for found in results["states"]:
        assert 1.0 <= found["ratio"] < 1.02
        held = sum(found["memory"][kind] for kind in found["formula"])
        assert held / sum(found["formula"].values()) == pytest.approx(found["ratio"])


EAGER = profile.ProfiledCase("bf16", is_compiled=False)


def profiled(folder: Path, case: profile.ProfiledCase, micro_batch: int = 2, **options: Any) -> dict[str, Any]:
    (results,) = profile.run(request(folder, case=asdict(case), micro_batch=micro_batch, **options))
    return results


def test_a_step_of_a_small_model(tmp_path: Path) -> None:
    results = profiled(tmp_path, replace(EAGER, is_chunked=True))
    (case,) = results["cases"]
    assert (case["name"], case["tokens"]) == ("bf16 eager, chunked loss", 128)
    ms = case["ms_by_class"]
    assert min(ms["matmul"], ms["attention"], ms["optimizer"]) > 0
    assert sum(ms.values()) <= case["wall_ms"] * 1.01
    assert 0 < case["optimizer"]["num_launches"] < case["num_launches"]
    assert len(case["top"]) == 20


def test_without_memory_the_micro_batch_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def fail(case: object, model: object, micro_batch: int, *_: object) -> None:
        tried.append(micro_batch)
        raise torch.OutOfMemoryError("CUDA out of memory") if micro_batch < 9 else RuntimeError("no kernel")

    monkeypatch.setattr(profile, "_profile", fail)
    results = profiled(tmp_path, EAGER, micro_batch=6)
    assert (tried, results["cases"], results["failures"]) == ([6, 3, 1], [], [])
    assert profiled(tmp_path, EAGER, micro_batch=9)["failures"] == ["bf16 eager: RuntimeError: no kernel"]


def test_each_variant_of_the_casts_is_compared_and_a_wrong_one_is_a_failure(tmp_path: Path, monkeypatch: Any) -> None:
    seen: list[Any] = []

    def check_quantize(*variant: Any, **options: bool) -> str:
        seen.append((*variant, *options.items()))
        is_wrong = variant[1] == torch.float32 and options == {"rowwise": True, "both": True, "turned": True}
        return f"{variant[2]} of {variant[0]}: other bits" if is_wrong else ""

    monkeypatch.setattr(casts, "check_quantize", check_quantize)
    monkeypatch.setattr(casts, "check_weights", lambda device, *, rowwise: "weights: other bits" if rowwise else "")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.8.0"))
    every = list(casts.run(replace(request(tmp_path), device="cuda")))
    results = every[-1]
    # two sources, two formats, three shapes, three flags; and two of the weights
    assert len(set(seen)) == len(seen) == 2 * 2 * 3 * 8 == len(every) - 2
    assert results["failures"][0] == "weights: other bits"
    assert (len(results["failures"]), results["equal"]) == (7, 91)
    (line,) = casts.conclusions(results)
    assert line.startswith("FP8 casts by Triton 3.8.0: 91 variants with the bits of tensor code, 7 without; this vers")


# the tests of tests/gpu as a job runs them: a crash or a dead device costs one test
TESTS = """
import os, pytest
def test_passes(): pass
def test_fails(): assert 1 == 2, "one"
@pytest.mark.skip(reason="older than Ampere")
def test_skipped(): pass
def test_crashes(): os.abort()
def test_dies(dead): pass
def test_after(): pass
"""
DEAD = """
import pytest
from dtrain.measure.accept import recorder
@pytest.fixture
def dead():
    recorder._context_error = lambda: "CUDA error: an illegal memory access"
    raise RuntimeError("illegal address")
"""


def run(root: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, workers: int) -> list[dict[str, Any]]:
    folder = root / "tests/gpu"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    if not workers:
        monkeypatch.setattr(gpu_tests, "find_spec", lambda name: None if name == "xdist" else object())
    monkeypatch.setattr(gpu_tests, "_SAVE_S", 0.0)
    monkeypatch.setenv("PYTEST_ADDOPTS", "")
    names = [f"tests/gpu/{name}" for name in files if name.startswith("test_")]
    return list(gpu_tests.run(request(root, files=names, workers=workers, root=str(root))))


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [0, 2])
def test_a_crash_costs_one_test(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"conftest.py": DEAD, "test_engine.py": TESTS, "test_bad.py": "import nothing_here"}
    partial, results = run(tmp_path, files, monkeypatch, workers)[-2:]
    assert partial["tests"] is not results["tests"], "results so far were yielded"
    assert counts(results["tests"]) == {"passed": 2, "failed": 3, "skipped": 1, "not ended": 1}
    name = "tests/gpu/test_engine.py::test_"
    found = dict(line.split(": ", 1) for line in results["failures"])
    assert found[f"{name}fails"].startswith("AssertionError: one")
    assert found[f"{name}crashes"] == "its process ended in it"
    assert "does not answer after it: CUDA error: an illegal memory access" in found[f"{name}dies"]
    assert "No module named 'nothing_here'" in found["tests/gpu/test_bad.py"]
    text = "\n".join(section(results))
    assert "- 1 test: Skipped: older than Ampere" in text
    assert "assert 1 == 2" in text
    assert conclusions(results)[0].startswith("tests: 3 failed, 1 not ended, 2 passed, 1 skipped")


def test_half_a_record_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    lines = ['{"begin": "a"}', '{"test": "a", "outcome": "failed", "when": "call"}']
    lines += ['{"test": "a", "outcome": "skipped", "when": "teardown"}', '{"begin": "b"}', '{"test": "b", "outc']
    path.write_text("\n".join(lines))
    found = read_records(path)
    assert found["b"] is None
    assert (found["a"] or {})["outcome"] == "failed", "the worse phase of a test"
