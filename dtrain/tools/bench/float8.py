"""``dtrain bench float8``: FP8 against BF16 in dtrain's own engine at several widths, and product by product."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from dtrain.config.dump import config_to_dict
from dtrain.config.schema import (
    Float8BenchConfig,
    Float8Config,
    Float8SuiteConfig,
    ModelConfig,
    PrecisionConfig,
    RunConfig,
)
from dtrain.distributed.setup import choose_device
from dtrain.errors import ConfigError
from dtrain.precision.float8.cast import E4M3, Quantized, quantize
from dtrain.precision.float8.linear import convert
from dtrain.precision.float8.matmul import ALIGNMENT, multiply
from dtrain.precision.float8.options import Recipe
from dtrain.precision.float8.weights import KeptWeights
from dtrain.tools.bench.contest import compete
from dtrain.tools.bench.records import Contender, Float8Results, LinearFormat, ProductTimes, Width
from dtrain.tools.bench.timing import Operation, take_turns
from dtrain.tools.host import describe_host
from dtrain.train.setup import make_policy

ALL_THREE = "all three, with casts"
_BF16 = "bf16"
_REPEATS = {"cpu": 1, "cuda": 20}  # of a product in one turn: on a GPU one alone is as short as its launch


def run_float8_suite(config: Float8SuiteConfig, command: str) -> Float8Results:
    """Races BF16 and each recipe at one width after the other, and times the products of their Linears.

    Raises:
        BenchError: no contender could run.
        ConfigError: a device that is not there, a width that the heads do not divide, FP8 that it cannot compute, or a
            key that has no effect.
    """
    bench = config.bench
    for key, values in (("bench.widths", bench.widths), ("bench.recipes", bench.recipes)):
        if not values or len(set(values)) < len(values):
            raise ConfigError(f"{key}={values} must list one or more, each once")
    if config.float8.recipe != Float8Config().recipe:
        raise ConfigError(f"float8.recipe={config.float8.recipe} has no effect here; list it in bench.recipes")
    device = choose_device(bench.device, 0)
    torch.set_num_threads(bench.threads_per_rank)
    recipes = {name: _recipe(config, name, device) for name in bench.recipes}
    models = [model_of(config.model, width) for width in bench.widths]
    widths = []
    for model in models:
        entries, absences = compete(float8_contenders(bench), replace(config, model=model))
        shapes = product_shapes(linear for entry in entries for linear in entry.footprint.linears)
        rows = bench.micro_batch_size * model.max_seq_len
        products = [
            product
            for out_features, in_features in shapes
            for product in time_products(rows, out_features, in_features, recipes, bench.rounds, device)
        ]
        widths.append(Width(model.hidden_dim, entries, products, absences))
    return Float8Results(
        suite="float8",
        command=command,
        date=time.strftime("%Y-%m-%dT%H:%M:%S"),
        host=describe_host(),
        config=config_to_dict(config),
        tokens_per_rank=bench.micro_batch_size * config.model.max_seq_len,
        emulated=any(recipe.emulate for recipe in recipes.values()),
        widths=widths,
    )


def _recipe(config: Float8SuiteConfig, name: str, device: torch.device) -> Recipe:
    precision = PrecisionConfig(name="fp8", float8=replace(config.float8, recipe=name))
    return Recipe.of(make_policy(RunConfig(precision=precision)).float8.on(device), torch.bfloat16)


def float8_contenders(bench: Float8BenchConfig) -> list[Contender]:
    """BF16 first, then each recipe; all with dtrain's native engine."""
    low = Contender(_BF16, "native", bench.ranks, _BF16, bench.zero_stage)
    return [low, *(replace(low, name=f"fp8 {name}", precision="fp8", recipe=name) for name in bench.recipes)]


def model_of(model: ModelConfig, width: int) -> ModelConfig:
    """``model`` as wide as ``width``: as many layers, more heads of the same size.

    Raises:
        ConfigError: no whole number of heads.
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


def product_shapes(linears: Iterable[LinearFormat]) -> list[tuple[int, int]]:
    """The distinct shapes of weights that FP8 Tensor Cores take as they are, in the order of the model."""
    shapes = dict.fromkeys((linear.out_features, linear.in_features) for linear in linears)
    return [shape for shape in shapes if not any(size % ALIGNMENT for size in shape)]


def time_products(
    rows: int, out_features: int, in_features: int, recipes: dict[str, Recipe], rounds: int, device: torch.device
) -> list[ProductTimes]:
    """The three products of a Linear alone, their operands cast beforehand; then together, with all casts but the
    weight's, which come once a step. BF16 and the recipes take turns.
    """
    x, gradient, weight = (
        torch.randn(shape, device=device, dtype=torch.bfloat16)
        for shape in ((rows, in_features), (rows, out_features), (out_features, in_features))
    )
    operands = {
        "output": (x, weight),
        "input gradient": (gradient, weight.t()),
        "weight gradient": (gradient.t(), x.t()),
    }
    contests = {
        product: {_BF16: lambda left=left, right=right: left @ right.t()}
        | {name: _product(left, right, product, recipe) for name, recipe in recipes.items()}
        for product, (left, right) in operands.items()
    }
    contests[ALL_THREE] = {_BF16: _linear(weight, x, gradient, None)} | {
        name: _linear(weight, x, gradient, recipe) for name, recipe in recipes.items()
    }
    return [
        ProductTimes(product, rows, out_features, in_features, _times(contenders, rounds, device))
        for product, contenders in contests.items()
    ]


def _product(left: Tensor, right: Tensor, product: str, recipe: Recipe) -> Callable[[], object]:
    """``left`` [M, K] times the transpose of ``right`` [N, K], both cast here and not in what is timed."""
    kind = E4M3 if product == "output" else recipe.grad_dtype
    a, b = quantize(left, kind, rowwise=recipe.rowwise), quantize(right, E4M3, rowwise=recipe.rowwise)
    a, b = (Quantized(operand.values.contiguous(), operand.scale) for operand in (a, b))
    return lambda: multiply(a, b, recipe.out_dtype, emulate=recipe.emulate)


def _linear(weight: Tensor, x: Tensor, gradient: Tensor, recipe: Recipe | None) -> Callable[[], object]:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    if recipe is not None:
        convert(linear, recipe, KeptWeights(recipe))
    inputs = x.detach().requires_grad_()

    def run() -> None:
        linear(inputs).backward(gradient)
        linear.zero_grad()
        inputs.grad = None

    return run


def _times(contenders: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    repeats = _REPEATS[device.type]

    def repeated(run: Callable[[], object]) -> Callable[[], None]:
        def turn() -> None:
            for _ in range(repeats):
                run()

        return turn

    timings = take_turns({name: Operation(repeated(run), 0) for name, run in contenders.items()}, rounds, device)
    return {timing.contender: [value / repeats for value in timing.ms] for timing in timings}
