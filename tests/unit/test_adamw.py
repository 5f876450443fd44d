"""The flat update against torch's own AdamW, and bit for bit against itself cut at any chunks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.optim.adamw import AdamW, FlatAdamW, UpdateScalars
from dtrain.sharding.buffer import UpdateSlice
from dtrain.sharding.layout import CHUNK
from tests.helpers.oracle import assert_close_to_largest

RULE = AdamW(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def scalars(step: int, lr: float, grad_divisor: float) -> UpdateScalars:
    return UpdateScalars.of(lr=lr, step=step, grad_divisor=grad_divisor, device=torch.device("cpu"))


class Arena:
    """Masters, gradients and moments in one piece, with the classes of its chunks."""

    def __init__(self, classes: Sequence[bool], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        numel = len(classes) * CHUNK
        self.classes = classes
        self.master = torch.randn(numel, generator=generator)
        self.main_grad = torch.zeros(numel)
        self.exp_avg, self.exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
        self._generator = generator

    def slices(self, cuts: Sequence[int] = ()) -> list[UpdateSlice]:
        """The arena cut where the class changes and at every chunk number of ``cuts``."""
        changes = [i for i in range(1, len(self.classes)) if self.classes[i] != self.classes[i - 1]]
        bounds = sorted({0, len(self.classes), *changes, *cuts})
        return [
            UpdateSlice(
                self.classes[low],
                *(t[low * CHUNK : high * CHUNK] for t in (self.master, self.main_grad, self.exp_avg, self.exp_avg_sq)),
            )
            for low, high in itertools.pairwise(bounds)
        ]

    def new_gradient(self) -> Tensor:
        self.main_grad.copy_(torch.randn(self.main_grad.numel(), generator=self._generator))
        return self.main_grad.clone()


def steps(arena: Arena, optimizer: FlatAdamW, number: int = 3, divisor: float = 7.0) -> dict[str, Tensor]:
    for step in range(1, number + 1):
        arena.new_gradient()
        optimizer.update(0, scalars(step, 0.01 / step, divisor))
    return {name: getattr(arena, name).clone() for name in ("master", "main_grad", "exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("divisor", [1.0, 3.0, 65536.0])
def test_follows_torch(divisor: float) -> None:
    arena = Arena([True, True, False])
    optimizer = FlatAdamW(RULE, [arena.slices()])
    decayed = torch.nn.Parameter(arena.master[: 2 * CHUNK].clone())
    plain = torch.nn.Parameter(arena.master[2 * CHUNK :].clone())
    reference = torch.optim.AdamW(
        [{"params": [decayed], "weight_decay": 0.1}, {"params": [plain], "weight_decay": 0.0}],
        lr=0.01,
        betas=RULE.betas,
        eps=RULE.eps,
        foreach=False,
    )
    for step in range(1, 11):
        gradient = arena.new_gradient()
        arena.main_grad.mul_(divisor)
        decayed.grad, plain.grad = gradient[: 2 * CHUNK].clone(), gradient[2 * CHUNK :].clone()
        for group in reference.param_groups:
            group["lr"] = 0.01 / step
        reference.step()
        optimizer.update(0, scalars(step, 0.01 / step, divisor))
        assert_close_to_largest(arena.main_grad, gradient, 1e-6)
        assert_close_to_largest(arena.master, torch.cat([decayed, plain]), 1e-6)
    for name in ("exp_avg", "exp_avg_sq"):
        moments = torch.cat([reference.state[parameter][name] for parameter in (decayed, plain)])
        assert_close_to_largest(getattr(arena, name), moments, 1e-6)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.booleans(), min_size=1, max_size=12).flatmap(
        lambda classes: st.tuples(st.just(classes), st.sets(st.integers(0, len(classes))))
    ),
    st.integers(0, 2**31),
    st.sampled_from([1.0, 0.3, 12345.678]),
)
def test_any_cut_at_chunks_gives_the_same_bits(case: tuple[list[bool], set[int]], seed: int, divisor: float) -> None:
    classes, cuts = case
    whole, cut = Arena(classes, seed), Arena(classes, seed)
    want = steps(whole, FlatAdamW(RULE, [whole.slices()]), divisor=divisor)
    got = steps(cut, FlatAdamW(RULE, [cut.slices(sorted(cuts))]), divisor=divisor)
    assert all(torch.equal(got[name], want[name]) for name in want)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 8), st.integers(0, 2**31))
def test_shards_of_their_own_memory_give_the_same_bits(world: int, seed: int) -> None:
    """As on ranks: each shard lies in a tensor of its own, at another address."""
    classes = [True] * 5 + [False] * 3
    whole = Arena(classes, seed)
    shards = []
    for start in range(0, 8, world):
        own = Arena(classes[start : start + world])
        own.master.copy_(whole.master[start * CHUNK : (start + world) * CHUNK])
        shards.append((start, own, FlatAdamW(RULE, [own.slices()])))
    optimizer = FlatAdamW(RULE, [whole.slices()])
    for step in (1, 2, 3):
        gradient = whole.new_gradient()
        optimizer.update(0, scalars(step, 0.01, 3.0))
        for start, own, own_optimizer in shards:
            own.main_grad.copy_(gradient[start * CHUNK : (start + world) * CHUNK])
            own_optimizer.update(0, scalars(step, 0.01, 3.0))
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert torch.equal(torch.cat([getattr(own, name) for _, own, _ in shards]), getattr(whole, name))


def test_only_decayed_slices_decay() -> None:
    arena = Arena([True, False])
    before = arena.master.clone()
    FlatAdamW(RULE, [arena.slices()]).update(0, scalars(1, 0.5, 1.0))  # gradients are zero
    assert torch.equal(arena.master[CHUNK:], before[CHUNK:])
    assert_close_to_largest(arena.master[:CHUNK], before[:CHUNK] * 0.95, 1e-6)


@pytest.mark.parametrize("classes", [[True], [False], []])
def test_one_class_or_nothing_at_all(classes: list[bool]) -> None:
    arena = Arena(classes)
    if not classes:
        FlatAdamW(RULE, [[]]).update(0, scalars(1, 0.1, 1.0))
        return
    before = arena.master.clone()
    steps(arena, FlatAdamW(RULE, [arena.slices()]), number=1)
    assert not torch.equal(arena.master, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_has_no_say(dtype: torch.dtype) -> None:
    want = steps(arena := Arena([True, False]), FlatAdamW(RULE, [arena.slices()]))
    arena = Arena([True, False])
    optimizer = FlatAdamW(RULE, [arena.slices()])
    for step in (1, 2, 3):
        arena.new_gradient()
        torch.set_default_dtype(dtype)
        try:
            optimizer.update(0, scalars(step, 0.01 / step, 7.0))
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(arena.master, want["master"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -1.0}, "AdamW lr must be at least 0; got -1"),
        ({"lr": float("nan")}, "AdamW lr must be at least 0; got nan"),
        ({"eps": -1e-8}, "AdamW eps must be at least 0"),
        ({"weight_decay": -0.1}, "AdamW weight_decay must be at least 0"),
        ({"betas": (0.9, 1.0)}, "two numbers from 0 to below 1"),
        ({"betas": (-0.1, 0.9)}, "two numbers from 0 to below 1"),
        ({"betas": (0.9,)}, "two numbers from 0 to below 1"),
    ],
)
def test_senseless_hyper_parameters_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdamW(**fields)
