"""Stands in for SLURM's ``srun --kill-on-bad-exit=1 COMMAND`` on one node.

It starts the tasks of a job, ends all of them when one fails, says which, and returns the highest exit code.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

if __name__ == "__main__":
    assert sys.argv[1] == "--kill-on-bad-exit=1", sys.argv
    tasks = os.environ["SLURM_NTASKS"]
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_TASKS_PER_NODE": tasks}
    processes = []
    for task in map(str, range(int(tasks))):
        env = {**os.environ, **step, "SLURM_PROCID": task, "SLURM_LOCALID": task, "SLURM_NODEID": "0"}
        processes.append(subprocess.Popen(sys.argv[2:], env=env))
    while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
        time.sleep(0.05)
    for number, process in enumerate(processes):
        if process.poll():
            name = socket.gethostname()
            print(f"srun: error: {name}: task {number}: {process.returncode}", file=sys.stderr, flush=True)
    for process in processes:
        process.terminate()
    sys.exit(max(code if code >= 0 else 128 - code for code in [process.wait(30) for process in processes]))
