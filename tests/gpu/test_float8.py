"""FP8 on one GPU: Tensor Cores against float64 and the emulation, the timed choice, every engine that has it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.config.precision import Float8
from dtrain.errors import ConfigError
from dtrain.models import build_model
from dtrain.precision.float8.cast import E4M3, quantize, spread
from dtrain.precision.float8.choice import Float8Candidate, decide_float8
from dtrain.precision.float8.linear import Float8Linear, convert
from dtrain.precision.float8.matmul import multiply
from dtrain.precision.float8.options import Recipe, resolve_float8
from dtrain.precision.float8.weights import Cache, QuantizedWeight
from dtrain.precision.policy import PrecisionPolicy
from tests.gpu.device import DEVICE, ON_CPU, capability, needs_gpu, synchronize
from tests.gpu.test_engine import ADAMW, CONFIG, VOCAB, train
from tests.gpu.test_engine import make_engine as make_native
from tests.helpers.needs import products_on_cpu
from tests.helpers.oracle import normwise_error

pytestmark = pytest.mark.usefixtures("one_rank_of_nccl")

RECIPES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise")
ENGINES = [*(("native", stage) for stage in range(4)), ("ddp", 0), ("fsdp2", 2), ("fsdp2", 3)]
OPTIONS = [Float8(recipe=recipe, choice="all") for recipe in RECIPES]

tensor_cores = pytest.mark.skipif(not ON_CPU and capability() < (8, 9), reason="no FP8 Tensor Cores")


@pytest.fixture(autouse=True)
def needs_what_blocks_need(request: pytest.FixtureRequest) -> None:
    """Skips a case in blocks where the device or its libraries cannot multiply them."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if params.get("recipe", getattr(params.get("options"), "recipe", None)) == "blockwise":
        try:
            resolve_float8(Float8(recipe="blockwise"), DEVICE)
        except ConfigError as error:
            pytest.skip(str(error))


def recipe_of(options: Float8) -> Recipe:
    if ON_CPU:  # which has scaled_mm too, and emulates unless it is told not to
        products_on_cpu(options.recipe)
    return Recipe.of(resolve_float8(replace(options, emulate=False), DEVICE), torch.bfloat16)


