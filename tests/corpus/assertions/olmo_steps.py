"""What the tests of OLMo-core state of optimizers, learning rates, reported numbers and checkpoints."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dtrain
from dtrain.errors import CheckpointError
from tests.corpus.assertions.accelerate_micro_batches import micro_batches, regression
from tests.corpus.rows import assertion
from tests.corpus.training import seeded, start, step_of
from tests.engines.helpers import state_digests
from tests.engines.matrix import Trial
from tests.helpers.oracle import assert_close_to_largest


class Embedded(nn.Module):
    """Tokens through an embedding and two layers, of which odd sizes are shared unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.second = nn.Embedding(11, 5), nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.second(torch.relu(self.first(self.embedding(tokens)))).float()
        loss: Tensor = (x * torch.linspace(0.5, 1.5, 5)).sum() / tokens.numel()
        return loss


def embedded() -> Embedded:
    return seeded(Embedded, 11)


def tokens_of(step: int) -> Tensor:
    return torch.randint(11, (6, 3), generator=torch.Generator().manual_seed(step))


@assertion(
    "allenai/OLMo-core src/test/optim/adamw_test.py::test_adamw_equivalence",
    "AdamW with other weight decay for the embedding has, after each step, the weights and both moments of torch's.",
)
def weights_and_moments_of_adamw_are_those_of_torch_after_each_step(trial: Trial) -> None:
    for lr, decay, betas in ((5e-4, 1e-2, (0.7, 0.95)), (1e-3, 0.0, (0.9, 0.999))):
        plain = embedded()
        named = dict(plain.named_parameters())
        # dtrain does not decay biases
        groups = [{"params": [p], "weight_decay": decay * (n[:3] != "emb" and p.dim() > 1)} for n, p in named.items()]
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas)
        record = dtrain.AdamW(lr=lr, betas=betas, weight_decay=decay, eps=1e-8, groups={"emb*": {"weight_decay": 0.0}})
        engine = start(trial, embedded(), optimizer=record)
        for step in range(4):
            tokens = tokens_of(step)
            optimizer.zero_grad()
            plain(tokens).backward()
            optimizer.step()
            engine.backward(engine(tokens=tokens[trial.rank :: trial.ranks]))
            assert engine.step().applied
            assert_close_to_largest(dict(engine.states.full_state("master")), named, 1e-5)
            for kind in ("exp_avg", "exp_avg_sq"):
                want = {name: optimizer.state[parameter][kind] for name, parameter in named.items()}
                assert_close_to_largest(dict(engine.states.full_state(kind)), want, 1e-5)


@assertion(
    "allenai/OLMo-core src/test/optim/noop_test.py::test_noop_vs_zero_lr_adamw",
    "Steps of AdamW at a learning rate of zero leave all weights and the model's outputs as they were.",
    precisions=("fp32", "bf16"),
)
def a_rate_of_zero_changes_no_bit_of_a_weight(trial: Trial) -> None:
    """By decay or by moments; the steps count as applied, and the moments move."""
    engine = start(trial, regression(), optimizer=dtrain.AdamW(lr=0.01, weight_decay=0.5))
    pairs = micro_batches([1, 2, 3, 3, 2, 1])
    assert step_of(engine, pairs).applied  # moments that are not 0
    before, output = state_digests(engine), output_of(engine)
    for _ in range(2):
        for batch, weight in engine.accumulate(pairs[trial.rank :: trial.ranks]):
            engine.backward(engine(**batch), weight=weight)
        outcome = engine.step(lr=0.0)
        assert outcome.applied
        assert outcome.lr == 0.0
    after = state_digests(engine)
    assert {key.partition(":")[0] for key in after if after[key] != before[key]} == {"exp_avg", "exp_avg_sq"}
    assert torch.equal(output_of(engine), output)
    assert engine.applied_steps == 3


def output_of(engine: Any) -> Tensor:
    with engine.eval():
        return engine(**micro_batches([4], seed=9)[0][0])  # type: ignore[no-any-return]


class Ramp(nn.Module):
    """Its gradient is 1 for each weight, so a plain update moves each by the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@assertion(
    "allenai/OLMo-core src/test/optim/scheduler_test.py::test_cos_with_warmup_scheduler",
    "The rate rises linearly in the warm-up, falls by half a cosine to a set fraction of the peak, and stays there.",
)
def each_update_is_at_the_rate_of_warmup_and_cosine(trial: Trial) -> None:
    """Each weight moves by the rate: what is reported is what is used. The first rate is above zero, not zero."""
    schedule = dtrain.Cosine(warmup_steps=2, total_steps=6, min_ratio=0.2)
    record = dtrain.SGD(lr=10.0, momentum=0.0)
    engine, weight = start(trial, Ramp(), optimizer=record, schedule=schedule), 0.0
    want = [5.0, 10.0, *(2.0 + 8.0 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(5)), 2.0]
    for rate in want:
        engine.backward(engine(torch.ones(5)))
        assert engine.step().lr == pytest.approx(rate, rel=1e-12)
        weight -= rate
        if masters := engine.master_state():
            assert masters["weight"].tolist() == pytest.approx([weight] * 5, rel=1e-6)


@assertion(
    "allenai/OLMo-core src/test/train/utils_test.py::test_reduce_metrics",
    "The reported loss is the mean over all ranks, and a norm over shards is the root of their summed squares.",
)
def all_ranks_report_one_mean_loss_and_one_norm(trial: Trial) -> None:
    """The losses are 1, 2 and 4 by turns; what they depend on has a gradient of (1, 2, 4), by hand."""
    engine, factors = start(trial, Ramp(), precision="fp32"), torch.tensor([1.0, 2.0, 4.0])
    share = torch.zeros(6, 5)
    share[torch.arange(6), torch.arange(6) % 3] = 1.0
    for index in engine.accumulate(range(trial.rank, 6, trial.ranks)):
        engine.backward(engine(share[index] * 3 * factors[index % 3]) + factors[index % 3], weight=1.0)
    outcome = engine.step()
    assert outcome.loss == pytest.approx(7 / 3)
    assert outcome.grad_norm == pytest.approx(math.sqrt(1 + 4 + 16))


class Wider(nn.Module):
    """One layer more than a model whose checkpoint it is given."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x.float(), y[:, :3])


@assertion(
    "allenai/OLMo-core src/test/distributed/checkpoint_test.py::test_load_checkpoint_with_missing_keys",
    "Loading a checkpoint that lacks one of the model's weights is an error.",
)
def a_checkpoint_without_a_weight_of_the_model_is_refused(trial: Trial) -> None:
    """One with an extra weight is refused too; the engine that refuses it keeps every bit and trains on."""
    pairs = micro_batches([1, 2, 3, 3, 2, 1])
    engines = {layers: start(trial, Wider(layers)) for layers in (1, 2)}
    for layers, engine in engines.items():
        step_of(engine, pairs)
        engine.save(trial.folder / str(layers))
    for layers, engine in engines.items():
        before = state_digests(engine)
        with pytest.raises(CheckpointError, match=r"layers\.1"):
            engine.load(trial.folder / str(3 - layers))
        assert state_digests(engine) == before
        assert step_of(engine, pairs).applied
