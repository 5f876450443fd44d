"""Starts the ranks of this machine for ``launch.num_processes``, with torch's elastic agent.

Unlike torchrun, which listens on all interfaces, the agent here binds its store to 127.0.0.1 and a free port.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from dtrain.config.schema import RunConfig
from dtrain.distributed.startup.launch_env import LAUNCHER_PID
from dtrain.distributed.startup.setup import LOOPBACK, choose_device
from dtrain.errors import ConfigError, LaunchError
from dtrain.train.run import EXIT_DONE, EXIT_STOPPED, check_run
from dtrain.train.setup import check_precision
from dtrain.train.signals import STOP_SIGNALS


def launch(configs: Sequence[RunConfig], num_processes: int, argv: Sequence[str]) -> int:
    """Runs ``dtrain train ARGV`` on ``num_processes`` ranks of this machine until all have ended.

    SIGTERM, SIGUSR1 and Ctrl-C go to the ranks, once each; the output of the ranks appears unchanged. If one
    rank fails, the others are ended.

    Args:
        configs: the runs of ``argv``; checked before any process is started.
        argv: the command line after the verb.

    Returns:
        0 when all is done, 75 when a signal stopped all ranks after saving, 2 if a rank has refused the config.

    Raises:
        ConfigError: a run that cannot start.
        LaunchError: naming the rank that ended first, and how.
    """
    for config in configs:
        check_run(config)
        device = choose_device(config.launch.device, 0)
        if device.type == "cpu":  # querying a GPU would open a context on it, which only its rank needs
            check_precision(config, device)
    spec = WorkerSpec(
        role="dtrain",
        local_world_size=num_processes,
        entrypoint=sys.executable,
        args=("-P", "-m", "dtrain", "train", *argv),
        rdzv_handler=_Loopback(),
        max_restarts=0,
        monitor_interval=0.1,
        local_addr=LOOPBACK,
    )
    agent = _Agent(spec, DefaultLogsSpecs(log_dir=os.devnull))  # no files, no folders
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its findings are in our error
    with _environment(), agent.forwarding_signals():
        try:
            result = agent.run()
        except SignalException as stop:
            raise LaunchError(f"{stop.sigval.name} has ended this command, and with it all ranks") from None
    return exit_code(result.failures, num_processes)


class _Loopback(RendezvousHandler):
    """Rendezvous of one machine, in a store that listens on the loopback interface only."""

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def get_backend(self) -> str:
        return "loopback"

    def get_run_id(self) -> str:
        return "dtrain"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


class _Agent(LocalElasticAgent):
    """Elastic agent that forwards stop signals to the ranks; torch's own ends them."""

    def __init__(self, spec: WorkerSpec, logs_specs: DefaultLogsSpecs) -> None:
        super().__init__(spec, logs_specs)
        self._early: list[int] = []  # signals that arrived before the ranks were started

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        for number in self._early:
            self._forward(number, None)
        return pids

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if isinstance(self._pcontext, SubprocessContext):
            for handler in self._pcontext.subprocess_handlers.values():
                handler.proc.send_signal(number)
        else:
            self._early.append(number)

    @contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        """Forwards stop signals until the end of the block, then restores the previous handlers."""
        before = {number: signal.signal(number, self._forward) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _environment() -> Iterator[None]:
    """Sets the variables that the ranks inherit: the module path and the launcher's process."""
    values = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        LAUNCHER_PID: str(os.getpid()),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGHUP,SIGQUIT",  # end the agent; the others are forwarded
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def exit_code(failures: dict[int, ProcessFailure], num_processes: int) -> int:
    """Exit code of this command, from the failed ranks in the order in which the agent saw them fail.

    Raises:
        LaunchError: naming the rank that ended first, and how.
    """
    if not failures:
        return EXIT_DONE
    codes = [failure.exitcode for failure in failures.values()]
    if codes == [EXIT_STOPPED] * num_processes:
        return EXIT_STOPPED
    rank, first = next(iter(failures.items()))
    for other, failure in failures.items():
        # a killed rank makes others fail, which may be seen first; those that the agent ends come later
        at_once = failure.timestamp <= first.timestamp + 1
        if first.exitcode > 0 and at_once and failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            rank, first = other, failure
    if first.exitcode == ConfigError.exit_code:
        return ConfigError.exit_code  # the rank has printed why
    how = f"was ended by {first.signal_name()}" if first.exitcode < 0 else f"ended with exit code {first.exitcode}"
    raise LaunchError(f"rank {rank} (process {first.pid}) {how}; the others were ended with it")