@tensor_cores
@pytest.mark.parametrize("grad_format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(16, 16, 16), (64, 48, 2064), (1000, 144, 272), (4096, 1024, 1024)])
def test_products_are_those_of_float64(shape: tuple[int, int, int], recipe: str, grad_format: str) -> None:
    """Beyond one rounding to BF16 a sum of K products may be off by the bits that the Tensor Core accumulates in.

    Hopper keeps 13 bits of a partial sum of up to 128 products, then adds it in FP32.
    """
    if recipe != "tensorwise" and grad_format == "e5m2":
        pytest.skip("scaled_mm takes E4M3 alone, row by row and in blocks")
    m, n, k = shape
    chosen = replace(recipe_of(Float8(recipe=recipe, grad_format=grad_format)), compile=False)
    m = -(-m // 16) * 16
    x, w = torch.randn(m, k, device=DEVICE) * 3, torch.randn(n, k, device=DEVICE) * 0.02
    # strided: what is cast may be a transpose
    a = quantize(x.t().contiguous().t(), chosen.grad_dtype, chosen.scaling)
    b = quantize(w, E4M3, chosen.weight_scaling)
    exact_a, exact_b = (
        operand.values.double() * spread(operand.scale, operand.values.shape).double() for operand in (a, b)
    )
    exact, size = exact_a @ exact_b.t(), exact_a.abs() @ exact_b.abs().t()
    for emulate in (False, True):
        y = multiply(a, b, torch.bfloat16, emulate=emulate)
        assert y.shape == (m, n)
        allowed = exact.abs() * 2**-8 + size * (2**-20 if emulate else 2**-12)
        assert bool(((y.double() - exact).abs() <= allowed).all())


def run_linear(linear: Any, x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    inputs: Any = x.clone().requires_grad_()
    linear.zero_grad()
    y = linear(inputs)
    y.backward(gradient)
    return y.detach(), inputs.grad, linear._parameters["weight"].grad


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


@tensor_cores
@pytest.mark.parametrize("options", OPTIONS, ids=RECIPES)
def test_compiled_casts_have_the_bits_of_eager_ones(options: Float8) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(256, 192, device=DEVICE).bfloat16()
    x = torch.randn(512, 256, device=DEVICE).bfloat16() * torch.logspace(-20, 4, 512, device=DEVICE)[:, None].bfloat16()
    gradient = torch.randn(512, 192, device=DEVICE).bfloat16() * 1e-6
    eager, compiled = (
        run_linear(convert(copy.deepcopy(plain), replace(recipe_of(options), compile=compiles)), x, gradient)
        for compiles in (False, True)
    )
    for one, other in zip(eager, compiled, strict=True):
        assert torch.equal(one, other)


@tensor_cores
@pytest.mark.parametrize("options", OPTIONS, ids=RECIPES)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
def test_an_overflow_is_never_hidden(options: Float8, value: float, where: str) -> None:
    linear = nn.Linear(64, 32, device=DEVICE).bfloat16()
    x, gradient = (torch.randn(48, size, device=DEVICE).bfloat16() for size in (64, 32))
    victim = {"input": x, "weight": linear.weight.data, "gradient": gradient}[where]
    victim[3, 5] = value
    y, dx, dw = run_linear(convert(linear, recipe_of(options)), x, gradient)
    assert bool(y.isfinite().all()) == (where == "gradient")
    assert bool(dx.isfinite().all()) == (where == "input")
    assert bool(dw.isfinite().all()) == (where == "weight")


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
        own = replace(chosen, products=decision.products)
        fast = convert(copy.deepcopy(plain), own, QuantizedWeight(own, Cache.UNTIL_WRITTEN))
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


def policy_of(options: Float8 | None) -> PrecisionPolicy:
    """FP8 with ``options``, or BF16 without."""
    return PrecisionPolicy.named("bf16") if options is None else PrecisionPolicy.named("fp8", float8=options)


def make_engine(options: Float8 | None, engine: str = "native", stage: int = 2, **more: Any) -> Any:
    return make_native(policy_of(options), stage, engine=engine, **more)


@pytest.mark.parametrize("options", OPTIONS, ids=RECIPES)
def test_frozen_weights_take_a_byte_and_train_near_bf16(options: Float8) -> None:
    """The same bits sharded or not; each product has its own transposes, which are freed."""

    def make(options: Float8 | None, stage: int) -> Any:
        model = build_model(CONFIG, VOCAB, seed=0)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("blocks." not in name or "norm" in name)
        settings: dict[str, Any] = {"optimizer": ADAMW, "seed": 0, "reproducible": True}
        return dtrain.initialize(model.to(DEVICE), zero_stage=stage, precision=policy_of(options), **settings)

    whole, sharded, low = make(options, 0), make(options, 3), make(None, 0)
    losses = [[outcome.loss for outcome in train(engine, 8)] for engine in (whole, sharded, low)]
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(losses[2], rel=0.02)
    frozen = sum(p.numel() for p in whole.states.frozen.values())
    assert frozen <= whole.memory()["frozen"] <= 1.15 * frozen
    assert low.memory()["frozen"] == 2 * frozen


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


@tensor_cores
@pytest.mark.parametrize("options", OPTIONS, ids=RECIPES)
def test_tensor_cores_train_as_the_emulation_does(options: Float8) -> None:
    if ON_CPU:
        products_on_cpu(options.recipe)
    real, emulated = (make_engine(replace(options, emulate=emulates)) for emulates in (False, True))
    assert not float8_linears(real)[0].recipe.emulate
    assert float8_linears(emulated)[0].recipe.emulate
    losses = [[outcome.loss for outcome in train(engine, 12)] for engine in (real, emulated)]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)


@pytest.mark.parametrize("options", OPTIONS, ids=RECIPES)
def test_stages_give_the_same_bits(options: Float8) -> None:
    engines = [make_engine(options, "native", stage, reproducible=True) for stage in range(4)]
    for engine in engines:
        train(engine, 4)
    states = [engine.master_state() for engine in engines]
    for one, other in pairwise(states):
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize(("name", "stage"), ENGINES)
def test_an_infinity_is_skipped_and_leaves_no_trace(name: str, stage: int) -> None:
    engine = make_engine(OPTIONS[0], name, stage)
    train(engine, 1)
    before = engine.master_state()

    def spoil(_: nn.Module, grads: Any) -> Any:
        return (torch.full_like(grads[0], torch.inf),)

    handle = float8_linears(engine)[0].register_full_backward_pre_hook(spoil)
    outcome = train(engine, 1)[0]
    handle.remove()
    assert outcome.reason == "overflow"
    for key, tensor in engine.master_state().items():
        assert torch.equal(tensor, before[key]), key
    assert train(engine, 1)[0].applied
