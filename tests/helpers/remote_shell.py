"""Stands in for ``ssh`` and ``pdsh`` between the hosts of ``tests.helpers.hosts``, and for SLURM's ``srun``.

``serve`` runs on each host and listens at a socket in the folder that they share, so that no port is open for it. The
commands get neither the environment nor the working directory of their caller, as with the real ones.

``srun`` starts the tasks of a job, real processes in the environment of tasks, on this machine, as
``launch/slurm.sbatch`` calls it, or on the hosts of ``NODES`` if that variable is set. Like SLURM's it passes SIGUSR1
on, ends all tasks when one fails (``--kill-on-bad-exit``), says which, and returns the highest exit code.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

MARK = "DTRAIN_TEST_JOB"  # here, so that these processes need not import torch
"""Environment variable that all processes of a job have."""
FOLDER = "DTRAIN_TEST_REMOTE_SHELL"
"""Environment variable with the folder of the sockets."""
NODES = "DTRAIN_TEST_SLURM_NODES"
"""Environment variable with the host names of a SLURM job, separated by commas."""
_LOST = 255  # exit code of ssh if the connection ends
_OPTIONS_WITH_VALUE = ("-o", "-p", "-l", "-i")


def install(folder: Path) -> dict[str, str]:
    """Writes ``ssh`` and ``pdsh`` to ``folder``; returns the environment in which they are found."""
    for name in ("ssh", "pdsh"):
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tests.helpers.remote_shell {name} "$@"\n')
        command.chmod(0o755)
    path = f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {FOLDER: str(folder), "PATH": path}


def serve() -> None:
    """Runs commands for the callers of ``ssh`` until it is killed."""
    os.chdir(os.environ[FOLDER])  # the path of a socket is short
    name = f"{socket.gethostname()}.sock"
    Path(name).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_run, args=(connection,), daemon=True).start()


def _run(connection: socket.socket) -> None:
    request, output, *_ = socket.recv_fds(connection, 1 << 16, 2)
    mark, command = request.decode().split("\n", 1)
    env = {"PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8", FOLDER: os.environ[FOLDER], MARK: mark}
    process = subprocess.Popen(
        ["sh", "-c", command], cwd="/", env=env, stdin=subprocess.DEVNULL, stdout=output[0], stderr=output[1],
        start_new_session=True,
    )  # fmt: skip
    for descriptor in output:
        os.close(descriptor)

    def answer() -> None:
        code = process.wait()
        with suppress(OSError):
            connection.sendall(bytes([code if code >= 0 else 128 - code]))

    threading.Thread(target=answer, daemon=True).start()
    while numbers := connection.recv(1):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, numbers[0])


def ssh(argv: Sequence[str]) -> int:
    """``ssh OPTIONS HOST COMMAND``; passes SIGTERM and SIGUSR1 on."""
    words = list(argv)
    while words[0].startswith("-"):
        del words[: 2 if words[0] in _OPTIONS_WITH_VALUE else 1]
    host, *command = words
    with socket.socket(socket.AF_UNIX) as connection:
        os.chdir(os.environ[FOLDER])
        connection.connect(f"{host}.sock")
        request = f"{os.environ.get(MARK, '')}\n{' '.join(command)}".encode()
        socket.send_fds(connection, [request], [1, 2])
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: connection.sendall(bytes([number])))
        return (connection.recv(1) or bytes([_LOST]))[0]


def pdsh(argv: Sequence[str]) -> int:
    """``pdsh -S -f N -w HOST,HOST COMMAND``: on all hosts at once; returns the highest exit code."""
    assert (argv[0], argv[1], argv[3]) == ("-S", "-f", "-w"), argv
    hosts, command = argv[4].split(","), " ".join(argv[5:])
    processes = [start(host, command.replace("%n", str(index))) for index, host in enumerate(hosts)]
    return max(process.wait() for process in processes)


def start(host: str, command: str, env: Mapping[str, str] | None = None, folder: str = "/") -> subprocess.Popen[bytes]:
    """Starts ``command`` on ``host``, in ``folder`` and with ``env`` added to its environment."""
    named = ((name, shlex.quote(value)) for name, value in (env or {}).items() if name.isidentifier())
    exports = "".join(f"export {name}={value}; " for name, value in named)
    return subprocess.Popen(["ssh", host, f"{exports}cd {shlex.quote(folder)}; exec {command}" if env else command])


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
            processes.append(start(names[task // per_node], shlex.join(argv[1:]), env, os.getcwd()))
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
    if sys.argv[1] == "serve":
        serve()
    commands = {"ssh": ssh, "pdsh": pdsh, "srun": srun, "scontrol": scontrol}
    sys.exit(commands[sys.argv[1]](sys.argv[2:]))
