"""The Triton update: AdamW in double precision is the reference, and any cut gives the same bits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.config.optim import AdamW
from dtrain.optim.rule import UpdateScalars, UpdateSlice
from dtrain.precision.remainder import read, split
from dtrain.sharding.layout import CHUNK
from tests.helpers.arena import DECAYED, PLAIN, SLOWER, Arena, Reference, paired, same_bits
from tests.helpers.oracle import assert_close_to_largest

tiled = pytest.importorskip("dtrain.optim.tiled", reason="Triton is not installed")

RULE = AdamW(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, compile=True)


def moved(parts: list[UpdateSlice], device: torch.device) -> list[UpdateSlice]:
    """Returns the slices over copies on ``device``."""

    found = []
    for part in parts:
        master, main_grad, replica, *own = (
            tensor.to(device, copy=True) for tensor in (part.master, part.main_grad, part.replica, *part.states)
        )
        found.append(replace(part, master=master, main_grad=main_grad, states=tuple(own), replica=replica))
    return found


def scalars(step: int, lr: float, divisor: float, device: torch.device, code: float = 0.0) -> UpdateScalars:
    values = (torch.tensor(value, dtype=torch.float64, device=device) for value in (divisor, code))
    return UpdateScalars(lr, step, *values)


def states(parts: list[UpdateSlice]) -> dict[str, Tensor]:
    replicas = [part.replica if isinstance(part.master, Tensor) else part.master.weight for part in parts]
    rows = [(read(part.master), *part.states, own) for part, own in zip(parts, replicas, strict=True)]
    columns = (torch.cat(column).cpu() for column in zip(*rows, strict=True))
    return dict(zip(("master", "exp_avg", "exp_avg_sq", "replica"), columns, strict=True))


def train(parts: list[UpdateSlice], device: torch.device, segments: list[list[int]]) -> dict[str, Tensor]:
    """Updates three times with gradients that follow from the seed; ``segments`` are the slices of each call."""
    optimizer = tiled.TiledAdamW(RULE, [[part] for part in parts])
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 4):
        gradient = torch.randn(sum(part.master.numel() for part in parts), generator=generator)
        for part, own in zip(parts, gradient.split([part.master.numel() for part in parts]), strict=True):
            part.main_grad.copy_(own)
        for numbers in segments:
            optimizer.update(numbers, scalars(step, 0.01 / step, 7.0, device))
    return states(parts)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.999)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_follows_adamw_in_double_precision(betas: Any, dtype: torch.dtype, device: torch.device) -> None:
    rule = replace(RULE, betas=betas)
    arena = Arena(rule, [DECAYED, SLOWER, DECAYED, PLAIN, SLOWER], dtype=dtype)
    reference = Reference(arena, rule)
    parts = moved(arena.slices(), device)
    optimizer = tiled.TiledAdamW(rule, [parts])
    for step in range(1, 6):
        gradient = arena.new_gradient()
        reference.update(gradient, 0.01 / step)
        for part, own in zip(parts, gradient.split([part.master.numel() for part in parts]), strict=True):
            part.main_grad.copy_(own * 3.0)
        optimizer.update([0], scalars(step, 0.01 / step, 3.0, device))
    got = states(parts)
    for name, want in reference.tensors().items():
        assert_close_to_largest(got[name], want, 1e-6)
    assert torch.equal(got["replica"], got["master"].to(dtype))


def test_masters_that_are_pairs_move_as_full_ones(device: torch.device) -> None:
    arena = Arena(RULE, [DECAYED] * 3 + [PLAIN])
    full, pairs = moved(arena.slices(), device), paired(moved(arena.slices(), device))
    want, got = train(full, device, [[0, 1]]), train(pairs, device, [[0, 1]])
    assert same_bits(got, {name: want[name] for name in ("master", "exp_avg", "exp_avg_sq")})
    assert torch.equal(got["replica"].view(torch.int16), split(want["master"])[0])
    optimizer = tiled.TiledAdamW(RULE, [pairs])
    for part in pairs:
        part.main_grad.fill_(math.nan)
    optimizer.update([0], scalars(4, 0.01, math.nan, device, code=2.0))
    assert same_bits(states(pairs), got)
    optimizer.update([0], scalars(4, 0.01, 1.0, device))  # which should have been skipped
    assert all(bool(part.master.weight.isnan().all() and read(part.master).isnan().all()) for part in pairs)


def test_main_grads_may_be_bf16(device: torch.device) -> None:
    parts = moved(Arena(RULE, [DECAYED, PLAIN]).slices(), device)
    low = [replace(p, main_grad=p.main_grad.bfloat16()) for p in moved(Arena(RULE, [DECAYED, PLAIN]).slices(), device)]
    got = train(low, device, [[0, 1]])
    assert not same_bits(got, train(moved(Arena(RULE, [DECAYED, PLAIN]).slices(), device), device, [[0, 1]]))
    optimizer = tiled.TiledAdamW(RULE, [parts])
    generator = torch.Generator().manual_seed(1)  # the gradients of `train`, rounded
    for step in range(1, 4):
        for part, own in zip(parts, torch.randn(2 * CHUNK, generator=generator).split(CHUNK), strict=True):
            part.main_grad.copy_(own.bfloat16())
        optimizer.update([0], scalars(step, 0.01 / step, 7.0, device))
    assert same_bits(states(parts), got)


@pytest.mark.parametrize("exponent", [-126, -99, 101])
def test_gradient_and_divisor_may_have_any_magnitude(exponent: int, device: torch.device) -> None:
    arena = Arena(RULE, [DECAYED])
    gradient = (arena.new_gradient() * 8).round().clamp(-16, 16) / 8  # few bits: a subnormal loses none
    found = []
    for power in (0, exponent):
        parts = moved(arena.slices(), device)
        parts[0].main_grad.copy_(gradient * 2.0**power)
        tiled.TiledAdamW(RULE, [parts]).update([0], scalars(1, 0.01, 3.0 * 2.0**power, device))
        found.append(states(parts))
    assert same_bits(found[1], found[0])


@pytest.mark.parametrize("cuts", [[1], [1, 2, 4]])
def test_any_cut_and_any_grouping_of_segments_give_the_same_bits(cuts: list[int], device: torch.device) -> None:
    arena = Arena(RULE, [DECAYED] * 3 + [PLAIN] * 2)
    whole, cut = moved(arena.slices(), device), moved(arena.slices(cuts), device)
    want = train(whole, device, [[0, 1]])
    numbers = list(range(len(cut)))
    assert same_bits(train(cut, device, [numbers[1:], numbers[:1]]), want)
    again = moved(arena.slices(cuts), device)
    assert same_bits(train(again, device, [[number] for number in numbers]), want)
    before = states(again[1:2])
    tiled.TiledAdamW(RULE, [[part] for part in again]).update([0], scalars(4, 0.01, 1.0, device))
    assert same_bits(states(again[1:2]), before), "segments left out stay as they are"
    tiled.TiledAdamW(RULE, [[], []]).update([0, 1], scalars(1, 0.01, 1.0, device))


def test_a_part_that_is_no_multiple_of_a_tile_leaves_what_follows_alone(device: torch.device) -> None:
    numel = tiled.TILE + 64
    memory = torch.full((5, numel + 64), 7.0, device=device)
    master, main_grad, first, second, replica = (row[:numel] for row in memory)
    part = UpdateSlice(DECAYED, (0, 0), master, main_grad, (first, second), replica)
    tiled.TiledAdamW(RULE, [[part]]).update([0], scalars(1, 0.01, 1.0, device))
    assert (memory[:, numel:] == 7.0).all()
    assert (memory[0, :numel] != 7.0).all()


@pytest.mark.parametrize("gradient", [1.0, math.inf])
def test_a_skipped_update_keeps_all_bits(gradient: float, device: torch.device) -> None:
    parts = moved(Arena(RULE, [DECAYED, PLAIN]).slices(), device)
    train(parts, device, [[0, 1]])
    before = states(parts)
    for part in parts:
        part.main_grad.fill_(gradient)
    optimizer = tiled.TiledAdamW(RULE, [parts])
    optimizer.update([0], scalars(4, 0.01, math.nan, device, code=2.0))
    assert same_bits(states(parts), before)
    optimizer.update([0], scalars(4, 0.01, 1.0, device))
    assert not same_bits(states(parts), before)


def test_an_unaligned_slice_is_refused(device: torch.device) -> None:
    master, main_grad, *moments = torch.zeros(4 * CHUNK + 1, device=device)[1:].split(CHUNK)
    with pytest.raises(ValueError, match="expected multiples of 16"):
        tiled.TiledAdamW(RULE, [[UpdateSlice(DECAYED, (0, 0), master, main_grad, tuple(moments), None)]])
