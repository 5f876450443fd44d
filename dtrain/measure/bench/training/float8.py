"""``dtrain bench float8``: FP8 against BF16 in dtrain's native engine at several widths, and product by product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from dtrain.config.model import ModelConfig
from dtrain.config.precision import Float8, PrecisionConfig
from dtrain.config.schema import RunConfig
from dtrain.config.tool_schema import Float8BenchConfig, Float8Suite
from dtrain.device import alternating_ms
from dtrain.distributed.startup.setup import choose_device
from dtrain.errors import ConfigError
from dtrain.measure.bench.records import BenchmarkCase, LinearFormat, ProductTimes, TrainingResults
from dtrain.measure.bench.training.rounds import run_rounds
from dtrain.measure.record import head
from dtrain.precision.float8.cast import E4M3, quantize
from dtrain.precision.float8.linear import convert
from dtrain.precision.float8.matmul import ALIGNMENT, multiply
from dtrain.precision.float8.options import Recipe
from dtrain.precision.float8.weights import Cache, QuantizedWeight
from dtrain.train.setup import make_policy

ALL_THREE = "all three, with casts"
_BF16 = "bf16"
_REPEATS = {"cpu": 1, "cuda": 20}  # on a GPU one product is as short as its launch


def run_float8_suite(config: Float8Suite[Float8BenchConfig], command: str) -> Iterator[TrainingResults]:
    """Measures BF16 and each recipe at one width after the other, and times the products of their Linears."""
    bench = config.bench
    for key, values in (("bench.widths", bench.widths), ("bench.recipes", bench.recipes)):
        if not values or len(set(values)) < len(values):
            raise ConfigError(f"{key}={values} must list one or more, each once")
    if config.float8.recipe != Float8().recipe:
        raise ConfigError(f"float8.recipe={config.float8.recipe} has no effect here; list it in bench.recipes")
    device = choose_device(bench.device, 0)
    torch.set_num_threads(bench.threads_per_rank)
    recipes = {name: _recipe(config, name, device) for name in bench.recipes}
    alignment = max(recipe.alignment for recipe in recipes.values())
    models = [model_of(config.model, width) for width in bench.widths]
    results = TrainingResults(
        **head(command, config),
        suite="float8",
        tokens_per_rank=bench.micro_batch_size * config.model.max_seq_len,
        cases=[],
        train_starts_s=[],
    )
    for model in models:
        cases, failures = results.cases, results.failures
        for measured in run_rounds(float8_cases(bench, model.hidden_dim), replace(config, model=model)):
            results = replace(results, cases=[*cases, *measured.cases], failures=[*failures, *measured.failures])
            yield results
        rows = bench.micro_batch_size * model.max_seq_len
        linears = [linear for result in measured.cases for linear in result.footprint.linears]
        for shape in product_shapes(linears, alignment):
            results.products.extend(time_products(model.hidden_dim, rows, shape, recipes, bench.rounds, device))
        yield results


def _recipe(config: Float8Suite[Float8BenchConfig], name: str, device: torch.device) -> Recipe:
    precision = PrecisionConfig(name="fp8", float8=replace(config.float8, recipe=name))
    return Recipe.of(make_policy(RunConfig(precision=precision)).on(device).float8, torch.bfloat16)


def float8_cases(bench: Float8BenchConfig, width: int) -> list[BenchmarkCase]:
    bf16 = BenchmarkCase("bf16", "native", bench.ranks, "bf16", bench.zero_stage, width=width)
    return [bf16, *(replace(bf16, name=f"fp8 {name}", precision="fp8", recipe=name) for name in bench.recipes)]


def model_of(model: ModelConfig, width: int) -> ModelConfig:
    """Returns ``model`` with ``hidden_dim=width``: as many layers, more heads of the same size.

    Raises:
        ConfigError: ``width`` is not a whole number of heads.
    """
    head_dim = model.hidden_dim // model.num_heads
    if width % head_dim:
        raise ConfigError(
            f"bench.widths: {width} is not a multiple of {head_dim}, the size of a head (model.hidden_dim / "
            f"model.num_heads)"
        )

    def scaled(number: int | None) -> int | None:
        return None if number is None else max(1, number * width // model.hidden_dim)

    return replace(
        model,
        hidden_dim=width,
        num_heads=width // head_dim,
        num_kv_heads=scaled(model.num_kv_heads),
        ffn_dim=scaled(model.ffn_dim),
    )


def product_shapes(linears: Iterable[LinearFormat], alignment: int = ALIGNMENT) -> list[tuple[int, int]]:
    """Returns the distinct weight shapes that need no padding to multiples of ``alignment``, in the model's order."""
    shapes = dict.fromkeys((linear.out_features, linear.in_features) for linear in linears)
    return [shape for shape in shapes if not any(size % alignment for size in shape)]


def time_products(
    width: int, rows: int, shape: tuple[int, int], recipes: dict[str, Recipe], rounds: int, device: torch.device
) -> list[ProductTimes]:
    """Times the three products of a Linear separately, then together with their casts, in BF16 and in each recipe.

    ``shape`` is that of the weight. Separately, the operands are cast beforehand. Together, all casts are timed but the
    weight's, which a step needs only once.
    """
    x, gradient, weight = (
        torch.randn(size, device=device, dtype=torch.bfloat16) for size in ((rows, shape[1]), (rows, shape[0]), shape)
    )
    operands = {
        "output": (x, weight),
        "input gradient": (gradient, weight.t()),
        "weight gradient": (gradient.t(), x.t()),
    }
    workloads = {
        product: {_BF16: lambda left=left, right=right: left @ right.t()}
        | {name: _product(left, right, product, recipe) for name, recipe in recipes.items()}
        for product, (left, right) in operands.items()
    }
    workloads[ALL_THREE] = {_BF16: _linear(weight, x, gradient, None)} | {
        name: _linear(weight, x, gradient, recipe) for name, recipe in recipes.items()
    }
    sizes = {product: [left.shape[0], right.shape[0], left.shape[1]] for product, (left, right) in operands.items()}
    return [
        ProductTimes(
            width,
            product,
            sizes.get(product, sizes["output"]),
            1 if product in operands else len(operands),
            alternating_ms(cases, device, rounds, calls=_REPEATS[device.type]),
        )
        for product, cases in workloads.items()
    ]


def _product(left: Tensor, right: Tensor, product: str, recipe: Recipe) -> Callable[[], object]:
    """Returns the product of ``left`` [M, K] and ``right`` [N, K] transposed; both are cast beforehand, untimed."""
    if product == "weight gradient" and "wgrad" not in recipe.products:
        return lambda: left @ right.t()
    kind = E4M3 if product == "output" else recipe.grad_dtype
    of_right = recipe.scaling if product == "weight gradient" else recipe.weight_scaling
    a, b = quantize(left, kind, recipe.scaling), quantize(right, E4M3, of_right)
    return lambda: multiply(a, b, recipe.out_dtype, emulate=recipe.emulate)


def _linear(weight: Tensor, x: Tensor, gradient: Tensor, recipe: Recipe | None) -> Callable[[], object]:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    if recipe is not None:
        convert(linear, recipe, QuantizedWeight(recipe, Cache.UNTIL_WRITTEN))
    inputs = x.detach().requires_grad_()

    def run() -> None:
        linear(inputs).backward(gradient)
        linear.zero_grad()
        inputs.grad = None

    return run
