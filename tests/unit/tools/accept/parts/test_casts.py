"""The casts: every variant is compared, and a wrong one is a failure."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtrain.tools.accept.parts import casts
from dtrain.tools.accept.parts.casts import conclusions, run, section
from tests.unit.tools.accept.made import request


def test_a_cpu_has_no_kernels(tmp_path: Path) -> None:
    (results,) = run(request(tmp_path))
    assert list(results["left_out"]) == ["cast kernels"]
    assert (results["failures"], conclusions(results)) == ([], ["FP8 casts: no kernels on a CPU"])


def test_each_variant_is_compared_and_a_wrong_one_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def check_quantize(*variant: Any, **options: bool) -> str:
        seen.append((*variant, *options.items()))
        is_wrong = variant[1] == torch.float32 and options == {"rowwise": True, "both": True, "turned": True}
        return f"{variant[2]} of {variant[0]}: other bits" if is_wrong else ""

    monkeypatch.setattr(casts, "check_quantize", check_quantize)
    monkeypatch.setattr(casts, "check_weights", lambda device, *, rowwise: "weights: other bits" if rowwise else "")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.8.0"))
    every = list(run(replace(request(tmp_path), device="cuda")))
    results = every[-1]
    # two sources, two formats, three shapes, three flags; and two of the weights
    assert len(set(seen)) == len(seen) == 2 * 2 * 3 * 8
    assert len(every) == 96 + 2
    assert results["failures"][0] == "weights: other bits"
    assert len(results["failures"]) == 1 + 2 * 3
    assert results["equal"] == 98 - 7
    (line,) = conclusions(results)
    assert line.startswith(
        "FP8 casts by Triton 3.8.0: 91 variants with the bits of tensor code, 7 without; this version "
    )
    assert section(results)[-1] == line
    assert "this version" not in conclusions(results | {"triton": "3.6.0"})[0]
