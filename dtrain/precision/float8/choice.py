"""Which products are FP8: where that is faster than BF16 on this device, or by their shape where nothing is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.precision.float8.linear import convert
from dtrain.precision.float8.matmul import ALIGNMENT
from dtrain.precision.float8.options import Float8Options, Recipe
from dtrain.precision.float8.weights import KeptWeights, LocalWeights

MIN_GAIN = 0.03
"""FP8 costs precision: it must save this part of BF16's time."""

MAX_PADDING = 0.125
"""What padding may add to a dimension: more costs what FP8 gains."""

_ROUNDS = 11
_REPEATS = {"cpu": 1, "cuda": 10}  # in a round: on a GPU one alone is as short as its launch


@dataclass(frozen=True)
class Product:
    """The Linear ``name``, of weight [out_features, in_features]: its output and both its gradients are one choice."""

    name: str
    out_features: int
    in_features: int


@dataclass(frozen=True)
class Decision:
    """Whether the products of the Linear ``name`` are FP8, and why.

    Attributes:
        name: of the module.
        is_float8: the choice.
        reason: a sentence for people.
        low_ms: of the three products in BF16; None where they were not timed.
        float8_ms: in FP8, with the casts of input and gradient, and of the weight where the engine has it cast each
            time.
    """

    name: str
    is_float8: bool
    reason: str
    low_ms: float | None = None
    float8_ms: float | None = None


def decide(
    products: Sequence[Product], options: Float8Options, device: torch.device, *, casts_each_time: bool = False
) -> tuple[Decision, ...]:
    """A decision for each of ``products``, in their order.

    Args:
        products: each shape is timed once.
        options: resolved for the device that will train, see :meth:`Float8Options.on`. ``choice=all`` decides by shape
            alone, and needs no such device.
        device: where ``choice=timed`` runs them, ``num_rows`` rows at a time.
        casts_each_time: the engine casts the weight in each forward and backward, so that it is timed too; else once a
            step.

    Raises:
        ConfigError: they do not fit the device's memory.
    """
    made: dict[tuple[int, int], Decision] = {}
    for product in products:
        shape = (product.out_features, product.in_features)
        if shape not in made:
            made[shape] = _by_shape(product)
            if made[shape].is_float8 and options.choice == "timed":
                made[shape] = _timed(product, options, device, casts_each_time)
    return tuple(
        Decision(product.name, choice.is_float8, choice.reason, choice.low_ms, choice.float8_ms)
        for product in products
        for choice in [made[product.out_features, product.in_features]]
    )


def _by_shape(product: Product) -> Decision:
    shape = f"[{product.out_features}, {product.in_features}]"
    padded = [size + -size % ALIGNMENT for size in (product.out_features, product.in_features)]
    added = max(padded[0] / product.out_features, padded[1] / product.in_features) - 1
    if min(product.out_features, product.in_features) < ALIGNMENT:
        return Decision(product.name, False, f"{shape} has a dimension below {ALIGNMENT}")
    if not added:
        return Decision(product.name, True, f"{shape} are multiples of {ALIGNMENT}")
    if added <= MAX_PADDING:
        return Decision(product.name, True, f"{shape} is padded to {padded}")
    return Decision(
        product.name, False, f"{shape} would be padded to {padded}, {added:.1%} more; at most {MAX_PADDING:.1%} pay"
    )


def _timed(product: Product, options: Float8Options, device: torch.device, casts_each_time: bool) -> Decision:
    try:
        low_ms, float8_ms = _times(product, options, device, casts_each_time)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"no memory to time {options.num_rows} rows of '{product.name}' [{product.out_features}, "
            f"{product.in_features}] on {device}; set float8 num_rows to the tokens of one micro-batch, or choice=all"
        ) from error
    reason = (
        f"timed {float8_ms / low_ms:.2f} of BF16 ({float8_ms:.3g} against {low_ms:.3g} ms at {options.num_rows} rows)"
    )
    return Decision(product.name, float8_ms <= (1 - MIN_GAIN) * low_ms, reason, low_ms, float8_ms)


def _times(
    product: Product, options: Float8Options, device: torch.device, casts_each_time: bool
) -> tuple[float, float]:
    """Milliseconds of forward and both gradients in BF16 and in FP8; medians of rounds that take turns."""
    generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are
    x, grad, weight = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        for shape in (
            (options.num_rows, product.in_features),
            (options.num_rows, product.out_features),
            (product.out_features, product.in_features),
        )
    )
    linears = [nn.Linear(product.in_features, product.out_features, bias=False, device="meta") for _ in range(2)]
    for linear in linears:
        linear.weight = nn.Parameter(weight)
    recipe = Recipe.of(options, torch.bfloat16)
    convert(linears[1], recipe, LocalWeights(recipe) if casts_each_time else KeptWeights(recipe))
    runs = [_three_products(linear, x.requires_grad_(), grad) for linear in linears]
    for run in (*runs, *runs):  # the second time all is compiled, kept and allocated
        run()
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for run, taken in zip(runs, samples, strict=True):
            taken.append(_milliseconds(run, device))
    return statistics.median(samples[0]), statistics.median(samples[1])


def _three_products(linear: nn.Linear, x: Tensor, grad: Tensor) -> Callable[[], None]:
    inputs = (x, linear._parameters["weight"])

    def run() -> None:
        with torch.enable_grad():
            torch.autograd.grad(linear(x), inputs, grad)  # type: ignore[arg-type]

    return run


def _milliseconds(run: Callable[[], None], device: torch.device) -> float:
    repeats = _REPEATS[device.type]
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        with torch.cuda.device(device):
            events[0].record()
            for _ in range(repeats):
                run()
            events[1].record()
            events[1].synchronize()
        return float(events[0].elapsed_time(events[1])) / repeats
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) * 1e3 / repeats
