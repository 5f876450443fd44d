"""What FP8 is expected to bring in speed, from published rates and the sizes of products alone.

``dtrain plan precision`` and the start of a run say it with the same words. The planner, which records the products, is
handed in by the command line. No figure here has been measured on a GPU by this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dtrain.precision.float8.choice import MIN_GAIN

BF16_SHARE, FP8_SHARE, MEMORY_SHARE = 0.67, 0.59, 0.9
"""Assumed shares of the published rates: 660 of 989 and 1,170 of 1,979 TFLOP/s, 3.0 of 3.35 TB/s (H100)."""

FUSED_SHARE = 0.2
"""Share that remains of the bytes of casts, and of all else between the products of a block, if the compiler fuses it.

An assumption: nothing says it of a model but a measurement.
"""

FP8_LINEARS, LINEARS, IN_ATTENTION, OTHERS = (
    "FP8 Linears",
    "other Linears",
    "attention (causal: half counted)",
    "other products",
)
KINDS = (FP8_LINEARS, LINEARS, IN_ATTENTION, OTHERS)
"""Kinds of products. Of causal attention half is counted."""


class RecipeCost(NamedTuple):
    """Rate of a recipe's products by that of tensorwise ones, and whether weight gradients are FP8."""

    rate: float = 1.0
    has_wgrad: bool = True

    @property
    def cast_bytes(self) -> int:
        """Bytes of memory traffic to cast a BF16 element: read to measure it, read again, and written in each order.

        The second order is that of the weight gradient.
        """
        return 2 + 2 + (2 if self.has_wgrad else 1)


RECIPE_COSTS: Mapping[str, RecipeCost] = {
    "rowwise": RecipeCost(rate=0.76),
    "rowwise_bf16_wgrad": RecipeCost(rate=0.76, has_wgrad=False),
    "blockwise": RecipeCost(rate=0.8),
}
"""Recipes that cost otherwise than a tensorwise one, by ``precision.float8.recipe``.

Row by row torchao publishes a step of 8B on H100 that is 10.05 % faster than in BF16, and 25.0 % tensorwise.
"""


def recipe_cost(recipe: str) -> RecipeCost:
    """Returns the cost of a recipe; that of an unknown one is as of tensorwise."""
    return RECIPE_COSTS.get(recipe, RecipeCost())


def float8_seconds(
    flops: float,
    elements: float,
    rate: float,
    bandwidth: float,
    cost: RecipeCost = RecipeCost(),  # noqa: B008  is immutable
    *,
    fused: bool,
    nbytes: float = 0.0,
) -> float:
    """Returns the seconds of products in FP8 and of the casts of their operands.

    Args:
        flops: FLOPs of the products that are FP8. Weight gradients are among them if ``cost.has_wgrad``.
        elements: number of elements of each Linear's input and output gradient, each once. Weights are cast once a
            step, and are not counted.
        rate: published FLOP/s of dense FP8 products.
        bandwidth: published bytes/s of the memory.
        fused: whether the compiler fuses the casts with the operations around them (``model.compile=blocks``).
        nbytes: bytes that the products read and write, which bound them from below.
    """
    products = max(flops / (FP8_SHARE * cost.rate * rate), nbytes / bandwidth)
    moved = elements * cost.cast_bytes * (FUSED_SHARE if fused else 1.0)
    return products + moved / (MEMORY_SHARE * bandwidth)


class Times(NamedTuple):
    """Seconds of a step in two formats."""

    bf16_s: float
    float8_s: float

    @property
    def gain(self) -> float:
        """How many times as fast FP8 is."""
        return self.bf16_s / self.float8_s


@dataclass(frozen=True)
class Outlook:
    """A step as it is expected in BF16 and in FP8.

    Attributes:
        device: name of the GPU.
        flops: FLOPs of the products of a step, by ``KINDS``.
        unfused: times of a step whose casts, and other operations, are kernels of their own.
        fused: times of a step whose blocks are compiled.
        compiles_blocks: whether the run compiles blocks, or decides by a measurement.
        targets: number of targets, such as tokens, of all ranks in a step.
        unit: what targets are called.
        rate: of the recipe's products by that of tensorwise ones.
    """

    device: str
    flops: Mapping[str, int]
    unfused: Times
    fused: Times
    compiles_blocks: bool
    targets: int
    unit: str
    rate: float = 1.0

    def line(self) -> str:
        """Returns the expected speed-up, and what to set if it is below ``MIN_GAIN``."""
        text = (
            f"fp8 on {self.device}: expected {self.fused.gain:.2f}x with casts that the compiler fuses "
            f"(model.compile=blocks), {self.unfused.gain:.2f}x without"
        )
        least, few = 1 + MIN_GAIN, f"less than {MIN_GAIN:.0%}"
        if max(self.fused.gain, self.unfused.gain) < least:
            return f"{text}; {few}: use precision=bf16"
        if self.unfused.gain < least and not self.compiles_blocks:
            return f"{text}, which is {few}: use model.compile=blocks or precision=bf16"
        return text

    def details(self) -> list[str]:
        """Returns what ``line`` follows from, as lines of text."""
        total = sum(self.flops.values())
        shares = ", ".join(f"{flops / total:.0%} in {kind}" for kind, flops in self.flops.items() if flops)

        def shown(times: Times) -> str:
            ms, us = ([scale * seconds for seconds in times] for scale in (1e3, 1e6 / self.targets))
            return f"{ms[0]:.4g} ms in BF16, {ms[1]:.4g} ms in FP8 ({us[0]:.3g} and {us[1]:.3g} us each)"

        return [
            f"FLOPs of a step: {shares}",
            f"a step of {self.targets:,} {self.unit}: {shown(self.unfused)}",
            f"with compiled blocks: {shown(self.fused)}",
            f"assumed, not measured: {BF16_SHARE:.0%} of the published BF16 rate, {self.rate * FP8_SHARE:.0%} of "
            f"FP8's, {MEMORY_SHARE:.0%} of the memory's; {FUSED_SHARE:.0%} of the bytes if fused",
        ]


def emulated_line(device: str) -> str:
    """Returns the line of a run on a device without FP8 products."""
    return (
        f"fp8 is emulated on {device} and brings no speed; what a GPU with FP8 would gain: "
        "dtrain plan precision with these keys and device=h100-80gb"
    )
