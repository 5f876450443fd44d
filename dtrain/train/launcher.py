"""Starts the ranks of this machine itself, for ``launch.num_processes``: torch's elastic agent does the work.

Where torchrun listens on all interfaces, the agent here holds its store on 127.0.0.1, on a port that the system gives.
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
from dtrain.distributed.launch_env import LAUNCHER_PID
from dtrain.distributed.setup import LOOPBACK, choose_device
from dtrain.errors import ConfigError, LaunchError
from dtrain.train.run import EXIT_DONE, EXIT_STOPPED, check_run
from dtrain.train.setup import check_precision
from dtrain.train.signals import STOP_SIGNALS


def launch(configs: Sequence[RunConfig], num_processes: int, argv: Sequence[str]) -> int:
    """Runs ``dtrain train ARGV`` on ``num_processes`` ranks of this machine until all have ended.

    SIGTERM, SIGUSR1 and Ctrl-C are passed on to the ranks, once each; what the ranks write appears as it is. When one
    rank fails, the others are ended.

    Args:
        configs: the runs that ``argv`` asks for; checked before any process is started.
        num_processes: how many ranks.
        argv: the command line after the verb.

    Returns:
        0 when all is done, 75 when a signal stopped all ranks after saving, 2 where a rank has refused the config.

    Raises:
        ConfigError: a run that cannot start.
        LaunchError: naming the rank that ended first, and how.
    """
    for config in configs:
        check_run(config)
        device = choose_device(config.launch.device, 0)
        if device.type == "cpu":  # to ask a GPU would open a context on it, which only its rank needs
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
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it would say, we say
    with _environment(), agent.passing_signals_on():
        try:
            result = agent.run()
        except SignalException as stop:
            raise LaunchError(f"{stop.sigval.name} has ended this command, and with it all ranks") from None
    return exit_code(result.failures, num_processes)


class _Loopback(RendezvousHandler):
    """One machine meets itself, in a store that listens on the loopback interface alone."""

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
    """The agent, which passes stop signals on to the ranks where torch's ends them."""

    def __init__(self, spec: WorkerSpec, logs_specs: DefaultLogsSpecs) -> None:
        super().__init__(spec, logs_specs)
        self._early: list[int] = []  # signals that came before there were ranks

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        for number in self._early:
            self._pass_on(number, None)
        return pids

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if isinstance(self._pcontext, SubprocessContext):
            for handler in self._pcontext.subprocess_handlers.values():
                handler.proc.send_signal(number)
        else:
            self._early.append(number)

    @contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """Until the end of the block; then the handlers that were there come back."""
        before = {number: signal.signal(number, self._pass_on) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _environment() -> Iterator[None]:
    """What the ranks inherit: where modules are found, and whom to follow."""
    values = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        LAUNCHER_PID: str(os.getpid()),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGHUP,SIGQUIT",  # the agent's own way of ending; the others are passed on
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
    """Of this command, from the ranks that failed, in the order in which the agent saw it.

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
        # one that was killed takes others with it, which may be seen first; those the agent ends come later
        at_once = failure.timestamp <= first.timestamp + 1
        if first.exitcode > 0 and at_once and failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            rank, first = other, failure
    if first.exitcode == ConfigError.exit_code:
        return ConfigError.exit_code  # the rank has said why
    how = f"was ended by {first.signal_name()}" if first.exitcode < 0 else f"ended with exit code {first.exitcode}"
    raise LaunchError(f"rank {rank} (process {first.pid}) {how}; the others were ended with it")
