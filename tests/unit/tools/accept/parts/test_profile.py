"""A profile of one step of a small model on the CPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.tools.accept.parts import profile
from dtrain.tools.accept.parts.profile import ProfiledCase, run, section
from tests.unit.tools.accept.made import request

EAGER = ProfiledCase("bf16", is_compiled=False)


def profiled(folder: Path, case: ProfiledCase, micro_batch: int = 2, **options: Any) -> dict[str, Any]:
    (results,) = run(request(folder, case=asdict(case), micro_batch=micro_batch, **options))
    return results


def test_a_step_of_a_small_model(tmp_path: Path) -> None:
    kept = tmp_path / "trace.json"
    results = profiled(tmp_path, EAGER, keep_trace=str(kept))
    (case,) = results["cases"]
    assert (case["name"], case["tokens"]) == ("bf16 eager", 128)
    ms = case["ms_by_class"]
    assert min(ms["matmul"], ms["attention"], ms["optimizer"]) > 0
    assert sum(ms.values()) <= case["wall_ms"] * 1.01
    assert 0 < case["optimizer"]["num_launches"] < case["num_launches"]
    assert len(case["top"]) == 20
    assert json.loads(kept.read_text())["traceEvents"]
    (conclusion,) = profile.conclusions(results)
    assert conclusion.startswith("tiny, bf16 eager, step ")
    text = "\n".join(section(json.loads(json.dumps(results))))
    assert "| launches in the optimizer phase " in text
    assert "`aten::mm`" in text
    assert section({})
    (chunked,) = profiled(tmp_path, ProfiledCase("bf16", is_compiled=False, is_chunked=True))["cases"]
    assert chunked["name"] == "bf16 eager, chunked loss"


def test_a_case_that_the_device_cannot_run_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "has_compiler", lambda device: False)
    results = profiled(tmp_path, ProfiledCase("fp8", is_compiled=False))
    assert (results["cases"], results["left_out"]) == ([], {"fp8 eager": "no FP8 Tensor Cores"})
    results = profiled(tmp_path, ProfiledCase("bf16", is_compiled=True))
    assert (results["cases"], results["left_out"]) == ([], {"bf16 compiled": "no compiler"})


def test_without_memory_the_micro_batch_is_halved_then_the_case_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail(case: ProfiledCase, model: object, micro_batch: int, device: object, keep: object) -> None:
        tried.append(micro_batch)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(profile, "_profile", fail)
    results = profiled(tmp_path, EAGER, micro_batch=6)
    assert tried == [6, 3, 1]
    assert (results["cases"], results["failures"]) == ([], [])
    assert results["left_out"] == {"bf16 eager": "OutOfMemoryError: CUDA out of memory"}


def test_an_error_of_a_case_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(profile, "_profile", fail)
    assert profiled(tmp_path, EAGER)["failures"] == ["bf16 eager: RuntimeError: no kernel"]
