"""Part g: a profile of one step of a small model on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.tools.accept.part import PartRequest
from dtrain.tools.accept.parts import profile
from dtrain.tools.accept.parts.profile import ProfiledCase, run, section


def test_a_step_of_a_small_model(tmp_path: Path) -> None:
    results = run(PartRequest("cpu", 60.0, True, str(tmp_path), keep_trace=True))
    (case,) = results["cases"]
    assert (case["name"], case["tokens"]) == ("bf16 eager", 128)
    ms = case["ms_by_class"]
    assert min(ms["matmul"], ms["attention"], ms["optimizer"]) > 0
    assert sum(ms.values()) <= case["wall_ms"] * 1.01
    assert 0 < case["optimizer"]["num_launches"] < case["num_launches"]
    assert len(case["top"]) == 20
    assert set(results["left_out"]) == {"fp8 eager", "bf16 compiled", "fp8 compiled"}
    assert json.loads((tmp_path / "trace-bf16-eager.json").read_text())["traceEvents"]
    (conclusion,) = results["conclusions"]
    assert conclusion.startswith("tiny, bf16 eager, step ")
    text = "\n".join(section(json.loads(json.dumps(results))))
    assert "launches in the optimizer phase (target 5)" in text
    assert "`aten::mm`" in text
    assert section({})


def test_without_memory_the_micro_batch_is_halved_then_the_case_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail(case: ProfiledCase, model: object, micro_batch: int, device: object, keep: object) -> None:
        tried.append(micro_batch)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(profile, "_profile", fail)
    results = run(PartRequest("cpu", 60.0, True, str(tmp_path)))
    assert tried == [2, 1]
    assert results["cases"] == []
    assert results["left_out"]["bf16 eager"] == "OutOfMemoryError: CUDA out of memory"


def test_an_error_of_one_case_is_a_failure_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(case: ProfiledCase, *_: object) -> dict[str, Any]:
        if case.is_compiled:
            raise RuntimeError("no kernel")
        return {"name": case.name}

    monkeypatch.setattr(profile, "_profile", fail)
    monkeypatch.setattr(profile, "_reason_to_leave_out", lambda *_, **__: "")
    monkeypatch.setattr(profile, "conclusions", lambda _: [])
    results = run(PartRequest("cpu", 60.0, True, str(tmp_path)))
    assert [case["name"] for case in results["cases"]] == ["bf16 eager", "fp8 eager"]
    assert results["failures"] == ["bf16 compiled: RuntimeError: no kernel", "fp8 compiled: RuntimeError: no kernel"]
