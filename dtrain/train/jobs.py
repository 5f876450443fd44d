"""Runs the jobs of a command line, one after the other. torch is imported when the first one starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dtrain.cli.resolve import Job
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.errors import ConfigError
from dtrain.redaction.redact import redact_text

if TYPE_CHECKING:
    from dtrain.train.receipt import Planner


def run_jobs(jobs: Sequence[Job], argv: Sequence[str], planner: Planner) -> int:
    """Trains each job in turn; returns the exit code of the first one that fails, else 0.

    With ``launch.num_processes`` they run in new processes, each with the same command line, ``argv``. ``planner``
    plans what their receipts compare with.

    The ``run_dir`` of a job in a sweep is the folder of the sweep; it trains in ``<run_dir>/<number>``. Rank 0's
    folder is broadcast, so that different clocks of the ranks do no harm.
    """
    from dtrain.distributed.startup.setup import processes_to_start
    from dtrain.train.run import run_training

    numbers = sorted({processes_to_start(job.config.launch.num_processes, job.config.launch.device) for job in jobs})
    if len(numbers) > 1:
        raise ConfigError(f"launch.num_processes differs between the jobs ({numbers}); start a sweep for each number")
    if numbers != [1]:
        from dtrain.train.launcher import launch

        return launch([job.config for job in jobs], numbers[0], argv)
    for job in jobs:
        if job.number is not None and LaunchEnv.read().rank == 0:
            folder = f"{job.config.run_dir}/{job.number}"
            line = redact_text(f"job {job.number}/{len(jobs)}: {job.label or 'one run'} -> {folder}")
            print(line, file=sys.stderr, flush=True)
        code = run_training(job.config, job=job.number, planner=planner)
        if code:
            return code
    return 0
