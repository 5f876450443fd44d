"""Parameters that several places of a model use: reused modules, tied weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.corpus.rows import fault
from tests.corpus.training import follows_oracle, seeded
from tests.engines.matrix import Trial


class Twice(nn.Module):
    """One block that every forward passes through twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(4, 7), nn.Linear(7, 7), nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for _ in range(2):
            h = h + torch.tanh(self.block(h))
        return self.head(h).float().square().mean()


def twice() -> Twice:
    return seeded(Twice)


def batches(num_steps: int) -> list[list[tuple[dict[str, Tensor], float]]]:
    """Six micro-batches a step, of unequal weights."""
    draw = torch.Generator().manual_seed(1)
    return [[({"x": torch.randn(3, 4, generator=draw)}, 1.0 + i) for i in range(6)] for _ in range(num_steps)]


@fault(
    "deepspeedai/DeepSpeed#8224",
    "If a submodule is used twice in a step, the gradients of ZeRO-2 in BF16 are wrong on several ranks.",
    peers="DeepSpeed up to 0.19.3",
    precisions=("bf16", "fp32"),
)
def a_submodule_used_twice_has_the_sum_of_both_gradients(trial: Trial) -> None:
    follows_oracle(trial, twice, batches(2))
