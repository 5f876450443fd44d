"""The process group of ranks that meet at a file: no port, nothing that listens for them."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def join_ranks(store: str, rank: int, world_size: int, device: torch.device, timeout_s: float = 600.0) -> None:
    """Makes the process group of ranks that meet at the file ``store``; one rank needs none."""
    if world_size == 1:
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
