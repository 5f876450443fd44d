"""Every optimizer on a GPU, eagerly and compiled, against the eager update of a CPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import dtrain
from dtrain.optim.stochastic import random_bits, step_words, stream_start
from tests.gpu.device import DEVICE
from tests.helpers.arena import CPU, DECAYED, PLAIN, SLOWER, Arena, same_bits, scalars
from tests.helpers.host_reads import forbidden
from tests.unit.optim.test_rules import EVERY

CLASSES = [DECAYED] * 3 + [SLOWER] * 2 + [PLAIN]
both = pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compile)])
every = pytest.mark.parametrize("record", EVERY.values(), ids=EVERY)


@both
@every
def test_an_update_follows_that_of_a_cpu(record: Any, compiled: bool) -> None:
    want = Arena(record, CLASSES).steps(number=20)
    got = Arena(replace(record, compile=compiled), CLASSES, device=DEVICE).steps(number=20)
    for name in want.keys() - {"replica"}:
        error = torch.linalg.vector_norm(got[name].cpu().double() - want[name].double())
        # a moment of BF16 that differs in the last place of FP32 is now and then rounded to the other neighbor
        bound = 1e-4 if want[name].dtype == torch.bfloat16 else 1e-6
        assert error <= bound * torch.linalg.vector_norm(want[name].double()), name
    assert torch.equal(got["replica"], got["master"].bfloat16())


@both
@every
def test_a_skip_keeps_every_bit_and_the_host_reads_nothing(record: Any, compiled: bool) -> None:
    arena = Arena(replace(record, compile=compiled), CLASSES, device=DEVICE)
    optimizer = arena.optimizer()
    before = arena.steps(optimizer)
    arena.main_grad.fill_(math.inf)
    skipped = scalars(4, 0.01, math.nan, found_inf=1.0, device=DEVICE)
    if compiled:  # which torch cannot trace while functions are watched; a read would break the graph
        optimizer.update([0], skipped)
    else:
        with forbidden():
            optimizer.update([0], skipped)
    assert same_bits(arena.bits(), before)


@both
@every
def test_any_cut_gives_the_same_bits(record: Any, compiled: bool) -> None:
    record = replace(record, compile=compiled)
    whole, cut = (Arena(record, CLASSES, device=DEVICE) for _ in range(2))
    assert same_bits(cut.steps(cut.optimizer([1, 4])), whole.steps())


@pytest.mark.parametrize("numel", [64, 4097])
def test_the_random_bits_are_those_of_a_cpu(numel: int) -> None:
    def bits(device: torch.device) -> torch.Tensor:
        noise = stream_start(3, 2**32 - 50, device), *step_words(5, device)
        return random_bits(noise, torch.empty(numel, device=device)).cpu()

    assert torch.equal(bits(DEVICE), bits(CPU))


def masters_after(device: torch.device, **options: Any) -> dict[str, torch.Tensor]:
    """Four applied steps of a small model with Muon and a moving average; returns the averages, on the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32)).to(device)
    engine = dtrain.initialize(
        model, optimizer=dtrain.Muon(lr=1e-3), precision="fp32", ema_decay=0.5, seed=0, max_grad_norm=None, **options
    )
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).to(device)
    for step in range(5):
        engine.backward(engine(x).square().mean() * (math.inf if step == 3 else 1))
        engine.step()
    assert (engine.attempted_steps, engine.applied_steps) == (5, 4)
    with engine.ema():
        return engine.master_state()


@pytest.mark.parametrize("stage", [0, 2])
def test_muon_and_the_average_follow_those_of_a_cpu(stage: int) -> None:
    want = masters_after(CPU, zero_stage=stage)
    got = masters_after(DEVICE, zero_stage=stage)
    for name, tensor in want.items():
        error = torch.linalg.vector_norm(got[name].cpu() - tensor) / torch.linalg.vector_norm(tensor)
        assert error < 1e-3, name  # BF16 products of two devices
