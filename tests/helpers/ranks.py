"""Runs a function on several real ranks: gloo over a FileStore, processes forked from a server with torch preloaded."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_ENGINES = [f"dtrain.engine.{name}" for name in ("native", "fsdp2", "ddp", "deepspeed")]
_context.set_forkserver_preload(
    ["tests.helpers.preload", "dtrain.train.run", *_ENGINES, "tests.helpers.ranks", "tests.helpers.launch"]
)


class RankFailure(AssertionError):
    """One or more ranks raised; the message holds every traceback."""


def _main(rank: int, world: int, store: str, pipe: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # a collection that visits what the server has imported would copy those pages, at a second of CPU per rank
    gc.freeze()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        if world > 1:
            dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
            dist.barrier()  # a rank that leaves while another one still connects would make that one fail
        # plain pickle copies tensors; the pipe's own would share their memory, which dies with this process
        pipe.send_bytes(pickle.dumps((True, fn(rank, world, *args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def fork(fn: Callable[..., Any], *args: Any) -> ForkServerProcess:
    """Starts ``fn(*args)`` in a process forked from the server."""
    process = _context.Process(target=fn, args=args)
    process.start()
    return process


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 240.0, grace: float = 2.0) -> list[Any]:
    """Calls ``fn(rank, world, *args)`` on ``world`` processes and returns their results in rank order.

    ``fn`` is a module-level function; it finds a gloo process group (none at world 1) and one thread. Once a rank has
    failed, each of the others has ``grace`` seconds to return or raise; then it is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_main, args=(rank, world, f"{folder}/store", theirs, fn, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, timeout, grace)
        finally:
            for process in processes:
                process.join(timeout=0.5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], timeout: float, grace: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    while len(results) + len(failures) < len(pipes):
        pending = [p for i, p in enumerate(pipes) if i not in results and i not in failures]
        remaining = min(deadline - time.monotonic(), grace if failures else timeout)  # others may wait for it forever
        ready = wait(pending, timeout=max(remaining, 0))
        if not ready:
            break
        for pipe in ready:
            index = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                ok, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                ok, value = False, "the process died without a result"
            (results if ok else failures)[index] = value
    if failures:
        raise RankFailure("\n".join(f"--- rank {rank}:\n{text}" for rank, text in sorted(failures.items())))
    if len(results) < len(pipes):
        missing = sorted(set(range(len(pipes))) - set(results))
        raise RankFailure(f"ranks {missing} did not finish within {timeout:g} s")
    return [results[rank] for rank in range(len(pipes))]
