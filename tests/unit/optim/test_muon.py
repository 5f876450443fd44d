"""Muon's rule on one rank, against ``torch.optim.Muon``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.config.optim import Muon
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.optim import matrix
from dtrain.optim.matrix import MatrixShard, MatrixUpdate
from dtrain.optim.muon import MuonRule, orthogonalize
from dtrain.optim.rule import UpdateClass, UpdateScalars, UpdateSlice

SHAPES = [(1, 7), (7, 1), (33, 20), (20, 33), (16, 16), (1, 1)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_orthogonalization_takes_singular_values_to_about_one_and_zeros_to_zeros() -> None:
    singular = torch.linalg.svdvals(orthogonalize(normal(40, 24).bfloat16(), 5).float())
    assert bool(((singular > 0.5) & (singular < 1.5)).all())
    assert not orthogonalize(torch.zeros(3, 5, dtype=torch.bfloat16), 5).any()


class Trained:
    """Weights of SHAPES under the rule."""

    def __init__(self, record: Muon, splits: dict[str, tuple[int, ...]] | None = None, lr_factor: float = 1.0) -> None:
        self.masters = [normal(*shape, seed=n) for n, shape in enumerate(SHAPES)]
        self.momenta = [torch.zeros(shape) for shape in SHAPES]
        update_class, shards = UpdateClass(0, record.weight_decay, lr_factor), []
        for n, (master, momentum) in enumerate(zip(self.masters, self.momenta, strict=True)):
            part = UpdateSlice(update_class, (n, 0), master.view(-1), torch.empty(0), (momentum.view(-1),), None)
            shards.append(MatrixShard(f"w{n}", SHAPES[n], 0, part))
        self.update = MatrixUpdate(MuonRule(record, splits or {}), [shards], SingleRank(torch.device("cpu")))
        self.lr = record.lr

    def step(self, number: int, *, divisor: float = 1.0, found_inf: float = 0.0, factor: float = 1.0) -> None:
        scalars = UpdateScalars(self.lr, 1 + number, torch.tensor(divisor), torch.tensor(found_inf))
        self.update.begin(scalars, [grad.view(-1) * divisor * factor for grad in grads_of(number)])
        self.update.update([0], scalars)


def grads_of(number: int) -> list[Tensor]:
    return [normal(*shape, seed=100 + 10 * number + n) for n, shape in enumerate(SHAPES)]


@pytest.mark.parametrize(
    "options", [{}, {"adjust_lr": "original", "nesterov": False}, {"weight_decay": 0.0, "momentum": 0.5, "ns_steps": 3}]
)
@pytest.mark.parametrize("block", [1 << 16, 37])
def test_three_steps_have_the_bits_of_torchs(options: dict[str, Any], block: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(matrix, "_BLOCK", block)
    record = Muon(lr=3e-3, **options)
    trained = Trained(record, lr_factor=0.5)
    parameters = [nn.Parameter(normal(*shape, seed=n)) for n, shape in enumerate(SHAPES)]
    names = ("weight_decay", "momentum", "nesterov", "ns_steps")
    given = {name: getattr(record, name) for name in names}
    torchs = torch.optim.Muon(parameters, lr=1.5e-3, adjust_lr_fn=record.adjust_lr, **given)
    for number in range(3):
        trained.step(number, divisor=8.0)
        for parameter, grad in zip(parameters, grads_of(number), strict=True):
            parameter.grad = grad
        torchs.step()
    for master, momentum, parameter in zip(trained.masters, trained.momenta, parameters, strict=True):
        assert torch.equal(master, parameter)
        assert torch.equal(momentum, torchs.state[parameter]["momentum_buffer"])


def test_a_fused_weight_moves_as_its_matrices_do() -> None:
    record = Muon(lr=3e-3, weight_decay=0.0)
    whole, fused = Trained(record), Trained(record, {"w2": (5, 20, 8)})
    whole.step(0)
    fused.step(0)
    parts = [nn.Parameter(part.clone()) for part in normal(*SHAPES[2], seed=2).split([5, 20, 8])]
    for part, grad in zip(parts, grads_of(0)[2].split([5, 20, 8]), strict=True):
        part.grad = grad
    torch.optim.Muon(parts, lr=3e-3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    assert torch.equal(fused.masters[2], torch.cat(list(parts)))
    assert not torch.allclose(fused.masters[2], whole.masters[2], rtol=0, atol=1e-3)
    assert all(torch.equal(fused.masters[n], whole.masters[n]) for n in range(len(SHAPES)) if n != 2)


@pytest.mark.parametrize("factor", [math.inf, math.nan, 1.0])
def test_a_skipped_update_keeps_every_bit(factor: float) -> None:
    trained = Trained(Muon())
    trained.step(0)
    before = [tensor.clone() for tensor in (*trained.masters, *trained.momenta)]
    trained.step(1, found_inf=1.0, factor=factor)
    assert all(map(torch.equal, before, (*trained.masters, *trained.momenta)))
