"""Code for compute capability 9.0 of every kernel that the engines launch: it compiles, and nothing spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fake.launches import HAS_TRITON

pytestmark = [
    pytest.mark.processes,
    pytest.mark.compile,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
]

STREAMING = {"adamw", "_squares", "_first_nonfinite", "_add_rows", "average"}
"""Kernels that read flat buffers: for three programs of eight warps on a multiprocessor, 80 registers of 65,536."""

FLOAT8 = {"_measure", "_cast", "_transpose"}
"""Kernels that read matrices: for four programs of four warps, 128 registers."""

KERNELS = {*STREAMING, *FLOAT8, "record", "decide", "_scales"}
# by compute capability: the kernels that are compiled for it, and the format through which FP8 numbers are made
CAPABILITIES = {
    80: (KERNELS - FLOAT8 - {"_scales"}, ""),  # without FP8
    89: (FLOAT8, "f16x2"),  # the others have no code of their own for 8.9
    90: (KERNELS, "f32"),
}


def lowered(capability: int) -> list[dict[str, Any]]:
    """All kernels for the capability; for 9.0 also one that spills."""
    # in a process of its own: the tests of values have switched Triton to its interpreter in this one
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    request = f"{capability}:{','.join(sorted(CAPABILITIES[capability][0]))}"
    command = [sys.executable, "-m", "tests.measure.lowering", request, *(["90:spilling"] * (capability == 90))]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_spill_nothing_and_access_memory_in_vectors(capability: int) -> None:
    names, source = CAPABILITIES[capability]
    kernels = lowered(capability)
    found = [kernel for kernel in kernels if kernel["kernel"] != "spilling"]
    spilling = [kernel["spills"] for kernel in kernels if kernel not in found]
    assert len(spilling) == (capability == 90)
    assert all(spilling), "a kernel that spills is found"
    assert {kernel["kernel"] for kernel in found} == names
    for kernel in found:
        name, instructions = kernel["kernel"], kernel["instructions"]
        assert not kernel["spills"], kernel
        if name not in STREAMING | FLOAT8:
            continue
        assert kernel["registers"] <= (80 if name in STREAMING else 128), kernel
        vectors = [key for key in instructions if key.startswith("ld.global.") and (".v4." in key or ".v2.b64" in key)]
        assert vectors, kernel
        if name == "average":
            assert not [key for key in instructions if key.startswith("fma.")], "a fused product is rounded once"
        if name not in FLOAT8:
            continue
        assert not [key for key in instructions if key.endswith(("global.b8", "global.b16"))], kernel
        if name == "_measure":
            assert any("atom.global.gpu.relaxed.max.s32" in key for key in instructions), kernel
        if name == "_cast":
            assert any(key.startswith(f"cvt.rn.satfinite.e4m3x2.{source}") for key in instructions) or any(
                key.startswith(f"cvt.rn.satfinite.e5m2x2.{source}") for key in instructions
            ), kernel
            # Triton 3.8 may store garbage in the transpose of what these have clamped
            assert not any(key.startswith(("min.NaN", "max.NaN")) for key in instructions), kernel
