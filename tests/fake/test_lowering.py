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
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
]

KERNELS = {"adamw", "_squares", "record", "decide", "_first_nonfinite", "_measure", "_cast", "_scales", "_transpose"}
STREAMING = {"adamw", "_squares", "_first_nonfinite"}
"""Kernels that are bound by memory: they load vectors, and many threads fit on a multiprocessor."""

MAX_REGISTERS = 80
"""Of 65,536: for three programs of eight warps, whose loads are in flight at a time."""


def lowered(*arguments: str) -> list[dict[str, Any]]:
    # in a process of its own: the tests of values have switched Triton to its interpreter in this one
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.fake.lowering", *arguments]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_kernels_compile_for_a_hopper_gpu_and_spill_nothing() -> None:
    found = lowered()
    assert {kernel["kernel"] for kernel in found} >= KERNELS
    assert [kernel for kernel in found if kernel["spills"]] == []
    for kernel in found:
        if kernel["kernel"] in STREAMING:
            assert kernel["registers"] <= MAX_REGISTERS, kernel
            assert kernel["vector_loads"], kernel


def test_a_kernel_that_spills_is_found() -> None:
    (kernel,) = lowered("planted")
    assert kernel["kernel"] == "spilling"
    assert kernel["spills"] > 0
