"""``dtrain bench float8``: FP8 against BF16 in dtrain's native engine at several widths, and product by product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from dtrain.config.model import ModelConfig
from dtrain.config.precision import Float8, PrecisionConfig
from dtrain.config.schema import RunConfig
from dtrain.config.tool_schema import Float8BenchConfig, Float8Suite
from dtrain.distributed.startup.setup import choose_device
from dtrain.errors import ConfigError
from dtrain.measure.bench.operations.float8_products import product_shapes, time_products
from dtrain.measure.bench.records import BenchmarkCase, TrainingResults
from dtrain.measure.bench.training.rounds import run_rounds
from dtrain.measure.record import head
from dtrain.precision.float8.options import Recipe
from dtrain.train.setup import make_policy


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
        for shape in product_shapes(linear for result in measured.cases for linear in result.footprint.linears):
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
