"""Finds the rank whose process has ended; a backend that loses a connection names an address at best."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten

import torch.distributed as dist

from dtrain.distributed.communicator import Communicator
from dtrain.distributed.processes import host_identity, process_start
from dtrain.errors import CommunicationError

_EXIT_DELAY_S = 2.0  # the kernel closes a process's connections before it reports that the process has ended


class RankLiveness:
    """Checks whether the processes of the ranks on this host are alive; all ranks construct it together."""

    def __init__(self, comm: Communicator) -> None:
        here = host_identity()
        processes = [
            json.loads(text) for text in comm.exchange_text(json.dumps([here, os.getpid(), process_start("self")]))
        ]
        self._others = {
            rank: (pid, started)
            for rank, (host, pid, started) in enumerate(processes)
            if rank != comm.rank and here is not None and host == here
        }

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
        while not (ended := self.ended_ranks()) and time.monotonic() < deadline:
            time.sleep(0.02)
        reason = shorten(str(error).partition("\n")[0], 300)
        if not ended:
            return CommunicationError(reason)
        names = ", ".join(f"rank {rank} (process {pid})" for rank, pid in ended.items())
        return CommunicationError(f"{names} has ended, so this rank ends too; seen as: {reason}")


def is_lost_connection(error: BaseException) -> bool:
    """Whether ``error`` is a failed collective, dtrain's or a library's: another rank has ended or does not answer."""
    lost = isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))
    return lost or isinstance(error, CommunicationError)
