"""Puts a rank's record where a watcher sees it, and starts the watcher of its host."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtrain.distributed.communicator import Communicator
from dtrain.distributed.logging import logger
from dtrain.distributed.processes import host_identity, process_start
from dtrain.distributed.progress import Phase, Progress
from dtrain.distributed.transport.shared_memory import try_on_every_rank
from dtrain.distributed.transport.sockets import listen_for_ranks
from dtrain.supervision.links import LinkJob, RanksOfHost
from dtrain.supervision.member import Member, WatchJob, share_progress

# appended, because what is installed beside dtrain may have the name of a module of the standard library
_COMMAND = "import sys; sys.path.append({root!r}); from dtrain.supervision.watcher import main; main()"
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_", "TORCHELASTIC_")  # the watcher is no rank
_END_S = 0.2  # for the watcher to see that the run is over


class Supervision:
    """The watch over this rank; without one, its methods do nothing that is seen.

    Args:
        progress: the record of this rank.

    Attributes:
        watcher: the process that this rank has started, if it is the first of its host.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.watcher: subprocess.Popen[str] | None = None

    def start_watcher(self, job: WatchJob) -> None:
        root = str(Path(__file__).resolve().parents[2])
        self.watcher = subprocess.Popen(
            # isolated and without site packages, so that it starts in a few hundredths of a second
            [sys.executable, "-I", "-S", "-c", _COMMAND.format(root=root)],
            pass_fds=[] if job.link is None or job.link.listener is None else [job.link.listener],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",
            env={name: value for name, value in os.environ.items() if not name.startswith(_RANK_VARIABLES)},
            text=True,
            start_new_session=True,  # what stops or ends the group of this rank does not reach it
        )
        self._tell(job.encode())

    def write_failures_to(self, folder: Path) -> None:
        """Tells the watcher where the files of a hang belong."""
        self._tell(json.dumps(str(folder)))

    def _tell(self, line: str) -> None:
        if self.watcher is None:
            return
        assert self.watcher.stdin is not None
        with suppress(OSError):  # it has ended, and has said why
            self.watcher.stdin.write(line + "\n")
            self.watcher.stdin.flush()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Records, when the block ends or fails, that this rank is about to end its run."""
        try:
            yield
        finally:
            self._progress.begin(Phase.END)

    @contextmanager
    def following_compilation(self) -> Iterator[None]:
        """Makes a compilation by ``torch.compile`` a phase of its own, which takes long in the middle of a step too."""
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if handler is None:  # nothing is compiled so far; the import would take seconds
            yield
            return
        progress, interrupted = self._progress, Phase.DATA

        def begin(_: Any) -> None:
            nonlocal interrupted
            interrupted = progress.phase
            progress.begin(Phase.COMPILE)

        def end(_: Any) -> None:
            progress.begin(interrupted)

        callbacks = (handler.start_callbacks, begin), (handler.end_callbacks, end)
        for registered, callback in callbacks:
            registered.append(callback)
        try:
            yield
        finally:
            for registered, callback in callbacks:
                with suppress(ValueError):  # torch.compiler.reset clears them
                    registered.remove(callback)

    def end(self) -> None:
        """Ends the watch; the run is over on this rank."""
        self._progress.end()
        if self.watcher is None:
            return
        assert self.watcher.stdin is not None
        with suppress(OSError):
            self.watcher.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # another rank has not ended its run yet
            self.watcher.wait(_END_S)


@contextmanager
def supervised(comm: Communicator, limits_s: tuple[float, float, float], *, enabled: bool) -> Iterator[Supervision]:
    """Lets a process on each host watch its ranks until the block ends; a collective.

    Args:
        comm: the ranks.
        limits_s: arguments of ``dtrain.supervision.hang.PhaseLimits``.
        enabled: whether to watch at all.
    """
    supervision = Supervision(comm.schedule.progress)
    with ExitStack() as held:

        def describe() -> list[Any] | None:
            if not enabled:
                return None
            reason = unsupported_reason()
            if reason:
                raise OSError(reason)
            member = share_progress(comm.rank, comm.schedule.progress, held)
            return [host_identity(), asdict(member), socket.gethostname()]

        reports, reason = try_on_every_rank(describe, comm.exchange_text)
        if reason:
            logger.info("this run is not watched for hangs: %s", reason)
        here = host_identity()
        members = [Member(**report[1]) for report in reports if report is not None and report[0] == here]
        held.callback(supervision.end)
        with ExitStack() as listening:  # on behalf of the watcher, which inherits the socket
            hosts = {report and tuple(report[0]) for report in reports}  # the same on all ranks, as a collective needs
            link = _link_hosts(comm, reports, listening) if None not in hosts and len(hosts) > 1 else None
            if members and members[0].rank == comm.rank:
                job = WatchJob(tuple(members), comm.world_size, limits_s, link)
                try:
                    supervision.start_watcher(job)
                except OSError as error:
                    logger.warning("this run is not watched for hangs: no process can be started (%s)", error.strerror)
        yield supervision


def _link_hosts(comm: Communicator, reports: list[Any], listening: ExitStack) -> LinkJob | None:
    """Lets rank 0 listen for the watchers of the other hosts; returns how this host's reaches it, or None.

    Args:
        comm: the ranks, which all call.
        reports: host identity, member and host name of each rank.
        listening: closes the socket.
    """
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, (identity, *_) in enumerate(reports):
        ranks.setdefault(tuple(identity), []).append(rank)
    hosts = tuple(RanksOfHost(reports[first][2], (first, *others)) for first, *others in ranks.values())
    index = [*ranks].index(tuple(reports[comm.rank][0]))
    listeners = []

    def open_listener() -> list[Any] | None:
        if comm.rank != 0:
            return None
        listeners.append(listening.enter_context(listen_for_ranks(len(hosts))))
        return [*listeners[0].getsockname()[:2], secrets.token_hex(16)]

    opened, reason = try_on_every_rank(open_listener, comm.exchange_text)
    if reason:
        logger.warning("the hosts do not watch each other: %s", reason)
        return None
    address, port, token = opened[0]
    return LinkJob(hosts, index, address, port, token, listeners[0].fileno() if listeners else None)


def unsupported_reason() -> str:
    """Returns why this process cannot be watched, or nothing."""
    kernel = sys.modules.get("ipykernel.kernelapp")  # it imports a debugger, whether that is used or not
    if kernel is not None and kernel.IPKernelApp.initialized():
        return "it runs in a notebook"
    if sys.gettrace() is not None or any(name in sys.modules for name in ("pydevd", "debugpy")):
        return "it runs in a debugger"
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        return "it runs in a debugger"
    if not hasattr(os, "memfd_create") or host_identity() is None or process_start("self") is None:
        return "this system has no /proc or no memfd_create"
    return ""
