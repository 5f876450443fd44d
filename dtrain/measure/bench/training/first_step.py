"""Times what a user waits for: from the command ``dtrain train`` to the end of its first step."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dtrain.distributed.logging import logger
from dtrain.errors import BenchError
from dtrain.tools.processes import environment

_FIRST_STEP = "step 1/"  # beginning of the console's line for step 1


def time_first_steps(starts: int, threads: int) -> list[float]:
    """Returns the seconds from the command to the console's line of step 1, for each of ``starts`` processes.

    Default model and data on one rank. One more start comes first and is not counted, to warm the file cache.

    Raises:
        BenchError: the command failed.
    """
    if not starts:
        return []
    seconds = [_time_first_step(threads) for _ in range(starts + 1)][1:]
    logger.info("dtrain train, command to first step: %s s", "  ".join(f"{value:.1f}" for value in seconds))
    return seconds


def _time_first_step(threads: int) -> float:
    with tempfile.TemporaryDirectory(prefix="dtrain-bench-") as folder:
        keys = [f"run_dir={Path(folder, 'run')}", "train.log_every=1", f"launch.threads_per_rank={threads}"]
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "dtrain", "train", *keys],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment(threads),
            text=True,
        )
        assert process.stderr is not None
        last = ""
        try:
            for last in process.stderr:
                if last.startswith(_FIRST_STEP):
                    return time.perf_counter() - begin
            raise BenchError(
                f"dtrain train ended with exit code {process.wait()} before its first step: {last.strip()}"
            )
        finally:
            process.kill()
            process.wait()
            process.stderr.close()
