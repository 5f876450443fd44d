"""Float8Linear: its three matmuls against double precision, its inputs, and its cached weights."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import dtrain
from dtrain.errors import ContractError, ModelError, UsageError
from dtrain.precision import autocast_ops
from dtrain.precision.float8.cast import E4M3, E5M2, Scaling
from dtrain.precision.float8.linear import Float8Linear, convert
from dtrain.precision.float8.options import PRODUCTS, Recipe
from dtrain.precision.float8.weights import Bound, Cache, QuantizedWeight
from tests.helpers import needs

TENSORWISE, ROWWISE = Recipe(), Recipe("rowwise", E4M3)
BLOCKWISE, BF16_WGRAD = Recipe("blockwise", E4M3), replace(ROWWISE, name="rowwise_bf16_wgrad", products=PRODUCTS[:2])
RECIPES = {
    "tensorwise": TENSORWISE,
    "tensorwise-e4m3": Recipe(grad_dtype=E4M3),
    "rowwise": ROWWISE,
    "rowwise-e5m2": Recipe("rowwise"),
    "rowwise-bf16-wgrad": BF16_WGRAD,
    "blockwise": BLOCKWISE,
}
# signal to quantization noise of a product of normally distributed operands: 3 mantissa bits, or 2 on one side
SQNR = {E4M3: 27.0, E5M2: 23.5}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
each_scaling = pytest.mark.parametrize("recipe", [TENSORWISE, ROWWISE, BLOCKWISE], ids=lambda recipe: recipe.name)


def decibels(value: Tensor, reference: Tensor) -> float:
    """Signal to noise."""
    value, reference = value.detach().double(), reference.detach()
    return float(10 * torch.log10(reference.square().mean() / (value - reference).square().mean()))


def make(recipe: Recipe, in_features: int = 80, out_features: int = 48, *, bias: bool = False) -> Float8Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return convert(nn.Linear(in_features, out_features, bias=bias), recipe)


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def products(linear: nn.Linear, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, gradient of the input, gradient of the weight."""
    x = x.detach().requires_grad_()
    y = linear(x)
    dx, dw = torch.autograd.grad(y, (x, linear._parameters["weight"]), grad)
    return y.detach(), dx, dw


def in_double(weight: Tensor, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, grad, weight = (tensor.detach().double() for tensor in (x, grad, weight))
    return x @ weight.t(), grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


def num_copies(recipe: Recipe) -> int:
    return 1 + (recipe.scaling is Scaling.ROWS)


def bound(linear: nn.Linear, recipe: Recipe) -> QuantizedWeight:
    """A weight stored in FP8 only, as in the native engine: the parameter becomes NaN."""
    weight = linear._parameters["weight"]
    copies = QuantizedWeight(recipe).copies(weight)[: num_copies(recipe)]
    placeholder = nn.Parameter(torch.full((1, 1), math.nan, dtype=torch.bfloat16).expand(weight.shape))
    linear._parameters["weight"] = placeholder
    quantized = QuantizedWeight(recipe, Bound("0.weight", placeholder, [copy.scale for copy in copies]))
    quantized.bind([copy.values for copy in copies])
    return quantized


MakeCache = Callable[[nn.Linear, Recipe], QuantizedWeight]
CACHES: dict[str, MakeCache] = {
    "never": lambda linear, recipe: QuantizedWeight(recipe),
    "until written": lambda linear, recipe: QuantizedWeight(recipe, Cache.UNTIL_WRITTEN),
    "bound": bound,
}
every_cache = pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)


