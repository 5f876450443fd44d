"""A process group of one rank, for the libraries that want one; ours needs none."""

from __future__ import annotations

import atexit
import os

import torch
import torch.distributed as dist

from dtrain.distributed.setup import disconnect


def ensure_group(device: torch.device) -> None:
    """Makes a group of this rank alone where there is none; it meets nobody.

    gloo listens all the same, here on the loopback interface.
    """
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    finally:
        if interface is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    atexit.register(disconnect)
