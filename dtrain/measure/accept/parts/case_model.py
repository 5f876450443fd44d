"""The model and the batches of a training case, made on its device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from dtrain.config.model import ModelConfig
from dtrain.config.schema import GROUP_OPTIONS, RunConfig
from dtrain.data import BatchLoader, load_dataset
from dtrain.models import build_model

_INIT_STD = 0.02
_RANDOM_BATCHES = 4
_RECOMPILATIONS = 64  # the default of 8 would leave later blocks uncompiled without a word


@torch.no_grad()
def build_on(device: torch.device, config: ModelConfig, seed: int) -> nn.Module:
    """Builds the model with weights drawn on ``device``: on the CPU, 3B of them take a minute."""
    assert config.vocab_size is not None, config
    with torch.device("meta"):
        model = build_model(config, config.vocab_size, seed)
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


class Batches:
    """Endless iterator over batches that lie on the device; a timed step copies nothing from the host."""

    def __init__(self, config: RunConfig, device: torch.device, *, is_text: bool) -> None:
        self._config, self._device, self._is_text = config, device, is_text
        self._pool: list[dict[str, Tensor]] = []
        self._next = 0

    def resize(self, micro_batch: int, num_steps: int) -> None:
        """Replaces the batches by others of ``micro_batch`` sequences, as many as ``num_steps`` of text need."""
        self._pool, self._next = [], 0  # first: the old ones need not stay in memory
        if not self._is_text:
            self._pool = [self._random(micro_batch, seed) for seed in range(_RANDOM_BATCHES)]
            return
        config = self._config
        data = GROUP_OPTIONS["data"][config.data.name]()
        dataset = load_dataset(data, config.model.max_seq_len)
        loader = BatchLoader(dataset.train, seed=config.seed, micro_batch_size=micro_batch, num_micro_batches=1)
        for _ in range(num_steps):
            (batch,) = next(loader)
            self._pool.append({name: tensor.to(self._device) for name, tensor in batch.items()})

    def _random(self, micro_batch: int, seed: int) -> dict[str, Tensor]:
        model = self._config.model
        assert model.vocab_size is not None, model
        generator = torch.Generator(self._device).manual_seed(seed)
        shape = (micro_batch, model.max_seq_len + 1)
        tokens = torch.randint(model.vocab_size, shape, generator=generator, device=self._device)
        return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            batch = self._pool[self._next % len(self._pool)]
            self._next += 1
            yield batch
