"""FP8 on one GPU: Tensor Cores against float64 and the emulation, the timed choice, every engine that has it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.config.precision import Float8
from dtrain.models import build_model
from dtrain.precision.float8.choice import Float8Candidate, decide_float8
from dtrain.precision.float8.linear import Float8Linear, convert
from dtrain.precision.float8.options import Recipe, resolve_float8
from dtrain.precision.float8.weights import Cache, QuantizedWeight
from dtrain.precision.policy import PrecisionPolicy
from tests.gpu.device import DEVICE, ON_CPU, capability, needs_gpu, synchronize
from tests.gpu.test_engine import (
    ADAMW,
    CONFIG,
    VOCAB,
    _one_rank_of_nccl,  # noqa: F401 - a fixture
    train,
)
from tests.helpers.needs import row_scales_on_cpu
from tests.helpers.oracle import normwise_error

RECIPES = ("tensorwise", "rowwise")
ENGINES = [*(("native", stage) for stage in range(4)), ("ddp", 0), ("fsdp2", 2), ("fsdp2", 3)]
OPTIONS = [Float8(recipe=recipe, choice="all") for recipe in RECIPES]

tensor_cores = pytest.mark.skipif(not ON_CPU and capability() < (8, 9), reason="no FP8 Tensor Cores")


def recipe_of(options: Float8) -> Recipe:
    if ON_CPU:  # which has torch._scaled_mm too, and emulates unless it is told not to
        row_scales_on_cpu(rowwise=options.recipe == "rowwise")
    return Recipe.of(resolve_float8(replace(options, emulate=False), DEVICE), torch.bfloat16)


# -- products ----------------------------------------------------------------------------------------------------------


def run_linear(linear: nn.Linear, x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    inputs = x.clone().requires_grad_()
    linear.zero_grad()
    y = linear(inputs)
    y.backward(gradient)
    assert inputs.grad is not None
    assert linear._parameters["weight"].grad is not None  # type: ignore[union-attr]
    return y.detach(), inputs.grad, linear._parameters["weight"].grad  # type: ignore[union-attr]


def sqnr(got: Tensor, want: Tensor) -> float:
    """Ratio of the signal to its error, in dB."""
    return float(20 * torch.log10(want.norm() / (got.double() - want).norm()))


@tensor_cores
@pytest.mark.parametrize("options", OPTIONS, ids=RECIPES)
@pytest.mark.parametrize("shape", [((4, 64), 128, 256), ((37,), 100, 52), ((3, 5, 7), 17, 33)])
def test_a_linear_on_tensor_cores_follows_float64_and_the_emulation(
    options: Float8, shape: tuple[tuple[int, ...], int, int]
) -> None:
    """Shapes that Tensor Cores do not take among them."""
    rows, inside, outside = shape
    torch.manual_seed(0)
    plain = nn.Linear(inside, outside, device=DEVICE).bfloat16()
    x = torch.randn(*rows, inside, device=DEVICE).bfloat16()
    gradient = torch.randn(*rows, outside, device=DEVICE).bfloat16()
    exact = run_linear(copy.deepcopy(plain).double(), x.double(), gradient.double())
    recipe = recipe_of(options)
    assert not recipe.emulate
    real = run_linear(convert(copy.deepcopy(plain), recipe), x, gradient)
    emulated = run_linear(convert(copy.deepcopy(plain), replace(recipe, emulate=True)), x, gradient)
    for got, same, want in zip(real, emulated, exact, strict=True):
        assert got.shape == want.shape
        assert sqnr(got, want) > 20  # two operands of 3 or 2 mantissa bits
        assert sqnr(got, same.double()) > 45  # the same operands; other sums, and BF16 rounds once


# -- the choice --------------------------------------------------------------------------------------------------------


@needs_gpu("times")
@tensor_cores
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_timed_is_never_slower(recipe: str) -> None:
    """Wide and narrow ones, and one that no Tensor Core takes as it is; then the chosen ones are timed again."""
    rows = 4096
    shapes = [(4096, 4096), (14336, 4096), (1024, 1024), (64, 64), (1000, 1000)]
    options = resolve_float8(Float8(recipe=recipe, choice="timed", num_rows=rows), DEVICE)
    decisions = decide_float8([Float8Candidate(f"{n}x{k}", n, k) for n, k in shapes], options, DEVICE)
    assert [decision.name for decision in decisions] == [f"{n}x{k}" for n, k in shapes]
    chosen = Recipe.of(options, torch.bfloat16)
    for decision, (n, k) in zip(decisions, shapes, strict=True):
        if not decision.is_float8:
            continue
        plain = nn.Linear(k, n, bias=False, device=DEVICE).bfloat16()
        fast = convert(copy.deepcopy(plain), chosen, QuantizedWeight(chosen, Cache.UNTIL_WRITTEN))
        x = torch.randn(rows, k, device=DEVICE).bfloat16()
        gradient = torch.randn(rows, n, device=DEVICE).bfloat16()
        slow, quick = (partial(run_linear, linear, x, gradient) for linear in (plain, fast))
        assert interleaved(slow, quick) > 0.99
    assert any(decision.is_float8 for decision in decisions), "a product of 4096 x 14336 x 4096 is faster in FP8"


def interleaved(one: Callable[[], object], other: Callable[[], object], rounds: int = 15) -> float:
    """The time of ``one`` over that of ``other``: the median over rounds in which they take turns."""

    def timed(run: Callable[[], object]) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(10):
            run()
        synchronize()
        return time.perf_counter() - start

    return median([timed(one) / timed(other) for _ in range(rounds + 3)][3:])


# -- engines -----------------------------------------------------------------------------------------------------------


def make_engine(options: Float8 | None, engine: str = "native", stage: int = 2, **more: Any) -> Any:
    """In FP8 with ``options``, or in BF16 without."""
    named = PrecisionPolicy.named("bf16" if options is None else "fp8")
    return dtrain.initialize(
        build_model(CONFIG, VOCAB, seed=0).to(DEVICE),
        optimizer=more.pop("optimizer", ADAMW),
        engine=engine,
        zero_stage=stage,
        precision=named if options is None else replace(named, float8=options),
        max_grad_norm=0.5,
        seed=0,
        **more,
    )


def float8_linears(engine: Any) -> list[Float8Linear]:
    return [module for module in engine.module.modules() if isinstance(module, Float8Linear)]


@pytest.mark.parametrize(("name", "stage"), ENGINES)
@pytest.mark.parametrize("options", OPTIONS, ids=RECIPES)
def test_every_engine_trains_in_fp8_and_stays_near_bf16(options: Float8, name: str, stage: int) -> None:
    engine, low = make_engine(options, name, stage), make_engine(None)
    outcomes, expected = train(engine, 12), train(low, 12)
    assert len(float8_linears(engine)) == len(engine.contract.float8_modules) > 0
    assert all(outcome.applied for outcome in outcomes)
    for outcome, other in zip(outcomes, expected, strict=True):
        assert outcome.loss == pytest.approx(other.loss, rel=0.02)
    assert normwise_error(engine.master_state(), low.master_state()) < 0.05
