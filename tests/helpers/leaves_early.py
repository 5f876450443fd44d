"""A script of a user, one of two ranks, that ends while a save is under way.

``python -m tests.helpers.leaves_early RANK FOLDER end|raise|fail``; with ``raise`` rank 1 raises, and rank 0 trains on;
with ``fail`` the disk is full.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dtrain
from dtrain.checkpoint import storage


def main(rank: int, folder: Path, how: str) -> None:
    """See above."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    engine = dtrain.initialize(nn.Linear(8, 8), optimizer=dtrain.AdamW(lr=1e-3))

    def step() -> None:
        engine.backward(engine(torch.randn(4, 8)).float().square().mean())
        engine.step()

    write = storage.write

    def slow_write(*args: Any) -> None:
        time.sleep(0.1)
        if how == "fail":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*args)

    storage.write = slow_write
    step()
    engine.save(folder / "checkpoints", asynchronous=True)
    if how == "raise" and rank == 1:
        raise ValueError("a bug of the script")
    while how == "raise":
        step()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
