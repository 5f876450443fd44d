"""The process groups that dtrain has made, and their end when the process exits.

[Note: groups at exit] A thread of gloo drops the tensors of a collective a moment after the collective has ended. The
last reference to a tensor takes the interpreter's lock, and before Python 3.14 (gh-87135) a thread that waits for it
while the interpreter ends aborts the process: exit code -6, now and then, on a busy machine. So dtrain destroys the
groups that it has made, which ends their threads; a group of the user stays. Where a thread remains, of a user's group
or of one that an engine or a traceback still holds, the exit waits until it sleeps.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from dtrain.distributed.communicator import Communicator

_LIMIT_S = 5.0  # of the wait for gloo's threads; they need microseconds of a processor
_PAUSE_S = 0.002
_TAG = 0x64747261  # of a receive: unlikely to be a user's

_own: WeakSet[dist.ProcessGroup] = WeakSet()
_communicators: WeakSet[Communicator] = WeakSet()  # which hold groups


def _leave_to_parent() -> None:
    """Keeps a forked process from destroying groups: it has its parent's, without threads, and would wait for these."""
    for group in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _own.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def close_at_exit(group: dist.ProcessGroup | None) -> None:
    """Registers ``group``, which dtrain has just made, to be destroyed when this process exits; None: there is none."""
    if group is None:
        return
    if not _own:  # with the first group: functions that are registered later may use the groups
        atexit.unregister(_destroy_own)
        atexit.register(_destroy_own)
    _own.add(group)


def uses_group(comm: Communicator) -> None:
    """Registers ``comm`` to drop its reference to its group before that is destroyed: else its threads go on."""
    _communicators.add(comm)


def destroy(group: dist.ProcessGroup | None = None, *, failed: bool) -> None:
    """Destroys a process group; None: all.

    Args:
        group: see above.
        failed: NCCL would first wait for the collectives in flight, which the other ranks may never join; they are
            aborted instead.
    """
    if failed and "nccl" in dist.get_backend_config(group):
        with suppress(RuntimeError):  # the error that made this rank fail comes first
            _abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def end_connections(group: dist.ProcessGroup) -> None:
    """Ends gloo's connections of ``group``, so that all that wait for this rank fail; gloo's own ``abort`` does not."""
    nothing = torch.empty(1, dtype=torch.uint8)
    with suppress(RuntimeError):  # a receive that times out breaks all pairs of its context
        group.recv([nothing], (dist.get_rank(group) + 1) % dist.get_world_size(group), _TAG).wait(
            timedelta(milliseconds=1)
        )


def _destroy_own() -> None:
    """Destroys the groups of ``close_at_exit`` that are still there; see [Note: groups at exit].

    After an uncaught exception the other ranks may never join the collectives in flight, and gloo's threads would wait
    for them: the connections are ended first.
    """
    failed = hasattr(sys, "last_value")
    known = dist.distributed_c10d._world.pg_map
    all_go = dist.group.WORLD in _own
    groups = list(known) if all_go else [group for group in list(_own) if group in known]
    for comm in list(_communicators):
        if comm.process_group in groups:
            comm.release()
    for group in groups if failed else ():
        if dist.get_backend(group) == "gloo" and dist.get_world_size(group) > 1:
            end_connections(group)
    while groups:
        group = groups.pop()
        if not all_go:
            destroy(group, failed=failed)
    if all_go:
        destroy(failed=failed)


@atexit.register  # on import: functions that are registered later, by users of a group, are called before it
def _let_threads_release() -> None:
    """Waits, at most ``_LIMIT_S``, until all threads of gloo sleep: they have dropped tensors, or wait for a rank."""
    deadline, calm = time.monotonic() + _LIMIT_S, 0
    while calm < 2 and time.monotonic() < deadline and (states := _gloo_threads()):
        time.sleep(_PAUSE_S)  # without the interpreter's lock, which wakes a thread that waits for it
        calm = 0 if "R" in _gloo_threads() or "R" in states else calm + 1


def _gloo_threads() -> list[str]:
    """Returns the state of each thread of gloo, "R" if it runs or is ready; none without Linux's ``/proc``."""
    found = []
    for task in Path("/proc/self/task").glob("*") if dist.is_available() else ():
        with suppress(OSError):  # it has ended
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if "gloo" in name:
                found.append(rest.split()[0])
    return found
