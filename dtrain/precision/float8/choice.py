"""Chooses the products that compute in FP8: by shape, or by timing FP8 against BF16 on the device."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor, nn

from dtrain.config.precision import Float8
from dtrain.device import alternating_ms
from dtrain.errors import ConfigError
from dtrain.precision.float8.linear import convert
from dtrain.precision.float8.matmul import ALIGNMENT
from dtrain.precision.float8.options import PRODUCTS, Recipe
from dtrain.precision.float8.weights import Cache, QuantizedWeight

MIN_GAIN = 0.03
"""Smallest fraction of the BF16 time that FP8 must save, because it costs precision."""

MAX_PADDING = 0.125
"""Largest fraction that padding may add to a dimension. More padding costs as much as FP8 gains."""

_ROUNDS = 11
_REPEATS = {"cpu": 1, "cuda": 10}  # runs per round: on a GPU a single run is as short as its launch


@dataclass(frozen=True)
class Float8Candidate:
    """The Linear ``name`` of weight [out_features, in_features].

    Attributes:
        trained: whether the weight is trained; a frozen one has no gradient, and is cast once.
    """

    name: str
    out_features: int
    in_features: int
    trained: bool = True


@dataclass(frozen=True)
class Float8Decision:
    """Whether the Linear ``name`` is FP8, and the reason for the user.

    Attributes:
        bf16_ms: time of the matmuls in BF16; None if they were not timed.
        float8_ms: time with ``products`` in FP8, including the casts of input and gradient. It includes the cast of
            the weight if the engine casts the weight in each forward and backward.
        products: those of ``dtrain.precision.float8.options.PRODUCTS`` that are FP8 if the Linear is.
    """

    name: str
    is_float8: bool
    reason: str
    bf16_ms: float | None = None
    float8_ms: float | None = None
    products: tuple[str, ...] = PRODUCTS


def decide_float8(
    candidates: Sequence[Float8Candidate], options: Float8, device: torch.device, *, casts_each_time: bool = False
) -> tuple[Float8Decision, ...]:
    """Returns a decision for each candidate, in their order.

    Args:
        candidates: Linears that can compute in FP8. Each shape is timed once.
        options: resolved for the training device by ``dtrain.precision.float8.options.resolve_float8``.
            ``choice=all`` decides by shape alone.
        device: device that ``choice=timed`` runs the matmuls on, with ``num_rows`` rows each.
        casts_each_time: whether the engine casts the weight in each forward and backward (then the cast is timed too)
            or once per step.

    Raises:
        ConfigError: the timed matmuls do not fit the device's memory.
    """
    by_shape: dict[Float8Candidate, Float8Decision] = {}
    for candidate in candidates:
        shape = replace(candidate, name="")
        if shape not in by_shape:
            by_shape[shape] = _by_shape(candidate, Recipe.of(options, torch.bfloat16))
            if by_shape[shape].is_float8 and options.choice == "timed":
                by_shape[shape] = _timed(candidate, options, device, casts_each_time)
    return tuple(replace(by_shape[replace(candidate, name="")], name=candidate.name) for candidate in candidates)


def _by_shape(candidate: Float8Candidate, recipe: Recipe) -> Float8Decision:
    sizes, alignment = [candidate.out_features, candidate.in_features], recipe.alignment
    padded = [size + -size % alignment for size in sizes]
    added = max(new / old for new, old in zip(padded, sizes, strict=True)) - 1
    is_float8 = min(sizes) >= ALIGNMENT and added <= MAX_PADDING
    if min(sizes) < ALIGNMENT:
        reason = f"{sizes} has a dimension below {ALIGNMENT}"
    elif not is_float8:
        reason = f"{sizes} would be padded to {padded}, {added:.1%} more; at most {MAX_PADDING:.1%} pay"
    else:
        reason = f"{sizes} is padded to {padded}" if added else f"{sizes} are multiples of {alignment}"
    return Float8Decision(candidate.name, is_float8, reason, products=recipe.products)


def _timed(candidate: Float8Candidate, options: Float8, device: torch.device, casts_each_time: bool) -> Float8Decision:
    try:
        times = _times(candidate, options, device, casts_each_time)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"no memory to time {options.num_rows} rows of '{candidate.name}' [{candidate.out_features}, "
            f"{candidate.in_features}] on {device}; set float8 num_rows to the tokens of one micro-batch, or choice=all"
        ) from error
    bf16_ms = times.pop(())
    products = min(times, key=times.__getitem__)
    ms = times[products]
    others = [name for name in PRODUCTS if name not in products and (candidate.trained or name != "wgrad")]
    reason = f"timed {ms / bf16_ms:.2f} of BF16 ({ms:.3g} against {bf16_ms:.3g} ms at {options.num_rows} rows)"
    gains = ms <= (1 - MIN_GAIN) * bf16_ms
    reason += f", {' and '.join(others)} in BF16" if gains and others else ""
    return Float8Decision(candidate.name, gains, reason, bf16_ms, ms, products)


def _times(
    candidate: Float8Candidate, options: Float8, device: torch.device, casts_each_time: bool
) -> dict[tuple[str, ...], float]:
    """Returns the milliseconds of forward and gradients by the products in FP8: medians of alternating rounds."""
    assert options.num_rows is not None  # resolved
    generator = torch.Generator(device).manual_seed(0)  # does not touch the run's random state

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    x, grad = (random(options.num_rows, size) for size in (candidate.in_features, candidate.out_features))
    weight = nn.Parameter(random(candidate.out_features, candidate.in_features), requires_grad=candidate.trained)
    inputs = (x.requires_grad_(), weight) if candidate.trained else (x.requires_grad_(),)

    def run(linear: nn.Linear) -> None:
        with torch.enable_grad():
            torch.autograd.grad(linear(x), inputs, grad)

    recipe = Recipe.of(options, torch.bfloat16)
    cache = Cache.NEVER if casts_each_time else Cache.UNTIL_WRITTEN
    possible = [name for name in recipe.products if candidate.trained or name != "wgrad"]
    runs = {}
    for products in (chosen for size in range(len(possible) + 1) for chosen in combinations(possible, size)):
        linear = nn.Linear(candidate.in_features, candidate.out_features, bias=False, device="meta")
        linear.weight = weight
        if products:
            own = replace(recipe, products=products)
            convert(linear, own, QuantizedWeight(own, cache))
        runs[" ".join(products)] = partial(run, linear)
    # the first call compiles, the second fills caches and the allocator
    ms = alternating_ms(runs, device, _ROUNDS, calls=_REPEATS[device.type], warmup=2)
    return {tuple(products.split()): statistics.median(times) for products, times in ms.items()}
