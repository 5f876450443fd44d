"""Runs a function on two ranks for the scripts beside this one: gloo over a FileStore, one thread a rank."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD_SIZE = 2


def run(function: Callable[[int], Any]) -> list[Any]:
    """Returns ``function(rank)`` of each rank; a module-level function that returns plain JSON."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(WORLD_SIZE, mp_context=context) as pool:
        results = pool.map(partial(_main, f"{folder}/store", function), range(WORLD_SIZE))
        return [json.loads(result) for result in results]


def _main(store: str, function: Callable[[int], Any], rank: int) -> str:
    torch.set_num_threads(1)
    file_store = dist.FileStore(store, WORLD_SIZE)
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=WORLD_SIZE)
    try:
        return json.dumps(function(rank))
    finally:
        dist.destroy_process_group()


def save(figure: Any, name: str) -> None:
    """Writes a picture beside this file."""
    figure.savefig(Path(__file__).parent / name)
