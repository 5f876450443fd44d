"""Loss scaling as a pure state machine: no tensors, no collectives.

The vote decides whether any rank overflowed, and every rank passes the same decision to the same machine, so the scales
cannot diverge. The constants follow Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dtrain.distributed.logging import logger
from dtrain.errors import ConfigError

MODES = ("auto", "none", "static", "dynamic", "calibrated")
_LARGEST_FP16 = 65504.0


@dataclass(frozen=True)
class LossScale:
    """Settings of loss scaling.

    Attributes:
        mode: ``none`` (1), ``static`` (always ``init``), ``dynamic`` (grows and backs off), ``calibrated`` (chosen once
            from measured gradients, see :class:`LossScaleState`), or ``auto``: dynamic if the compute dtype is FP16,
            else none, because BF16 and FP32 have enough range for gradients.
        init: first scale.
        growth_factor: factor after ``growth_interval`` steps in a row without overflow.
        backoff_factor: factor after an overflow.
        growth_interval: steps without overflow before the scale grows.
        hysteresis: overflows since the last growth before the scale backs off; 1 backs off immediately.
        min: lower bound of the dynamic and the calibrated scale.
        max: upper bound of both.
        calibration_steps: number of applied steps whose gradients are measured.
        margin: factor by which gradients may exceed the measured ones before they overflow FP16; at least 1.
    """

    mode: str = "auto"
    init: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min: float = 2.0**-14
    max: float = 2.0**24
    calibration_steps: int = 10
    margin: float = 8.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"loss scale mode '{self.mode}' is not one of {', '.join(MODES)}")
        if not 0 < self.min <= self.init <= self.max < math.inf:
            raise ConfigError(
                f"loss scale needs 0 < min <= init <= max, all finite; got {self.min:g}, {self.init:g}, {self.max:g}"
            )
        if not 1 <= self.growth_factor < math.inf or not 0 < self.backoff_factor <= 1:
            raise ConfigError(
                f"loss scale needs growth_factor >= 1 and 0 < backoff_factor <= 1; "
                f"got {self.growth_factor:g} and {self.backoff_factor:g}"
            )
        if self.growth_interval < 1 or self.hysteresis < 1:
            raise ConfigError(
                f"loss scale needs growth_interval and hysteresis of at least 1; "
                f"got {self.growth_interval} and {self.hysteresis}"
            )
        if self.calibration_steps < 1 or not 1 <= self.margin < math.inf:
            raise ConfigError(
                f"loss scale needs calibration_steps and margin of at least 1, the margin finite; "
                f"got {self.calibration_steps} and {self.margin:g}"
            )

    @staticmethod
    def of(value: LossScale | str | float) -> LossScale:
        """Converts what ``initialize(loss_scale=...)`` accepts: a record, a mode, or a number (static)."""
        if isinstance(value, LossScale):
            return value
        if isinstance(value, str):
            return LossScale(mode=value)
        scale = float(value)
        return LossScale(mode="static", init=scale, min=min(scale, LossScale.min), max=max(scale, LossScale.max))

    def resolved(self, compute_dtype: torch.dtype) -> LossScale:
        """Returns the settings with ``auto`` resolved for ``compute_dtype``; logs if ``calibrated`` has no effect."""
        if self.mode == "calibrated" and compute_dtype != torch.float16:
            logger.info(
                f"loss scale mode 'calibrated' has no effect: it keeps gradients in the range of FP16, and these are "
                f"{compute_dtype}, which has the range of FP32; loss_scale=none gives the same result"
            )
        if self.mode != "auto":
            return self
        return replace(self, mode="dynamic" if compute_dtype == torch.float16 else "none")

    def start(self) -> LossScaleState:
        """Returns the state before the first step.

        Raises:
            ConfigError: the mode is still ``auto``.
        """
        if self.mode == "auto":
            raise ConfigError("loss scale mode 'auto' must be resolved for a compute dtype before it starts")
        return LossScaleState(self, 1.0 if self.mode == "none" else self.init, 0, self.hysteresis)


@dataclass(frozen=True)
class LossScaleState:
    """The current loss scale and the counters that change it.

    Mode ``calibrated`` is dynamic for the first ``calibration_steps`` applied steps, in which gradients are measured.
    Then the scale becomes the largest power of two that keeps the largest measured gradient, times the margin, in the
    range of FP16. Later overflows lower it permanently; it never grows again.

    Attributes:
        clean_steps: steps without overflow since the scale last changed.
        overflows_left: overflows tolerated before the scale backs off.
        max_abs_grad: largest measured gradient, unscaled.
        num_measured: applied steps that were measured.
        is_calibrated: whether the scale was chosen from the measurements.
    """

    rule: LossScale
    scale: float
    clean_steps: int
    overflows_left: int
    max_abs_grad: float = 0.0
    num_measured: int = 0
    is_calibrated: bool = False

    @property
    def is_calibrating(self) -> bool:
        """Whether the next update needs ``max_abs_grad``."""
        return self.rule.mode == "calibrated" and not self.is_calibrated

    def update(self, found_inf: bool, max_abs_grad: float = 0.0) -> LossScaleState:
        """Returns the state after a step.

        Args:
            found_inf: whether the gradients overflowed; otherwise they were applied.
            max_abs_grad: largest unscaled element of the gradients that backward produced on any rank.
        """
        if self.rule.mode not in ("dynamic", "calibrated"):
            return self
        if found_inf:  # its gradients are not finite, so they are not measured
            return self._overflowed()
        if self.is_calibrated:
            return self
        grown = self._clean()
        return grown._measured(max_abs_grad) if self.is_calibrating else grown

    def _overflowed(self) -> LossScaleState:
        rule, left = self.rule, self.overflows_left - 1
        if left > 0:
            return replace(self, clean_steps=0, overflows_left=left)
        return replace(self, scale=max(self.scale * rule.backoff_factor, rule.min), clean_steps=0, overflows_left=0)

    def _clean(self) -> LossScaleState:
        rule, clean = self.rule, self.clean_steps + 1
        if clean < rule.growth_interval:
            return replace(self, clean_steps=clean)
        scale = min(self.scale * rule.growth_factor, rule.max)
        return replace(self, scale=scale, clean_steps=0, overflows_left=rule.hysteresis)

    def _measured(self, max_abs_grad: float) -> LossScaleState:
        largest = max(self.max_abs_grad, max_abs_grad)
        measured = replace(self, max_abs_grad=largest, num_measured=self.num_measured + 1)
        if measured.num_measured < self.rule.calibration_steps:
            return measured
        scale = measured._chosen_scale() if measured.max_abs_grad else self.scale
        return replace(measured, scale=scale, clean_steps=0, overflows_left=self.rule.hysteresis, is_calibrated=True)

    def _chosen_scale(self) -> float:
        # the largest power of two with gradient x margin x scale <= 65,504; from exponents, because log2 rounds
        mantissa, exponent = math.frexp(self.max_abs_grad * self.rule.margin)
        limit, room = math.frexp(_LARGEST_FP16)
        power = room - exponent - (mantissa > limit)
        return min(max(math.ldexp(1.0, power), self.rule.min), self.rule.max)

    def describe_change_since(self, before: LossScaleState) -> str:
        """Returns a message about the change since the state ``before`` the step, or an empty string."""
        if not self.is_calibrated:
            return ""
        if before.is_calibrated:
            if self.scale == before.scale:
                return ""
            return (
                f"loss scale lowered permanently from {before.scale:g} to {self.scale:g}: gradients exceeded those of "
                f"the calibration by more than the margin of {self.rule.margin:g}"
            )
        if not self.max_abs_grad:
            return f"loss scale stays {self.scale:g}: all gradients of the {self.num_measured} measured steps were 0"
        product = self.max_abs_grad * self.scale * self.rule.margin
        sign = "<=" if product <= _LARGEST_FP16 else ">"
        return (
            f"loss scale calibrated to {self.scale:g}: largest gradient {self.max_abs_grad:.1e} x {self.scale:g} x "
            f"margin {self.rule.margin:g} = {product:.3g} {sign} {_LARGEST_FP16:,.0f}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for a checkpoint."""
        return asdict(self)

    def restored(self, saved: dict[str, Any]) -> LossScaleState:
        """Returns the saved state under the current settings, or a fresh state if the mode has changed."""
        rule = self.rule
        if saved["rule"]["mode"] != rule.mode or rule.mode not in ("dynamic", "calibrated"):
            return self
        return LossScaleState(
            rule,  # the limits of the current settings hold for the saved numbers too
            scale=min(max(float(saved["scale"]), rule.min), rule.max),
            clean_steps=int(saved["clean_steps"]),
            overflows_left=min(int(saved["overflows_left"]), rule.hysteresis),
            # absent in checkpoints from before the calibrated mode
            max_abs_grad=float(saved.get("max_abs_grad", 0.0)),
            num_measured=int(saved.get("num_measured", 0)),
            is_calibrated=bool(saved.get("is_calibrated", False)),
        )