@every_recipe
@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "scaled_mm"])
@pytest.mark.parametrize("sizes", [(64, 80, 48), (37, 50, 20)], ids=["aligned", "padded"])
def test_all_three_matmuls_are_near_double(recipe: Recipe, emulate: bool, sizes: tuple[int, int, int]) -> None:
    needs.products_on_cpu(recipe.name, emulate=emulate)
    rows, in_features, out_features = sizes
    linear = make(replace(recipe, emulate=emulate), in_features, out_features)
    x, grad = normal(3, rows, in_features), normal(3, rows, out_features, seed=2)
    found = products(linear, x, grad)
    bounds = (SQNR[E4M3], SQNR[recipe.grad_dtype], SQNR[recipe.grad_dtype])
    for value, exact, least in zip(found, in_double(linear.weight, x, grad), bounds, strict=True):
        assert value.shape == exact.shape
        assert decibels(value, exact) > least


@every_recipe
@every_cache
@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "scaled_mm"])
def test_all_caches_give_the_same_bits(recipe: Recipe, cache: MakeCache, emulate: bool) -> None:
    needs.products_on_cpu(recipe.name, emulate=emulate)
    recipe = replace(recipe, emulate=emulate)
    x, grad = normal(37, 50), normal(37, 20, seed=2)
    want = products(make(recipe, 50, 20), x, grad)
    linear = make(recipe, 50, 20)
    linear.quantized_weight = cache(linear, recipe)
    for _ in range(2):
        found = products(linear, x, grad)
        assert all(torch.equal(value.to(have.dtype), have) for value, have in zip(want, found, strict=True))


non_finite = st.sampled_from([math.inf, -math.inf, math.nan])


@settings(max_examples=25)
@given(st.sampled_from(sorted(RECIPES)), st.sampled_from(["x", "weight", "grad"]), non_finite, st.data())
def test_non_finite_values_reach_every_result_that_uses_them(name: str, place: str, bad: float, data: Any) -> None:
    """E4M3 has no Inf: a cast alone would give 448, and the step would be applied."""
    linear = make(RECIPES[name], 32, 16)
    x, grad = normal(20, 32), normal(20, 16, seed=2)
    tensor = {"x": x, "weight": linear.weight.data, "grad": grad}[place]
    tensor[tuple(data.draw(st.integers(0, size - 1)) for size in tensor.shape)] = bad
    y, dx, dw = products(linear, x, grad)
    entered = {"x": (y, dw), "weight": (y, dx), "grad": (dx, dw)}[place]
    assert not any(product.isfinite().all() for product in entered)
    others = [product for product in (y, dx, dw) if all(product is not one for one in entered)]
    assert all(product.isfinite().all() for product in others)


