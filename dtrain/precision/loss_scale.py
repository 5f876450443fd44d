"""Loss scaling as a pure state machine: no tensors, no collectives.

The vote decides whether any rank overflowed, and every rank passes the same decision to the same machine, so the scales
cannot diverge. The constants follow Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dtrain.config.precision import LossScale
from dtrain.distributed.logging import logger
from dtrain.errors import ConfigError

_LARGEST_FP16 = 65504.0


def resolve_loss_scale(rule: LossScale, compute_dtype: torch.dtype) -> LossScale:
    """Returns ``rule`` with ``auto`` resolved for ``compute_dtype``; logs if ``calibrated`` has no effect.

    ``auto`` is dynamic for FP16, else none, because BF16 and FP32 have enough range for gradients.
    """
    if rule.mode == "calibrated" and compute_dtype != torch.float16:
        logger.info(
            f"loss scale mode 'calibrated' has no effect: it keeps gradients in the range of FP16, and these are "
            f"{compute_dtype}, which has the range of FP32; loss_scale=none gives the same result"
        )
    if rule.mode != "auto":
        return rule
    return replace(rule, mode="dynamic" if compute_dtype == torch.float16 else "none")


def fitting_scale(largest: float, rule: LossScale) -> float:
    """Returns the largest power of two, within the limits of ``rule``, at which ``largest`` fits FP16 with its margin.

    Args:
        largest: the largest unscaled gradient, above 0.
    """
    # gradient x margin x scale <= 65,504; from exponents, because log2 rounds
    mantissa, exponent = math.frexp(largest * rule.margin)
    limit, room = math.frexp(_LARGEST_FP16)
    power = room - exponent - (mantissa > limit)
    return min(max(math.ldexp(1.0, power), rule.min), rule.max)


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

    @staticmethod
    def of(rule: LossScale) -> LossScaleState:
        """Returns the state before the first step of a rule whose mode is not ``auto`` (``resolve_loss_scale``)."""
        assert rule.mode != "auto", rule
        return LossScaleState(rule, 1.0 if rule.mode == "none" else rule.init, 0, rule.hysteresis)

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
        scale = fitting_scale(measured.max_abs_grad, self.rule) if measured.max_abs_grad else self.scale
        return replace(measured, scale=scale, clean_steps=0, overflows_left=self.rule.hysteresis, is_calibrated=True)

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

    def check(self) -> None:
        """Raises ``ConfigError`` unless a sequence of steps leads to this state."""
        rule = self.rule
        limits: dict[str, tuple[float, float]] = {
            "scale": (rule.min, rule.max),
            "clean_steps": (0, math.inf),
            "overflows_left": (0, rule.hysteresis),
            "max_abs_grad": (0, math.inf),
            "num_measured": (0, math.inf),
        }
        if rule.mode == "auto":
            raise ConfigError("LossScaleState.rule.mode=auto, which becomes another mode before the first step")
        if rule.mode in ("none", "static"):
            constant = 1.0 if rule.mode == "none" else rule.init
            limits["scale"] = (constant, constant)
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise ConfigError(
                    f"LossScaleState.{name}={value} is impossible in mode {rule.mode}: expected a finite number from "
                    f"{low:g} to {high:g}"
                )

    def restored(self, saved: LossScaleState) -> LossScaleState:
        """Returns the saved state under the current settings, or a fresh state if the mode has changed."""
        rule = self.rule
        if saved.rule.mode != rule.mode or rule.mode not in ("dynamic", "calibrated"):
            return self
        # the limits of the current settings hold for the saved numbers too
        scale = min(max(saved.scale, rule.min), rule.max)
        return replace(saved, rule=rule, scale=scale, overflows_left=min(saved.overflows_left, rule.hysteresis))
