"""Checkpoints of the built-in language models with random weights, for the tests of export and import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.checkpoint import Snapshot, save
from dtrain.config.model import GPT2_FACTORY, ModelConfig
from dtrain.distributed.communicator import Communicator
from dtrain.models import build_model
from tests.helpers.checkpoints import on_threads, shards_of

VOCAB = 257
LLAMA = ModelConfig(num_layers=2, hidden_dim=32, num_heads=4, max_seq_len=16, vocab_size=VOCAB, norm_eps=1e-3)
GPT2 = replace(LLAMA, factory=GPT2_FACTORY, ffn_dim=48)
MODELS = {
    "llama": LLAMA,
    "llama-grouped-untied": replace(LLAMA, num_kv_heads=2, tie_embeddings=False, rope_theta=500.0, ffn_dim=48),
    "gpt2": GPT2,
    "gpt2-untied": replace(GPT2, ffn_dim=None, tie_embeddings=False),
}
TOKENS = torch.randint(VOCAB, (3, 16), generator=torch.Generator().manual_seed(0))

BRIEF_RUN = ("data=text", "precision=fp32", "schedule.warmup_steps=0", "supervise.enabled=false", "report=false")
"""Settings of ``dtrain train`` with a text."""


def build(config: ModelConfig) -> nn.Module:
    """The model with weights so large that attention looks at some positions more than at others."""
    model = build_model(config, VOCAB, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def save_model(
    directory: Path,
    config: ModelConfig,
    world: int = 3,
    *,
    change: Callable[[dict[tuple[str, str], Tensor]], Any] = lambda tensors: None,
    state: dict[str, Any] | None = None,
) -> Path:
    """Saves ``build(config)`` as ``world`` ranks; ``change`` may alter the tensors, ``state`` replace what is told."""
    tensors = {("master", name): p.detach().clone() for name, p in build(config).named_parameters()}
    change(tensors)
    told = {"config": {"model": asdict(config)}} if state is None else state

    def work(comm: Communicator) -> Path:
        return save(directory, Snapshot(7, shards_of(tensors, comm.rank, world), told), comm)

    results = on_threads(world, work)
    assert all(isinstance(result, Path) for result in results), results
    return results[0]
