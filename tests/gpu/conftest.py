"""Settings of a process whose tests share one GPU, and its process group."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from dtrain.distributed.startup.setup import disconnect
from tests.gpu.device import BACKEND, DEVICE, ON_CPU, synchronize

# torch reads it once, in the first product on a GPU, and then refuses reproducible engines if it is not set
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="module")
def one_rank_of_nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not ON_CPU:
        torch.cuda.set_device(DEVICE)
    store = dist.FileStore(str(tmp_path_factory.mktemp("nccl") / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group(BACKEND, store=store, rank=0, world_size=1)
    dist.all_reduce(torch.zeros(1, device=DEVICE))  # NCCL starts in the first collective, which takes seconds
    synchronize()
    yield
    disconnect()
