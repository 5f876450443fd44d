"""Which rank has gone: a backend that loses a connection names an address at best."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

import torch.distributed as dist

from dtrain.distributed.communicator import Communicator
from dtrain.errors import CommunicationError

_PATIENCE_S = 2.0  # connections of a process close before it is seen to have ended


class Peers:
    """The processes of all ranks; those of this host can be looked at.

    All ranks make theirs at the same place in the order of collectives.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._rank = comm.rank
        here = host_identity()
        processes = [
            json.loads(text) for text in comm.exchange_text(json.dumps([here, os.getpid(), process_start("self")]))
        ]
        self._others = {
            rank: (pid, started)
            for rank, (host, pid, started) in enumerate(processes)
            if rank != comm.rank and here is not None and host == here
        }

    def ended(self) -> dict[int, int]:
        """The ranks of this host whose process has ended, with its pid; a zombie has."""
        return {rank: pid for rank, (pid, started) in self._others.items() if process_start(str(pid)) != started}

    @contextmanager
    def named(self) -> Iterator[None]:
        """Says which rank has ended where a collective fails for that.

        Raises:
            CommunicationError: a collective failed, under whatever engine.
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
        deadline = time.monotonic() + _PATIENCE_S
        while not (ended := self.ended()) and time.monotonic() < deadline:
            time.sleep(0.02)
        reason = shorten(str(error).partition("\n")[0], 300)
        if not ended:
            return CommunicationError(reason)
        names = ", ".join(f"rank {rank} (process {pid})" for rank, pid in ended.items())
        return CommunicationError(f"{names} has ended, so this rank ends too; seen as: {reason}")


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective has failed, a library's too: another rank has gone, or does not answer."""
    lost = isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))
    return lost or isinstance(error, CommunicationError)


def host_identity() -> list[str] | None:
    """What ranks that see the same processes have in common; None where the system does not say."""
    try:
        return [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return None


def process_start(process: str) -> str | None:
    """When a process started, in the kernel's ticks; None where it has ended or cannot be seen."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
