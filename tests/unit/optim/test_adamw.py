"""Both kernels of the flat update: AdamW in double precision is the reference, and any cut gives the same bits."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.config.optim import AdamW
from dtrain.errors import ConfigError
from dtrain.optim import compiled, flat, rules
from dtrain.optim.adamw import AdamWRule
from dtrain.optim.flat import FlatUpdate
from dtrain.optim.rule import UpdateClass, UpdateScalars, UpdateSlice
from dtrain.optim.rules import on_device
from dtrain.sharding.layout import CHUNK
from tests.helpers.host_reads import forbidden
from tests.helpers.oracle import assert_close_to_largest

FUSED = AdamW(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, compile=False)
COMPILED = AdamW(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, compile=True)
CPU = torch.device("cpu")
STATES = ("master", "exp_avg", "exp_avg_sq", "replica")
CLASSES = {True: UpdateClass(0, 0.1), False: UpdateClass(0, 0.0)}
"""Those of weights, and of norms and biases."""
SLOWER = UpdateClass(0, 0.03, 0.3)
both_kernels = pytest.mark.parametrize(
    "rule",
    [pytest.param(FUSED, id="fused"), pytest.param(COMPILED, id="compiled", marks=pytest.mark.compile)],
)


def scalars(step: int, lr: float, grad_divisor: float, found_inf: float = 0.0) -> UpdateScalars:
    return UpdateScalars(lr, step, torch.tensor(grad_divisor), torch.tensor(found_inf))


class Arena:
    """Contiguous masters, gradients, moments and replica, with the classes of the chunks."""

    def __init__(
        self, classes: Sequence[bool | UpdateClass], seed: int = 0, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        numel = len(classes) * CHUNK
        self.classes = [CLASSES.get(each, each) for each in classes]
        self.master = torch.randn(numel, generator=generator)
        self.main_grad = torch.zeros(numel)
        self.exp_avg, self.exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
        self.replica = self.master.to(dtype, copy=True)
        self._generator = generator

    def slices(self, cuts: Sequence[int] = ()) -> list[UpdateSlice]:
        """Returns the arena cut where the class changes and at every chunk number of ``cuts``."""
        changes = [i for i in range(1, len(self.classes)) if self.classes[i] != self.classes[i - 1]]
        bounds = sorted({0, len(self.classes), *changes, *cuts})
        parts = [slice(start * CHUNK, stop * CHUNK) for start, stop in itertools.pairwise(bounds)]
        return [
            UpdateSlice(
                self.classes[part.start // CHUNK],
                (0, part.start),
                self.master[part],
                self.main_grad[part],
                (self.exp_avg[part], self.exp_avg_sq[part]),
                self.replica[part],
            )
            for part in parts
        ]

    def new_gradient(self) -> Tensor:
        self.main_grad.copy_(torch.randn(self.main_grad.numel(), generator=self._generator))
        return self.main_grad.clone()

    def states(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in STATES}


class Reference:
    """Loshchilov and Hutter, 2019, algorithm 2, in double precision."""

    def __init__(self, arena: Arena, rule: AdamW) -> None:
        self.rule = rule
        self.master = arena.master.double()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        classes = [(each.weight_decay, each.lr_factor) for each in arena.classes]
        self.decay, self.lr_factor = torch.tensor(classes, dtype=torch.float64).repeat_interleave(CHUNK, 0).unbind(1)

    def update(self, gradient: Tensor, step: int, lr: float) -> None:
        (beta1, beta2), gradient = self.rule.betas, gradient.double()
        self.exp_avg = beta1 * self.exp_avg + (1 - beta1) * gradient
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * gradient**2
        first, second = self.exp_avg / (1 - beta1**step), self.exp_avg_sq / (1 - beta2**step)
        self.master -= lr * self.lr_factor * (first / (second.sqrt() + self.rule.eps) + self.decay * self.master)


def adamw_update(record: AdamW, segments: Sequence[Sequence[UpdateSlice]]) -> FlatUpdate:
    return FlatUpdate([AdamWRule(record)], segments)


def steps(arena: Arena, optimizer: FlatUpdate, number: int = 3, divisor: float = 7.0) -> dict[str, Tensor]:
    for step in range(1, number + 1):
        arena.new_gradient()
        optimizer.update([0], scalars(step, 0.01 / step, divisor))
    return arena.states()


def same_bits(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8)) for name in want)


@both_kernels
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.999)])
@pytest.mark.parametrize("divisor", [1.0, 3.0, 65536.0])
def test_follows_adamw_in_double_precision(rule: AdamW, betas: tuple[float, float], divisor: float) -> None:
    rule = AdamW(lr=rule.lr, betas=betas, weight_decay=0.1, compile=rule.compile)
    arena = Arena([True, SLOWER, True, False, SLOWER])
    reference = Reference(arena, rule)
    optimizer = adamw_update(rule, [arena.slices()])
    for step in range(1, 11):
        gradient = arena.new_gradient()
        arena.main_grad.mul_(divisor)
        reference.update(gradient, step, 0.01 / step)
        optimizer.update([0], scalars(step, 0.01 / step, divisor))
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert_close_to_largest(getattr(arena, name), getattr(reference, name), 1e-6)
    assert torch.equal(arena.replica, arena.master.bfloat16())


@both_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_replica_is_the_masters_cast(rule: AdamW, dtype: torch.dtype) -> None:
    arena = Arena([True, False], dtype=dtype)
    steps(arena, adamw_update(rule, [arena.slices()]))
    assert torch.equal(arena.replica, arena.master.to(dtype))


@both_kernels
def test_masters_may_be_updated_without_a_cast(rule: AdamW) -> None:
    arena, plain = Arena([True, False]), Arena([True, False])
    got = steps(arena, adamw_update(rule, [[replace(part, replica=None) for part in arena.slices()]]))
    want = steps(plain, adamw_update(rule, [plain.slices()]))
    assert torch.equal(got["master"], want["master"])
    assert torch.equal(arena.replica, Arena([True, False]).replica)


@pytest.mark.compile
def test_both_kernels_agree_normwise() -> None:
    first, second = Arena([True] * 3 + [False] * 2), Arena([True] * 3 + [False] * 2)
    want = steps(first, adamw_update(FUSED, [first.slices()]), number=20)
    got = steps(second, adamw_update(COMPILED, [second.slices()]), number=20)
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert torch.linalg.vector_norm(got[name] - want[name]) <= 3e-7 * torch.linalg.vector_norm(want[name])


@both_kernels
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_found_inf_leaves_every_bit(rule: AdamW, bad: float) -> None:
    arena = Arena([True, False, True])
    optimizer = adamw_update(rule, [arena.slices()])
    before = steps(arena, optimizer)
    arena.main_grad[::3] = bad
    optimizer.update([0], scalars(4, 0.01, math.nan, found_inf=1.0))
    assert same_bits(arena.states(), before)
    arena.new_gradient()
    optimizer.update([0], scalars(4, 0.01 / 4, 7.0))
    undisturbed = Arena([True, False, True])
    assert same_bits(arena.states(), steps(undisturbed, adamw_update(rule, [undisturbed.slices()]), number=4))


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_the_host_reads_nothing(found_inf: float) -> None:
    """``fullgraph`` proves the same for the compiled kernel: a read would break the graph."""
    arena = Arena([True, False])
    optimizer = adamw_update(FUSED, [arena.slices()])
    divisor, found = torch.tensor(3.0), torch.tensor(found_inf)
    with forbidden():
        shared = UpdateScalars(0.1, 1, divisor, found)
        optimizer.update([0], shared)


def test_blocks_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, blocked = Arena([True] * 5 + [False] * 2), Arena([True] * 5 + [False] * 2)
    want = steps(whole, adamw_update(FUSED, [whole.slices()]))
    monkeypatch.setattr(flat, "_BLOCK", 2 * CHUNK)
    assert same_bits(steps(blocked, adamw_update(FUSED, [blocked.slices()])), want)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.booleans(), min_size=1, max_size=12).flatmap(
        lambda classes: st.tuples(st.just(classes), st.sets(st.integers(0, len(classes))))
    ),
    st.integers(0, 2**31),
    st.sampled_from([1.0, 0.3, 12345.678]),
)
@both_kernels
def test_any_cut_at_chunks_gives_the_same_bits(
    rule: AdamW, case: tuple[list[bool], set[int]], seed: int, divisor: float
) -> None:
    classes, cuts = case
    whole, cut = Arena(classes, seed), Arena(classes, seed)
    want = steps(whole, adamw_update(rule, [whole.slices()]), divisor=divisor)
    got = steps(cut, adamw_update(rule, [cut.slices(sorted(cuts))]), divisor=divisor)
    assert same_bits(got, want)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 8), st.integers(0, 2**31))
@both_kernels
def test_shards_in_separate_memory_give_the_same_bits(rule: AdamW, world: int, seed: int) -> None:
    """Each shard is a separate tensor, as on ranks."""
    classes = [True] * 5 + [False] * 3
    whole = Arena(classes, seed)
    shards = []
    for start in range(0, 8, world):
        shard = Arena(classes[start : start + world])
        shard.master.copy_(whole.master[start * CHUNK : (start + world) * CHUNK])
        shards.append((start, shard, adamw_update(rule, [shard.slices()])))
    optimizer = adamw_update(rule, [whole.slices()])
    for step in (1, 2, 3):
        gradient = whole.new_gradient()
        optimizer.update([0], scalars(step, 0.01, 3.0))
        for start, shard, shard_optimizer in shards:
            shard.main_grad.copy_(gradient[start * CHUNK : (start + world) * CHUNK])
            shard_optimizer.update([0], scalars(step, 0.01, 3.0))
    together = {name: torch.cat([getattr(shard, name) for _, shard, _ in shards]) for name in ("master", "exp_avg_sq")}
    assert same_bits(together, {name: getattr(whole, name) for name in together})


@both_kernels
def test_only_decayed_slices_decay(rule: AdamW) -> None:
    arena = Arena([True, False])
    before = arena.master.clone()
    adamw_update(rule, [arena.slices()]).update([0], scalars(1, 0.5, 1.0))  # gradients are zero
    assert torch.equal(arena.master[CHUNK:], before[CHUNK:])
    assert_close_to_largest(arena.master[:CHUNK], before[:CHUNK] * 0.95, 1e-6)


@pytest.mark.parametrize("classes", [[True], [False], []])
@both_kernels
def test_one_class_or_no_slices(rule: AdamW, classes: list[bool]) -> None:
    arena = Arena(classes)
    if not classes:
        adamw_update(rule, [[]]).update([0], scalars(1, 0.1, 1.0))
        return
    before = arena.master.clone()
    steps(arena, adamw_update(rule, [arena.slices()]), number=1)
    assert not torch.equal(arena.master, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_update_ignores_torchs_default_dtype(dtype: torch.dtype) -> None:
    want = steps(arena := Arena([True, False]), adamw_update(FUSED, [arena.slices()]))
    arena = Arena([True, False])
    optimizer = adamw_update(FUSED, [arena.slices()])
    for step in (1, 2, 3):
        arena.new_gradient()
        torch.set_default_dtype(dtype)
        try:
            optimizer.update([0], scalars(step, 0.01 / step, 7.0))
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(arena.master, want["master"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -1.0}, "AdamW.lr=-1.0 is too small; it must be at least 0"),
        ({"lr": float("nan")}, "AdamW.lr=nan is not a finite number"),
        ({"lr": "1e-3"}, "AdamW.lr='1e-3' is not a number"),
        ({"lr": torch.tensor(1e-3)}, "AdamW.lr=tensor.* is not a number"),
        ({"eps": -1e-8}, "AdamW.eps=-1e-08 is too small"),
        ({"weight_decay": -0.1}, "AdamW.weight_decay=-0.1 is too small"),
        ({"betas": 0.9}, "AdamW.betas=0.9 is not a list of 2 numbers"),
        ({"name": "lion"}, "AdamW.name=lion is not one of adamw"),
        ({"betas": (0.9, 1.0)}, "must be two numbers in"),
        ({"betas": (-0.1, 0.9)}, "must be two numbers in"),
        ({"betas": (0.9,)}, "must be two numbers in"),
        ({"compile": "always"}, "AdamW.compile=always is not one of auto, true, false"),
    ],
)
def test_invalid_hyper_parameters_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdamW(**fields)


def test_the_kernel_is_chosen_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert on_device(AdamW(), CPU).compile is False
    assert on_device(AdamW(compile=True), CPU).compile is True
    for exists in (True, False):
        monkeypatch.setattr(rules, "has_compiler", lambda device, exists=exists: exists)
        assert on_device(AdamW(), cuda).compile is exists
    with pytest.raises(ValueError, match="call on_device first"):
        AdamWRule(AdamW())


@pytest.mark.compile
def test_one_graph_for_each_replica_dtype_and_one_for_the_coefficients() -> None:
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for dtype in (torch.bfloat16, torch.float32):
        for classes in ([True, False], [False] * 7, [True] * 700):
            arena = Arena(classes, dtype=dtype)
            rule = AdamW(lr=0.1, betas=(0.5, 0.9), eps=0.1 * len(classes), compile=True)
            steps(arena, adamw_update(rule, [arena.slices([1])]))
    assert counters["stats"]["unique_graphs"] == 3


def test_a_compiler_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no working C++ compiler\nand a long story")

    monkeypatch.setattr(compiled, "_compiled", lambda formula: (fail, fail))
    with pytest.raises(ConfigError, match=r"cannot be compiled on cpu \(RuntimeError: no working C\+\+ compiler\)"):
        adamw_update(COMPILED, [Arena([True]).slices()])


@pytest.mark.compile
def test_the_kernel_and_the_compile_time_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dtrain"):
        for rule in (FUSED, COMPILED):
            adamw_update(rule, [Arena([True]).slices()])
    assert "torch's fused kernel; optim.compile=true" in caplog.messages[0]
    assert "AdamW compiled in" in caplog.messages[1]
