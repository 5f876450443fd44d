"""Keys of ``precision``: the format of each module, the loss scale, and FP8 products."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from dtrain.config.fields import CheckedRecord, above, at_least, check_field, group, one_of, setting, shown, similar
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


def float8_rule_error(precision: str) -> ConfigError:
    return ConfigError(
        f"an fp8 rule under precision={precision}: FP8 products return BF16, so the rest computes in BF16; "
        f"use precision=fp8 or bf16"
    )


MODES = ("auto", "none", "static", "dynamic", "calibrated")


@dataclass(frozen=True)
class LossScale(CheckedRecord):
    """The loss scale of FP16 (Micikevicius et al., Mixed Precision Training, 2018, section 3.2).

    Examples:
        >>> scale = dtrain.LossScale("dynamic", init=1024, growth_interval=1)  # grows after each step
        >>> engine = dtrain.initialize(torch.nn.Linear(2, 1), precision="fp16", loss_scale=scale)
        >>> engine.backward(engine(torch.ones(1, 2)).mean())
        >>> engine.step().loss_scale, engine.loss_scale.scale
        (1024.0, 2048.0)
    """

    mode: str = one_of(
        *MODES,
        doc="How the scale is chosen; auto: dynamic if anything computes in FP16, otherwise none.",
    )
    init: float = above(65536.0, 0.0, "First scale; in mode static the only one.")
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

    def _check(self) -> None:
        if self.mode not in ("none", "static") and not self.min <= self.init <= self.max:
            raise ConfigError(f"{self._entry('init')} must lie between {self._entry('min')} and {self._entry('max')}")

    @staticmethod
    def of(value: LossScale | str | float) -> LossScale:
        """Returns what ``initialize(loss_scale=...)`` accepts as a record: a mode, or a number (static)."""
        if isinstance(value, LossScale):
            return value
        if isinstance(value, str):
            return LossScale(check_field(LossScale, "mode", value, "loss_scale"))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return LossScale("static", init=check_field(LossScale, "init", value, "loss_scale"))
        raise ConfigError(
            f"loss_scale={shown(value)} is not a mode ({', '.join(MODES)}), a number, or a dtrain.LossScale; dtrain "
            f"scales the loss in engine.backward and needs no GradScaler"
        )

    def used(self, *, has_fp16: bool) -> set[str]:
        """The names of the settings that have an effect; ``has_fp16``: whether anything may compute in FP16."""
        if self.mode == "none" or (self.mode == "auto" and not has_fp16):
            return {"mode"}
        if self.mode == "static":
            return {"mode", "init"}
        names = {item.name for item in fields(self)}
        return names if self.mode == "calibrated" else names - CALIBRATION


CALIBRATION = {"calibration_steps", "margin"}
"""Settings of mode ``calibrated``."""


@dataclass(frozen=True)
class Float8(CheckedRecord):
    """FP8 matrix products; used if the precision or a rule is fp8. See docs/precision/fp8.md.

    Examples:
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
        >>> policy = dtrain.PrecisionPolicy.named("fp8", float8=dtrain.Float8(recipe="rowwise", emulate=True))
        >>> engine = dtrain.initialize(model, precision=policy)
        >>> engine.contract.float8_modules  # the first and the last product stay in BF16
        ('1',)
    """

    recipe: str = one_of(
        "tensorwise",
        "rowwise",
        "rowwise_bf16_wgrad",
        "blockwise",
        doc="Scales: one per tensor (fast), per row and column (rowwise_bf16_wgrad: weight gradients in BF16), or per "
        "block of 128 (accurate).",
    )
    grad_format: str = one_of("auto", "e5m2", "e4m3", doc="Format of gradients; auto: e5m2 with tensorwise, else e4m3.")
    emulate: bool | str = one_of(
        "auto", True, False, doc="Compute the products of the rounded numbers in FP32; auto: without FP8 Tensor Cores."
    )
    choice: str = one_of(
        "auto",
        "timed",
        "all",
        doc="Linear layers in FP8: those timed faster than BF16, or all that can be; auto: timed unless emulated.",
    )
    num_rows: int | None = at_least(
        None, 1, "Rows of the timed products; null: micro_batch_size x max_seq_len, without tokens 8192."
    )
    fast_accumulation: bool = setting(False, "Accumulate forward products faster and less precisely, on Hopper.")
    compile: bool | str = one_of("auto", True, False, doc="Cast by Triton kernels; auto: on a GPU that has a compiler.")
    shadow_every: int = at_least(
        0,
        0,
        "Steps from one micro-batch that is computed in BF16 too, to compare its loss and gradients with those of FP8, "
        "to the next; 0: none. Changes no bits of the training.",
    )
    finish_in: str = one_of(
        "none", "bf16", doc="Format of the last steps of dtrain train, to narrow the loss gap of FP8; none: FP8."
    )
    finish_steps: int = at_least(200, 1, "Last steps, which compute in finish_in from a checkpoint before them.")

    def _check(self) -> None:
        if self.finish_in == "none" and self.finish_steps != (default := type(self).finish_steps):
            raise ConfigError(
                f"{self._entry('finish_steps')} is not used with {self._entry('finish_in')}; set "
                f"{self._key('finish_in')}=bf16, or leave it at {default}"
            )


@dataclass(frozen=True)
class PrecisionConfig(CheckedRecord):
    """Formats in which the model computes. Masters are FP32. See docs/precision/precision.md."""

    name: str = one_of("auto", "fp32", "tf32", "bf16", "fp16", "fp8", doc="")
    rules: dict[Any, str] = setting(
        {}, "Formats by module: {name pattern: fp32 | bf16 | fp16 | fp8}; the last pattern that matches decides."
    )
    loss_scale: LossScale = group(LossScale)
    float8: Float8 = group(Float8)

    def _check(self) -> None:
        check_rules(self.rules.items())
        by_rule = "fp8" in self.rules.values()
        if by_rule and self.name not in ("auto", "bf16", "fp8"):
            raise float8_rule_error(self.name)
        if not by_rule and self.name != "fp8":
            self._check_unused("float8", self.float8, set(), "and no fp8 rule; remove it, or set precision=fp8")
        scale = self.loss_scale
        used = scale.used(has_fp16=self.name in ("fp16", "auto") or "fp16" in self.rules.values())
        mode = self._key("loss_scale.mode")
        for known, fix in ((used | CALIBRATION, "dynamic"), (used, "calibrated")):
            rest = f"and {mode}={scale.mode}; remove it, or set {mode}={fix}"
            self._check_unused("loss_scale", scale, known, rest)

    def finish(self) -> PrecisionConfig:
        """Returns the formats of the last steps with ``float8.finish_in``: BF16 in the place of FP8."""
        rules = {pattern: "bf16" if name == "fp8" else name for pattern, name in self.rules.items()}
        return replace(self, name="bf16", rules=rules, float8=Float8())

    def _check_unused(self, name: str, record: CheckedRecord, used: set[str], rest: str) -> None:
        for item in fields(record):
            value = getattr(record, item.name)
            if item.name not in used and value != item.default:
                raise ConfigError(
                    f"{self._key(name)}.{item.name}={value} is not used with precision={self.name} {rest}"
                )
