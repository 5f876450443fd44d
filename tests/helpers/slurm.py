"""Stands in for SLURM's ``srun`` and ``scontrol`` where there is no SLURM: real processes in the environment of tasks.

``srun`` here starts the tasks of a job on this machine, as ``launch/slurm.sbatch`` calls it, or on the hosts of
``NODES`` if that variable is set. Like SLURM's it passes SIGUSR1 on, ends all tasks when one fails
(``--kill-on-bad-exit``), says which, and returns the highest exit code.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.helpers import remote_shell

NODES = "DTRAIN_TEST_SLURM_NODES"
"""Environment variable with the host names of the job, separated by commas."""


def scontrol(argv: Sequence[str]) -> int:
    """``scontrol show hostnames LIST``."""
    assert argv[:2] == ["show", "hostnames"], argv
    print(*_nodes(), sep="\n")
    return 0


def _nodes() -> list[str]:
    here = ",".join([socket.gethostname()] * int(os.environ["SLURM_JOB_NUM_NODES"]))
    return os.environ.get(NODES, here).split(",")


def srun(argv: Sequence[str]) -> int:
    """``srun --kill-on-bad-exit=1 COMMAND``."""
    assert argv[0] == "--kill-on-bad-exit=1", argv
    names, tasks = _nodes(), int(os.environ["SLURM_NTASKS"])
    nodes = len(names)
    per_node = tasks // nodes
    processes = []
    for task in range(tasks):
        step = {
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(tasks),
            "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})" if nodes > 1 else str(per_node),
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task % per_node),
            "SLURM_NODEID": str(task // per_node),
        }
        env = {**os.environ, **step}
        if NODES in os.environ:
            processes.append(remote_shell.start(names[task // per_node], shlex.join(argv[1:]), env, os.getcwd()))
        else:
            processes.append(subprocess.Popen(argv[1:], env=env))
    signal.signal(signal.SIGUSR1, lambda number, frame: [process.send_signal(number) for process in processes])
    while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
        time.sleep(0.05)
    for task, process in enumerate(processes):
        if process.poll():
            node = names[task // per_node]
            print(f"srun: error: {node}: task {task}: {process.returncode}", file=sys.stderr, flush=True)
    for process in processes:
        process.terminate()
    return max(code if code >= 0 else 128 - code for code in [process.wait(30) for process in processes])


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
