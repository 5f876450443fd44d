"""The model of a benchmark case: drawn on its device, and compiled for a peer."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from dtrain.config.model import DEFAULT_FACTORY, ModelConfig
from dtrain.measure.bench.training.batches import Batches
from dtrain.models import build_model, vocabulary

_INIT_STD = 0.02
_RECOMPILATIONS = 64  # the default of 8 would leave later blocks uncompiled without a word


def make_model(config: ModelConfig, batches: Batches, seed: int, device: torch.device) -> nn.Module:
    """Builds the model: on the CPU, unless its batches are made on the device too."""
    if batches.source == "loader" or config.factory != DEFAULT_FACTORY:
        return build_model(config, batches.task, seed)
    return build_on(device, config, seed, vocabulary(config, batches.task))


@torch.no_grad()
def build_on(device: torch.device, config: ModelConfig, seed: int, vocab_size: int | None = None) -> nn.Module:
    """Builds the built-in model with weights drawn on ``device``: on the CPU, 3B of them take a minute."""
    vocab_size = vocab_size or config.vocab_size
    assert vocab_size is not None, config
    with torch.device("meta"):
        model = build_model(config, vocab_size, seed)
    model.to_empty(device=device)
    if config.tie_embeddings:  # to_empty makes one weight of each name
        head: Any = model.get_submodule("head")
        head.weight = model.get_parameter("embed.weight")
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)  # norms; the model has no biases
            continue
        is_residual = name.endswith(("attn.out.weight", "ffn.down.weight"))
        std = _INIT_STD / (2 * config.num_layers) ** 0.5 if is_residual else _INIT_STD
        parameter.normal_(0.0, std, generator=generator)
    return model


def compile_blocks(model: nn.Module, *, wraps: bool) -> None:
    """Compiles every block of a peer's model, for one shape; dtrain's own are compiled by ``model.compile``.

    In place, so that names stay; with ``wraps`` each block is replaced by its compiled module, as FSDP2's users do, so
    that the hooks of ``fully_shard`` run around the graph and not in it.
    """
    import torch._dynamo  # takes a second, so only where it is used

    torch._dynamo.config.recompile_limit = _RECOMPILATIONS
    for modules in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for number, block in enumerate(modules):
            if wraps:
                modules[number] = cast(nn.Module, torch.compile(block, dynamic=False))
            else:
                block.compile(dynamic=False)
