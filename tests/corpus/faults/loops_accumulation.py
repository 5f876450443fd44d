"""Gradients that are accumulated over micro-batches: their mean, their clipping, and those that are recomputed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtrain
from tests.corpus.faults.loops_beside import Beside, Tagger, joined, positions
from tests.corpus.rows import fault
from tests.corpus.training import seeded
from tests.engines.matrix import ENGINES, Trial


@fault(
    "huggingface/transformers#24725",
    "With accumulation each micro-batch counts alike, so that a token of a short one weighs many times one of a long.",
    peers="transformers before 4.46",
)
def tokens_count_alike_in_micro_batches_of_unequal_length(trial: Trial) -> None:
    both = Beside(trial, seeded(Tagger))
    for step in range(2):
        micro_batches = positions([1, 11, 2, 7, 1, 4], seed=step)
        both.step(micro_batches, joined(micro_batches))


@fault(
    "deepspeedai/DeepSpeed#7718",
    "With ZeRO-2 the gradient norms are far smaller than with ZeRO-3 at the same losses.",
    peers="DeepSpeed from 0.17.6 on",
)
@fault(
    "axolotl-ai-cloud/axolotl#2262",
    "Loss and gradient norm are multiplied by the number of accumulated micro-batches, compared with one large batch.",
    peers="axolotl in January 2025",
)
def loss_and_norm_are_those_of_one_batch_of_all_samples(trial: Trial) -> None:
    """Clipping too depends on the norm: below the limit with the right one, above it with six times as much."""
    both = Beside(trial, seeded(Tagger), max_grad_norm=1.5)
    for step in range(2):
        micro_batches = [(micro_batch, 1.0) for micro_batch, _ in positions([3] * 6, seed=step)]
        outcome = both.step(micro_batches, joined(micro_batches))
        assert outcome.grad_norm < 1.5 < 6 * outcome.grad_norm


@fault(
    "Lightning-AI/pytorch-lightning#19987",
    "The last update of an epoch, with fewer micro-batches than the others, is divided by the full number of them.",
    peers="Lightning 2.0 to 2.2",
)
def a_short_last_window_is_the_mean_of_what_it_has(trial: Trial) -> None:
    both = Beside(trial, seeded(Tagger))
    for num_micro_batches in (6, trial.ranks, 6):  # one on each rank in the second step
        micro_batches = [(micro_batch, 1.0) for micro_batch, _ in positions([4] * num_micro_batches)]
        both.step(micro_batches, joined(micro_batches))


@fault(
    "huggingface/transformers#1563",
    "The sum so far is clipped after each backward instead of once before the update.",
    peers="examples of transformers in 2019",
)
def accumulated_gradients_are_clipped_once(trial: Trial) -> None:
    both = Beside(trial, seeded(Tagger), max_grad_norm=0.2)
    for step in range(2):
        small, large = positions([3] * 3, seed=step), positions([3] * 3, seed=step + 2, scale=5.0)
        micro_batches = [pair for pairs in zip(large, small, strict=True) for pair in pairs]
        assert both.step(micro_batches, joined(micro_batches)).grad_norm > 0.2


@fault(
    "Lightning-AI/pytorch-lightning#9599",
    "In FP16 gradients are clipped while they are multiplied by the loss scale, so that updates become tiny.",
    peers="Lightning before 1.4.9",
    precisions=("fp16", "fp32"),
)
def the_loss_scale_does_not_count_in_clipping(trial: Trial) -> None:
    """With ``deepspeed`` only in FP32, where it has a loss scale too."""
    both = Beside(trial, seeded(Tagger), max_grad_norm=0.2, loss_scale=dtrain.LossScale.of(1024.0))
    for step in range(2):
        outcome = both.step(positions([3] * 6, seed=step))
        assert outcome.loss_scale == 1024.0
        assert 0.2 < outcome.grad_norm < 10


class Adapted(nn.Module):
    """Frozen layers with a trained adapter each, in checkpoints or not."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 7).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(7, 7).requires_grad_(False) for _ in range(2))
        self.adapters = nn.ModuleList(nn.Linear(7, 7, bias=False) for _ in range(2))
        self.head = nn.Linear(7, 3)
        self.checkpoints = checkpoints

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer, adapter in zip(self.layers, self.adapters, strict=True):
            x = (
                checkpoint(_adapted, layer, adapter, x, use_reentrant=True)
                if self.checkpoints
                else _adapted(layer, adapter, x)
            )
        return self.head(x).float().square().mean()


def _adapted(layer: nn.Module, adapter: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(layer(x) + adapter(x))


@fault(
    "huggingface/transformers#26221",
    "With gradient checkpointing, adapters in layers behind a frozen embedding get no gradient and stay as they began.",
    peers="transformers 4.33 with PEFT",
    refused=dict.fromkeys(ENGINES, "would never get a gradient"),
)
def adapters_behind_a_frozen_embedding_train_in_checkpoints(trial: Trial) -> None:
    """Reentrant checkpoints, which had been the default; the error says to use the others."""
    alike = seeded(lambda: Adapted(checkpoints=False))
    both = Beside(trial, seeded(lambda: Adapted(checkpoints=True)), alike=alike)
    draw = torch.Generator().manual_seed(1)
    both.step([({"tokens": torch.randint(5, (3, 4), generator=draw)}, 1.0) for _ in range(6)])
