"""Runs a function on real ranks: resident processes, forked once from a server with torch preloaded; gloo, no port.

A job gets a process group of its own. A rank that raised, died, or still holds something of its job afterwards
(a replaced attribute, a thread, a process, a signal handler) is replaced before the next job.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_ENGINES = [f"dtrain.engine.adapters.{name}" for name in ("native", "fsdp2", "ddp", "deepspeed")]
_context.set_forkserver_preload(
    ["tests.helpers.preload", "dtrain.train.run", *_ENGINES, "tests.helpers.launch", "tests.engines.checks"]
)
_POOL = 4
"""Number of ranks that stay between jobs."""
_PATCHED = (
    *("builtins", "io", "os", "shutil", "socket", "subprocess", "threading", "time"),
    *("torch", "torch.autograd", "torch.distributed", "torch.distributed.distributed_c10d", "torch.nn.functional"),
)
"""Modules of others whose functions a job may replace."""
_WATCHED = ("dtrain", "tests", "deepspeed")
"""Packages in which a job may replace anything."""


class RankFailure(AssertionError):
    """One or more ranks raised; the message holds every traceback."""


class _Attributes:
    """The identities of what a module holds, and of the functions and constants of its classes."""

    def __init__(self, module: ModuleType) -> None:
        is_own = module.__name__ not in _PATCHED
        classes = [held for held in vars(module).values() if is_own and isinstance(held, type)]
        self._spaces = [vars(module), *(vars(held) for held in classes if held.__module__ == module.__name__)]
        self._all = self._identities()
        kinds = (FunctionType, property, staticmethod, classmethod, int, str)
        self._held = [
            {key: id(held) for key, held in vars(module).items() if not isinstance(held, ModuleType)}
            if is_own
            else {key: id(held) for key, held in vars(module).items() if callable(held)},
            *({key: id(held) for key, held in space.items() if isinstance(held, kinds)} for space in self._spaces[1:]),
        ]

    def _identities(self) -> list[list[int]]:
        return [list(map(id, space.values())) for space in self._spaces]

    def has_changed(self) -> bool:
        """Whether anything is new or another; in a hundredth of the time of a comparison by name."""
        return self._identities() != self._all

    def differs(self, now: _Attributes) -> bool:
        """Whether anything that was there is another."""
        pairs = zip(self._held, now._held, strict=False)
        return any(after.get(key) != held for before, after in pairs for key, held in before.items())


class _State:
    """What a job may change in its process. What can be put back is put back; the rest costs the process its place."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._folder = os.getcwd()
        self._streams = [os.dup(number) for number in range(3)]
        self._handlers = self._signal_handlers()
        self._threads = threading.active_count()
        self._attributes: dict[str, _Attributes] = {}
        self._replaces_attributes()

    @staticmethod
    def _signal_handlers() -> dict[int, Any]:
        return {number: signal.getsignal(number) for number in signal.valid_signals()}

    def _replaces_attributes(self) -> bool:
        """Whether an attribute of a watched module or of its classes is another than before; looks at new ones too."""
        replaced = False
        for name, module in list(sys.modules.items()):
            if not isinstance(module, ModuleType) or not (name in _PATCHED or name.partition(".")[0] in _WATCHED):
                continue
            before = self._attributes.get(name)
            if before is None or before.has_changed():
                now = self._attributes[name] = _Attributes(module)
                replaced |= before is not None and before.differs(now)
        return replaced

    def is_restored(self) -> bool:
        """Puts back the environment, the folder and the streams; returns whether all else is as it was or new."""
        for number, stream in enumerate(self._streams):
            os.dup2(stream, number)
        os.chdir(self._folder)
        if os.environ != self._environ:
            os.environ.clear()
            os.environ.update(self._environ)
        replaced = self._replaces_attributes()
        return not (
            replaced
            or threading.active_count() > self._threads
            or any("gloo" in task.read_text() for task in Path("/proc/self/task").glob("*/comm"))
            or multiprocessing.active_children()
            or self._signal_handlers() != self._handlers
            or torch.get_default_dtype() != torch.float32
        )


