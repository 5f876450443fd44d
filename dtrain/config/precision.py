"""Keys of ``precision``: the format of each module, the loss scale, and FP8 products."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dtrain.config.fields import above, at_least, group, one_of, setting, similar
from dtrain.errors import ConfigError

RULE_FORMATS = ("fp32", "bf16", "fp16", "fp8")
"""Formats that a rule can give a module."""

_UNSUPPORTED_FORMATS = {
    "tf32": "tf32 is a mode of the whole process, not of a module: backward runs long after a module's forward has "
    "ended; use precision=tf32, and no rule",
    "mxfp8": "mxfp8 has a scale for each block of 32 elements, which the Tensor Cores of Blackwell apply and those of "
    "Hopper do not; use fp8",
    "mxfp4": "mxfp4 needs the FP4 Tensor Cores of Blackwell, and a recipe of its own to train; use fp8",
    "nvfp4": "nvfp4 needs the FP4 Tensor Cores of Blackwell, and a recipe of its own to train; use fp8",
}


def unsupported_format_reason(name: str) -> str:
    """Why dtrain does not support a known format (in a rule); empty for any other name."""
    return _UNSUPPORTED_FORMATS.get(name, "")


def check_rules(rules: Iterable[tuple[str, str]]) -> None:
    """Raises ``ConfigError`` for a (pattern, format) pair whose format no rule can give, with the reason."""
    for pattern, name in rules:
        if name not in RULE_FORMATS:
            reason = unsupported_format_reason(name) if isinstance(name, str) else ""
            hint = f"'{name}' is not one of {', '.join(RULE_FORMATS)}{similar(name, RULE_FORMATS)}"
            raise ConfigError(f"precision rule '{pattern}': {reason or hint}")


@dataclass(frozen=True)
class LossScaleConfig:
    """The loss scale of FP16."""

    mode: str = one_of(
        "auto",
        "none",
        "static",
        "dynamic",
        "calibrated",
        doc="How the scale is chosen; auto: dynamic if anything computes in FP16, otherwise none.",
    )
    init: float = at_least(65536.0, 2.0**-24, "First scale; in mode static the only one.")
    growth_factor: float = at_least(2.0, 1.0, "Factor by which the scale grows.")
    backoff_factor: float = above(0.5, 0.0, "Factor by which the scale shrinks after an overflow.", maximum=1.0)
    growth_interval: int = at_least(2000, 1, "Steps without an overflow before the scale grows.")
    hysteresis: int = at_least(1, 1, "Overflows before the scale shrinks.")
    min: float = above(2.0**-14, 0.0, "Smallest scale.")
    max: float = at_least(2.0**24, 1.0, "Largest scale.")
    calibration_steps: int = at_least(10, 1, "Applied steps whose largest gradient mode calibrated measures.")
    margin: float = at_least(
        8.0, 1.0, "Safety factor of mode calibrated: scale x largest gradient x margin is at most 65,504."
    )


@dataclass(frozen=True)
class Float8Config:
    """FP8 matrix products; used if the precision or a rule is fp8. docs/precision.md describes the recipes."""

    recipe: str = one_of("tensorwise", "rowwise", doc="One scale per tensor, or one per row and column.")
    grad_format: str = one_of(
        "auto", "e5m2", "e4m3", doc="Format of gradients; auto: e5m2 with tensorwise, e4m3 with rowwise."
    )
    emulate: bool | str = one_of(
        "auto", True, False, doc="Compute the products of the rounded numbers in FP32; auto: without FP8 Tensor Cores."
    )
    choice: str = one_of(
        "auto",
        "timed",
        "all",
        doc="Linear layers in FP8: those timed faster than BF16, or all that can be; auto: timed unless emulated.",
    )
    num_rows: int | None = at_least(None, 1, "Rows of the timed products; null: micro_batch_size x max_seq_len.")
    fast_accumulation: bool = setting(False, "Accumulate forward products faster and less precisely, on Hopper.")
    compile: bool | str = one_of("auto", True, False, doc="Compile the casts; auto: on a GPU that has a compiler.")


@dataclass(frozen=True)
class PrecisionConfig:
    """Formats in which the model computes. Masters and optimizer state are always FP32. See docs/precision.md."""

    name: str = one_of("auto", "fp32", "tf32", "bf16", "fp16", "fp8", doc="")
    rules: dict[Any, str] = setting(
        {}, "Formats by module: {name pattern: fp32 | bf16 | fp16 | fp8}; the last pattern that matches decides."
    )
    loss_scale: LossScaleConfig = group(LossScaleConfig)
    float8: Float8Config = group(Float8Config)
