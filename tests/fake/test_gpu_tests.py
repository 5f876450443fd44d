"""The tests of tests/gpu with the device replaced by the CPU: their assertions and helpers hold before a GPU is there.

Here the first case of each; ``DTRAIN_GPU_TESTS_ON_CPU=1 pytest tests/gpu`` runs all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]


def test_tests_for_a_gpu_pass_with_the_device_replaced_by_the_cpu() -> None:
    environment = {**os.environ, "DTRAIN_GPU_TESTS_ON_CPU": "1"}
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-n", "0", "-rs", "-p", "tests.fake.first_cases"]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    progress = [line for line in done.stdout.splitlines() if line.endswith("%]")]
    assert sum(line.count(".") for line in progress) >= 30, done.stdout
