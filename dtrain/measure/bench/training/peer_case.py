"""A case in which another library trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn

from dtrain.config.optim import OptimConfig
from dtrain.config.schema import RunConfig
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.distributed.startup.setup import ensure_process_group
from dtrain.measure.bench.peers import PEERS, PLAIN
from dtrain.measure.bench.peers.plain import Settings
from dtrain.measure.bench.records import BenchmarkCase
from dtrain.measure.bench.training.batches import Batches
from dtrain.measure.bench.training.model import compile_blocks
from dtrain.measure.bench.training.rank_training import RankTraining
from dtrain.train.validation import to_device


def prepare(
    case: BenchmarkCase, config: RunConfig, model: nn.Module, batches: Batches, device: torch.device
) -> RankTraining:
    """Lets the peer's script make its training of ``model``."""
    optim = cast(OptimConfig, config.optim)  # checked by cli.checks
    if case.engine != "plain":  # libraries expect a process group and a launcher, also on one rank
        LaunchEnv(0, 1, 0, 1).export()
        ensure_process_group(device)
        if case.engine.startswith("deepspeed") and case.ranks == 1 and device.type == "cpu":
            from dtrain.engine.adapters.deepspeed.library import load

            load(device)  # else DeepSpeed compiles an extension for CPUs, which training does not use
    peer = PLAIN if case.engine == "plain" else PEERS[case.engine]
    model = model.to(device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())  # before a peer cuts them into shards
    if config.model.compile == "blocks":
        compile_blocks(model, wraps=case.engine.startswith("fsdp2"))
    settings = Settings(
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm,
        bf16=case.precision == "bf16",
        micro_batch_size=config.train.micro_batch_size,
        device=device,
    )
    training = import_module(f"dtrain.measure.bench.peers.{peer.module}").prepare(model, settings, **peer.options)

    def step() -> Callable[[], float]:
        loss: Tensor = training.step(to_device(next(batches), device))
        return loss.item

    def facts() -> dict[str, Any]:
        state = {kind: _nbytes(tensors) for kind, tensors in training.tensors().items()}
        return {"num_parameters": num_parameters, "state": state, "formula": None}

    return RankTraining(step, facts)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
