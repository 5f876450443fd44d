"""Imports that the ranks of the tests need, which cost each rank seconds of processor time otherwise.

The forkserver imports this once. None of it starts a thread or a process, or opens a socket: forking stays safe.
"""

from __future__ import annotations

import os
import sys

import torch

sys.dont_write_bytecode = False  # also where PYTHONDONTWRITEBYTECODE is set: each rank would compile its test again

if not torch.backends.cuda.is_built():  # where there may be a GPU, DeepSpeed must see the device of the rank
    import torch._dynamo
    import torch._inductor.compile_fx  # of torch.optim, torch.compile and DeepSpeed's optimizers

    os.environ["DS_ACCELERATOR"] = "cpu"  # read when it is imported; without it, it looks for one and says so
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

    del os.environ["DS_ACCELERATOR"]
