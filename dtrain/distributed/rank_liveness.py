"""Finds the rank whose process has ended; a backend that loses a connection names an address at best."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten

import torch.distributed as dist

from dtrain.distributed.communicator import Communicator
from dtrain.distributed.processes import host_identity, name_ranks, process_start
from dtrain.errors import CommunicationError

_EXIT_DELAY_S = 2.0  # the kernel closes a process's connections before it reports that the process has ended


class RankLiveness:
    """Checks whether the processes of the ranks on this host are alive; all ranks construct it together."""

    def __init__(self, comm: Communicator) -> None:
        here = host_identity()
        mine = json.dumps([here, os.getpid(), process_start("self"), socket.gethostname()])
        self._schedule = comm.schedule
        self._others: dict[int, tuple[int, str]] = {}  # on this host
        self._host_names: dict[int, str] = {}  # of those on other hosts
        for rank, (host, pid, started, name) in enumerate(map(json.loads, comm.exchange_text(mine))):
            if here is None or host != here:
                self._host_names[rank] = name
            elif rank != comm.rank:
                self._others[rank] = pid, started

    def ended_ranks(self) -> dict[int, int]:
        """Returns {rank: pid} of the ranks of this host whose process has ended; a zombie has."""
        # by its start too, because the kernel may give the number to another process
        return {rank: pid for rank, (pid, started) in self._others.items() if process_start(str(pid)) != started}

    @contextmanager
    def name_ended_rank(self) -> Iterator[None]:
        """Adds the rank that has ended to the error of a failed collective.

        Raises:
            CommunicationError: a collective of any engine failed.
        """
        try:
            yield
        except RuntimeError as error:
            if is_lost_connection(error):
                raise self._explain(error) from error
            raise
        except CommunicationError as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> CommunicationError:
        deadline = time.monotonic() + _EXIT_DELAY_S
        elsewhere = self._ended_elsewhere()
        while not (ended := self.ended_ranks()) and not elsewhere and time.monotonic() < deadline:
            time.sleep(0.02)
        reason = shorten(str(error).partition("\n")[0], 300)
        names = [f"rank {rank} (process {pid})" for rank, pid in ended.items()]
        names += [f"{name_ranks(ranks)} on {host}" for host, ranks in elsewhere.items()]
        if not names:
            return CommunicationError(reason)
        verb = "has" if len(ended) + sum(map(len, elsewhere.values())) == 1 else "have"
        return CommunicationError(f"{', '.join(names)} {verb} ended, so this rank ends too; seen as: {reason}")

    def _ended_elsewhere(self) -> dict[str, list[int]]:
        """Returns {host name: ranks} of the ranks on other hosts whose connections have ended."""
        found: dict[str, list[int]] = {}
        for rank in sorted(self._schedule.ended_ranks & self._host_names.keys()):
            found.setdefault(self._host_names[rank], []).append(rank)
        return found


def is_lost_connection(error: BaseException) -> bool:
    """Whether ``error`` is a failed collective, dtrain's or a library's: another rank has ended or does not answer."""
    lost = isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))
    return lost or isinstance(error, CommunicationError)
