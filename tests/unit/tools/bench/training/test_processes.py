"""The real processes of a case: idle between steps, and named with their reason when they fail."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dtrain.cli.resolve import read_suite
from dtrain.config.commands import BENCH_ENGINE
from dtrain.errors import BenchError
from dtrain.tools.bench.records import BenchmarkCase
from dtrain.tools.bench.training.processes import CaseProcesses
from tests.unit.tools.bench.made import TINY

pytestmark = pytest.mark.processes


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_an_idle_rank_uses_no_processor_time_and_a_killed_one_is_named() -> None:
    config = read_suite(TINY, BENCH_ENGINE)
    assert config is not None
    with CaseProcesses(BenchmarkCase("plain", "plain", 1, "fp32"), config) as processes:
        processes.start()
        assert processes.take_steps(0).step_ms == []
        (process,) = processes._processes
        before = _processor_seconds(process.pid)
        assert before > 0.1
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.6)
        assert _processor_seconds(process.pid) - before < 0.1
        process.kill()
        with pytest.raises(BenchError, match="plain: rank 0 ended with exit code -9"):
            processes.take_steps(1)


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_rank_that_fails_is_named_with_its_reason_and_all_are_ended() -> None:
    config = read_suite([*TINY, "model.factory=dtrain.models.transformer:absent"], BENCH_ENGINE)
    assert config is not None
    with CaseProcesses(BenchmarkCase("native, stage 2", "native", 2, "fp32", 2), config) as processes:
        with pytest.raises(BenchError, match=r"native, stage 2: rank [01] failed: .* has no absent"):
            processes.start()
        started = list(processes._processes)
    assert all(process.poll() is not None for process in started)
