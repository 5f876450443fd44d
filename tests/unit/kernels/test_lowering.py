"""The FP8 kernels compile for GPUs that are not there: no spills, and memory is accessed in vectors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def lowered(capability: int, cache: Path) -> dict[str, Any]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.unit.kernels.lowering", str(capability)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.processes
@pytest.mark.compile
@pytest.mark.parametrize(("capability", "source"), [(89, "f16x2"), (90, "f32")])
def test_kernels_spill_nothing_and_access_memory_in_vectors(capability: int, source: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    for name, found in lowered(capability, tmp_path).items():
        instructions = found["instructions"]
        assert not found["spilled"], (name, found)
        assert found["registers"] <= 128, (name, found["registers"])  # four blocks of 128 threads fit a multiprocessor
        if name == "scales":
            continue
        assert instructions.get("ld.global.v4.b32", 0) >= 4, (name, instructions)
        narrow = sum(instructions.get(f"{what}.global.{size}", 0) for what in ("ld", "st") for size in ("b8", "b16"))
        assert not narrow, (name, instructions)
        if "measure" in name:
            assert any("atom.global.gpu.relaxed.max.s32" in key for key in instructions), (name, instructions)
        else:
            assert instructions.get("st.global.v4.b32", 0) >= 4, (name, instructions)
        if "cast" in name:
            assert instructions.get(f"cvt.rn.satfinite.e4m3x2.{source}", 0) > 0, (name, instructions)
            assert any(key.startswith("min.NaN") for key in instructions), "a clamp that loses NaN"