@each_scaling
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inputs_of_any_16_or_32_bits(recipe: Recipe, dtype: torch.dtype) -> None:
    """Inputs are cast to FP8 directly: FP32 is not rounded to BF16 first."""
    linear = make(recipe, bias=True)
    x = normal(8, 80, dtype=dtype).requires_grad_()
    y = linear(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert (x.grad.dtype, linear.weight.grad.dtype) == (dtype, torch.float32)
    assert linear.bias.grad.tolist() == [8.0] * 48
    between = torch.full((16, 80), 1.0 + 2.0**-4 + 2.0**-12)  # rounds up in E4M3, and down where BF16 comes first
    assert torch.equal(linear(between), linear(torch.full((16, 80), 1.125)))
    assert not torch.equal(linear(between), linear(between.bfloat16()))
    for other in (torch.zeros(4, 80).double(), torch.zeros(4, 80).int(), torch.zeros(4, 81)):
        with pytest.raises(ModelError, match=r"takes FP32, BF16 or FP16 \[\.\.\., 80\]; got .* \[4, 8[01]\]"):
            linear(other)


@each_scaling
@pytest.mark.parametrize("bias", [False, True])
def test_shapes(recipe: Recipe, bias: bool) -> None:
    linear = make(recipe, 50, 20, bias=bias)
    x, grad = normal(6, 50), normal(6, 20, seed=2)
    want = products(linear, x, grad)
    deep = products(linear, x.view(2, 1, 3, 50), grad.view(2, 1, 3, 20))
    assert all(torch.equal(got.view(own.shape), own) for got, own in zip(deep, want, strict=True))
    one = products(linear, x[0], grad[0])
    assert (one[0].shape, one[1].shape) == ((20,), (50,))
    assert torch.equal(one[0], products(linear, x[:1], grad[:1])[0][0])
    none = products(linear, x[:0].view(2, 0, 50), grad[:0].view(2, 0, 20))
    assert [tuple(product.shape) for product in none] == [(2, 0, 20), (2, 0, 50), (20, 50)]
    assert not none[2].any()


def test_the_output_may_be_changed_in_place() -> None:
    for sizes, shape in [((80, 48), (16,)), ((50, 20), (2, 8))]:  # aligned, and padded
        x = normal(*shape, sizes[0])
        gradients = []
        for inplace in (False, True):
            model = nn.Sequential(make(TENSORWISE, *sizes), nn.ReLU(inplace=inplace))
            model(x).sum().backward()
            gradients.append(model[0].weight.grad)
        assert torch.equal(*gradients)


def test_fast_accumulation_affects_the_output_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = [], F.scaled_mm
    monkeypatch.setattr(F, "scaled_mm", lambda *a, **how: asked.append(how["use_fast_accum"]) or real(*a, **how))
    products(make(Recipe(emulate=False, fast_accumulation=True)), normal(16, 80), normal(16, 48))
    assert asked == [True, False, False]


@pytest.mark.parametrize("recipe", [TENSORWISE, ROWWISE], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize(
    ("trained", "bytes_saved"),
    [(("x", "weight"), 32 * 80 + 48 * 80), (("x",), 48 * 80), (("weight",), 32 * 80), ((), 0)],
    ids=["both", "input", "weight", "none"],
)
def test_only_fp8_is_saved_and_only_for_gradients_in_need(recipe: Recipe, trained: Any, bytes_saved: int) -> None:
    saved: list[Tensor] = []
    linear = make(recipe, bias=True)
    linear.quantized_weight = QuantizedWeight(recipe, Cache.UNTIL_WRITTEN)
    linear.weight.requires_grad_("weight" in trained)
    x = normal(32, 80).requires_grad_("x" in trained)
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = linear(x)
    matrices = [tensor for tensor in saved if tensor.dim() == 2]
    assert all(tensor.dtype == E4M3 for tensor in matrices)
    assert sum(tensor.numel() for tensor in matrices) == bytes_saved
    grad = normal(32, 48, seed=2)
    y.backward(grad)
    assert (x.grad is not None, linear.weight.grad is not None) == ("x" in trained, "weight" in trained)
    _, *wanted = products(make(recipe), x, grad)
    for found, want in zip((x.grad, linear.weight.grad), wanted, strict=True):
        assert found is None or torch.equal(found, want)


def test_without_a_graph_the_transpose_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = make(TENSORWISE)
    x = normal(32, 80)
    want = linear(x)
    monkeypatch.setattr("dtrain.precision.float8.cast.quantized_both", None)
    with torch.no_grad():
        assert torch.equal(linear(x), want)
    with pytest.raises(TypeError):
        linear(x)


@each_scaling
def test_activation_checkpointing_gives_the_same_gradients(recipe: Recipe) -> None:
    ops = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    selective = functools.partial(create_selective_checkpoint_contexts, ops)
    ways: list[dict[str, Any]] = [{"use_reentrant": True}, {"use_reentrant": False}]
    ways.append({"use_reentrant": False, "context_fn": selective})
    linear = make(recipe)
    x, grad = normal(16, 80), normal(16, 48, seed=2)
    want = products(linear, x, grad)
    for way in ways:
        inputs, linear.weight.grad = x.clone().requires_grad_(), None
        checkpoint(linear, inputs, **way).backward(grad)
        assert torch.equal(inputs.grad, want[1])
        assert torch.equal(linear.weight.grad, want[2])


@pytest.mark.parametrize("recipe", [TENSORWISE, ROWWISE], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("emulate", [True, False], ids=["emulated", "scaled_mm"])
def test_cached_weights_are_cast_again_when_they_change(recipe: Recipe, emulate: bool) -> None:
    needs.products_on_cpu(recipe.name, emulate=emulate)
    recipe = replace(recipe, emulate=emulate)
    linear = make(recipe)
    weight = linear.quantized_weight = QuantizedWeight(recipe, Cache.UNTIL_WRITTEN)
    x, grad = normal(16, 80), normal(16, 48, seed=2)
    before = products(linear, x, grad)
    cached = [tensor.data_ptr() for tensor in weight.cached()]
    # the copies, and the operands made from them: decoded or transposed
    bytes_kept = {(False, True): 1 + 4, (False, False): 1 + 1, (True, True): 2 + 8, (True, False): 2 + 1}
    want_bytes = linear.weight.numel() * bytes_kept[recipe.name == "rowwise", emulate]
    assert sum(tensor.nbytes for tensor in weight.cached()) == want_bytes
    linear.weight.data.neg_()
    assert torch.equal(products(linear, x, grad)[0], before[0])
    assert [tensor.data_ptr() for tensor in weight.cached()] == cached
    weight.invalidate()
    assert not weight.cached()
    after = products(linear, x, grad)
    assert torch.equal(after[0], -before[0])
    assert torch.equal(after[1], -before[1])
    with torch.no_grad():
        linear.weight.neg_()  # a write that PyTorch counts needs no invalidation
        assert torch.equal(linear(x), before[0])
        linear.load_state_dict({"weight": torch.zeros(48, 80)})
        assert not linear(x).any()


@each_scaling
@pytest.mark.parametrize("cache", Cache)
def test_functional_call_with_another_weight(recipe: Recipe, cache: Cache) -> None:
    linear = make(recipe)
    linear.quantized_weight = QuantizedWeight(recipe, cache)
    x, grad = normal(16, 80).requires_grad_(), normal(16, 48, seed=2)
    own = linear(x)
    for other in (linear.weight.detach().neg(), torch.zeros(48, 80)):  # where one lay, the next may lie
        weight = other.clone().requires_grad_()
        y = functional_call(linear, {"weight": weight}, (x,))
        assert torch.equal(linear(x), own)
        want = products(make(recipe), x, grad) if other.any() else (own * 0,) * 2
        assert torch.equal(y.abs(), want[0].abs())
        assert not (y * own > 0).any()
        dx, dw = torch.autograd.grad(y, (x, weight), grad)
        assert torch.equal(dx.abs(), want[1].abs() if other.any() else torch.zeros_like(dx))
        assert dw.any()
        with torch.inference_mode():
            assert torch.equal(functional_call(linear, {"weight": other.clone()}, (x,)), y)
        del y, weight


def test_a_graph_older_than_an_invalidation_caches_nothing() -> None:
    """Its copies are freed afterwards; an operand cached for their address would be used for other copies."""
    linear = make(TENSORWISE)
    weight = linear.quantized_weight = QuantizedWeight(TENSORWISE, Cache.UNTIL_WRITTEN)
    x, grad = normal(16, 80).requires_grad_(), normal(16, 48, seed=2)
    want = products(linear, x, grad)
    y = linear(x)
    weight.invalidate()
    (dx,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(dx, want[1])
    assert not weight.cached()


def test_a_sharded_weight_is_refused() -> None:
    linear = make(TENSORWISE)
    weight = linear.quantized_weight = bound(linear, TENSORWISE)
    assert linear.weight.isfinite().all()
    weight.bind([])
    assert linear.weight.isnan().all()
    with pytest.raises(ContractError, match=r"'0\.weight' is computed with while it is sharded; its group was not uns"):
        linear(normal(16, 80))


def test_weight_reads_as_a_tensor_with_gradients_that_takes_no_settings() -> None:
    linear = make(TENSORWISE)
    want = linear.weight.detach().clone()
    linear.quantized_weight = bound(linear, TENSORWISE)
    weight = linear.weight
    assert weight.dtype == torch.bfloat16
    assert decibels(weight, want.double()) > SQNR[E4M3]
    weight.square().sum().backward()
    assert torch.equal(linear._parameters["weight"].grad, 2 * weight.detach())
    assert torch.equal(linear.state_dict()["weight"], weight)
    assert isinstance(make(TENSORWISE).weight, nn.Parameter)
    for setting in (
        lambda: weight.register_hook(lambda grad: grad),
        lambda: weight.register_post_accumulate_grad_hook(lambda parameter: None),
        lambda: weight.requires_grad_(False),
    ):
        with pytest.raises(UsageError, match=r"read-only copy; .* dict\(model\.named_parameters\(\)\)\['0\.weight'\]"):
            setting()


@every_cache
@each_scaling
def test_a_copy_owns_its_weight(recipe: Recipe, cache: MakeCache) -> None:
    linear = make(recipe, bias=True)
    linear.quantized_weight = cache(linear, recipe)
    model = nn.Sequential(linear, nn.ReLU())
    x = normal(16, 80)
    want = model(x)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), want)
    assert torch.equal(copied[0].weight, linear.weight)
    assert [name for name, _ in copied.named_parameters()] == ["0.weight", "0.bias"]
    with torch.no_grad():
        copied[0].weight.zero_()
    assert not copied(torch.ones_like(x))[:, copied[0].bias <= 0].any()
    assert torch.equal(model(x), want)


@every_cache
def test_a_full_precision_region_computes_in_fp32_in_fp8_linears(cache: MakeCache) -> None:
    linear = make(TENSORWISE, bias=True)
    linear.quantized_weight = cache(linear, TENSORWISE)
    x = normal(16, 80).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_fp8 = linear(x)
        with dtrain.full_precision():
            y = linear(x)
    assert (y_fp8.dtype, y.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(y, F.linear(x.float(), linear.weight.float(), linear.bias))
    y.sum().backward()
    assert linear._parameters["weight"].grad.isfinite().all()


@every_cache
def test_autocast_of_another_dtype_is_refused_inside_an_engine(cache: MakeCache) -> None:
    """With autocast off it computes in FP32 like any Linear; outside an engine autocast does not affect FP8."""
    linear = make(TENSORWISE, bias=True)
    linear.quantized_weight = cache(linear, TENSORWISE)
    x = normal(16, 80)
    y_fp8, want = linear(x), F.linear(x.float(), linear.weight.float(), linear.bias)
    off, half = torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=torch.float16)
    for region in (off, half):
        with region:
            assert torch.equal(linear(x), y_fp8)
    with autocast_ops.enabled("cpu"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear(x), y_fp8)
        with off:
            assert torch.equal(linear(x), want)
        with half, pytest.raises(ContractError, match=r"\[48, 80\] that gives torch.bfloat16 .* of torch.float16"):
            linear(x)
    fp32 = make(replace(TENSORWISE, out_dtype=torch.float32))
    with autocast_ops.enabled("cpu"):
        assert not torch.equal(fp32(x), F.linear(x.float(), fp32.weight)), "FP8 by a rule where all else is FP32"


@pytest.mark.filterwarnings("ignore")
@every_cache
def test_compiled_code_has_its_products_as_operators(cache: MakeCache) -> None:
    """A compiler does not trace padding and cached tensors; its graph has no break."""
    torch._dynamo.reset()
    recipe = Recipe(emulate=False)
    found = []
    for backend in (None, "aot_eager"):
        block = nn.Sequential(make(recipe, 50, 50, bias=True), nn.Tanh(), make(recipe, 50, 50))
        for linear in (block[0], block[2]):
            linear.quantized_weight = cache(linear, recipe)
        parameters = [*block.parameters()]
        if backend is not None:
            block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
        for _ in range(2):
            x = normal(20, 50).requires_grad_()
            y = block(x)
            found.append([y, *torch.autograd.grad(y.sum(), [x, *parameters])])
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))