def _run(
    test: str, rank: int, world: int, store: str, fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[bool, bytes]:
    from dtrain.train.setup import torch_settings_restored

    if (coverage := sys.modules.get("coverage")) is not None and (current := coverage.Coverage.current()) is not None:
        current.switch_context(test.split("::")[0])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        if world > 1:
            dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
            dist.barrier()  # a rank that leaves while another one still connects would make that one fail
        with torch_settings_restored():
            # plain pickle copies tensors; the pipe's own would share their memory, which dies with this process
            return True, pickle.dumps(fn(rank, world, *args))
    except BaseException:
        return False, pickle.dumps(traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _serve(pipe: Connection) -> None:
    """Takes jobs until one has damaged this process, or the pipe is closed."""
    gc.freeze()  # a collection that visits what the server has imported would copy those pages, at a second of CPU
    state = _State()
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        ok, result = _run(*job)
        del job
        gc.collect()
        stays = ok and state.is_restored()
        pipe.send_bytes(pickle.dumps((stays, ok, result)))
        if not stays:
            return


class _Rank:
    """A process that waits for jobs."""

    def __init__(self) -> None:
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs,))
        self.process.start()
        theirs.close()
        self.stays = False

    def end(self, patience: float = 0.5) -> None:
        self.pipe.close()
        self.process.join(timeout=patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


_ranks: list[_Rank] = []


@atexit.register
def _end_all() -> None:
    for rank in _ranks:
        rank.end(patience=10.0)
    _ranks.clear()


def fork(fn: Callable[..., Any], *args: Any) -> ForkServerProcess:
    """Starts ``fn(*args)`` in a process forked from the server."""
    process = _context.Process(target=fn, args=args)
    process.start()
    return process


def run_ranks(
    world: int, fn: Callable[..., Any], *args: Any, timeout: float = 240.0, grace: float = 2.0, fresh: bool = False
) -> list[Any]:
    """Calls ``fn(rank, world, *args)`` on ``world`` processes and returns their results in rank order.

    Args:
        world: the number of ranks.
        fn: a module-level function; it finds a gloo process group (none at world 1) and one thread.
        args: its arguments.
        timeout: seconds for all.
        grace: once a rank has failed, each of the others has these seconds to return or raise; then it is killed.
        fresh: in new processes, whose memory and compiled code are nobody else's.

    Raises:
        RankFailure: a rank raised or died, or the time is over.
    """
    sys.audit("tests.Process.start", f"{world} ranks")  # they may be there already, and still need the marker
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    ranks = [] if fresh else _ranks[-world:]  # those of the last job, in their order
    del _ranks[len(_ranks) - len(ranks) :]
    ranks += [_Rank() for _ in range(world - len(ranks))]
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number, rank in enumerate(ranks):
                rank.stays = False
                rank.pipe.send((test, number, world, f"{folder}/store", fn, args))
            return _collect(ranks, timeout, grace)
    finally:
        for rank in ranks:
            if rank.stays and not fresh and len(_ranks) < _POOL:
                _ranks.append(rank)
            else:
                rank.end()


def _collect(ranks: list[_Rank], timeout: float, grace: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    numbers = {id(rank.pipe): number for number, rank in enumerate(ranks)}
    deadline = time.monotonic() + timeout
    while len(results) + len(failures) < len(ranks):
        pending = [rank.pipe for number, rank in enumerate(ranks) if number not in results and number not in failures]
        remaining = min(deadline - time.monotonic(), grace if failures else timeout)  # others may wait for it forever
        ready = wait(pending, timeout=max(remaining, 0))
        if not ready:
            break
        for pipe in ready:
            number = numbers[id(pipe)]
            try:
                ranks[number].stays, ok, result = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                value = pickle.loads(result)
            except (EOFError, ConnectionResetError):
                ok, value = False, "the process died without a result"
            (results if ok else failures)[number] = value
    if failures:
        raise RankFailure("\n".join(f"--- rank {number}:\n{text}" for number, text in sorted(failures.items())))
    if len(results) < len(ranks):
        missing = sorted(set(range(len(ranks))) - set(results))
        raise RankFailure(f"ranks {missing} did not finish within {timeout:g} s")
    return [results[number] for number in range(len(ranks))]
