"""Gradients that PyTorch's wrappers and autocast lose, keep to a rank, or count twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.rows import fault
from tests.corpus.training import follows_oracle, seeded, start, step_of
from tests.engines.matrix import ENGINES, Trial

Step = list[tuple[Mapping[str, Any], float]]


def inputs(num_steps: int, width: int = 5) -> list[Step]:
    """Six micro-batches a step, of unequal weights."""
    draw = torch.Generator().manual_seed(1)
    return [[({"x": torch.randn(3, width, generator=draw)}, 1.0 + i) for i in range(6)] for _ in range(num_steps)]


class Tied(nn.Module):
    """An output layer that is the embedding of seven tokens, each in a unit of its own where there are units."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = torch.tanh(self.block(self.embedding(tokens)))
        return F.cross_entropy(self.head(h).float().flatten(0, 1), tokens.roll(1, 1).flatten())


@fault(
    "pytorch/pytorch#176076",
    "If two modules share a weight whose rows the ranks do not share evenly, the last rank's rows are never updated.",
    peers="FSDP2",
    precisions=("fp32", "bf16"),
)
def all_rows_of_a_tied_weight_are_updated_on_uneven_ranks(trial: Trial) -> None:
    draw = torch.Generator().manual_seed(1)
    steps = [[({"tokens": torch.randint(7, (2, 4), generator=draw)}, 1.0) for _ in range(6)] for _ in range(3)]
    has_units = trial.case.engine in ("native", "fsdp2")
    units: dict[str, Any] = {"sharding_units": ["embedding", "head"]} if has_units else {}
    follows_oracle(trial, lambda: seeded(Tied), steps, **units)


class Recycled(nn.Module):
    """A block whose output is its next input; only the last pass has a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = torch.tanh(self.block(torch.tanh(self.first(x))))
        h = torch.tanh(self.block(h + self.first(x)))
        return self.head(h).float().square().mean()  # type: ignore[no-any-return]


@fault(
    "pytorch/pytorch#65766",
    "Under autocast, weights that are used first without gradients get no gradient from later uses.",
    peers="torch.amp, in 2.1 at least",
    precisions=("bf16", "fp32"),
)
def a_pass_without_gradients_takes_none_from_the_next(trial: Trial) -> None:
    follows_oracle(trial, lambda: seeded(Recycled), inputs(3))


class Routed(nn.Module):
    """Two heads, of which the micro-batch takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 7)
        self.heads = nn.ModuleList([nn.Linear(7, 3), nn.Linear(7, 3)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.body(x))).float().square().mean()  # type: ignore[no-any-return]


@fault(
    "pytorch/pytorch#69031",
    "Gradients of parameters that the last micro-batch of an accumulation does not use stay each rank's own.",
    peers="DDP with find_unused_parameters",
)
def a_head_that_only_the_first_micro_batches_use_is_summed_over_ranks(trial: Trial) -> None:
    rounds = 6 // trial.ranks
    steps = [
        [({**micro_batch, "head": int(i // trial.ranks == rounds - 1)}, weight) for i, (micro_batch, weight) in pairs]
        for pairs in map(enumerate, inputs(3))
    ]
    follows_oracle(trial, lambda: seeded(Routed), steps)


class Mixed(nn.Module):
    """Matrices that can be shared, and small weights, some of them FP32, that a rank may hold whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5)) for _ in range(2)])
        self.gain = nn.Parameter(torch.tensor([3.0]))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (self.gain * x).float().square().mean()


@fault(
    "pytorch/pytorch#88955",
    "The norm for clipping counts the gradients of weights that are not sharded once for every rank.",
    peers="FSDP with NO_SHARD",
    precisions=("bf16", "fp32"),
)
def clipping_counts_whole_and_sharded_gradients_once(trial: Trial) -> None:
    follows_oracle(trial, lambda: seeded(Mixed), inputs(3), max_grad_norm=0.5)


MOVED = "do not call .to(), .half() or assign .data after dtrain.initialize"
SHARDED = "is read outside a forward of the engine"


@fault(
    "pytorch/pytorch#104336",
    "After the model has been moved to another device and back, the gradients are no longer summed over the ranks.",
    peers="DDP",
    refused={"native-3": SHARDED, "deepspeed-3": SHARDED} | dict.fromkeys(ENGINES, MOVED),
    ranks=(2, 3),
)
def a_model_that_was_moved_away_and_back_is_refused(trial: Trial) -> None:
    """A CPU has no other device: a move to another dtype and back makes new storages just as well."""
    engine = start(trial, seeded(Mixed))
    first, second = inputs(2)
    step_of(engine, first)
    engine.module.double()
    engine.module.float()
    step_of(engine, second)
