"""Loss scaling as a pure state machine: no tensors, no collectives.

The vote decides whether any rank saw an overflow; every rank then feeds the same answer to the same machine, so the
scales cannot part. Constants follow Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dtrain.errors import ConfigError

MODES = ("auto", "none", "static", "dynamic")


@dataclass(frozen=True)
class LossScale:
    """How the loss is scaled.

    Attributes:
        mode: ``none`` (1), ``static`` (always ``init``), ``dynamic`` (grows and backs off), or ``auto``: dynamic where
            the compute dtype is FP16, none elsewhere, because BF16 and FP32 have the range of the gradients.
        init: the first scale.
        growth_factor: factor after ``growth_interval`` clean steps in a row.
        backoff_factor: factor after an overflow.
        growth_interval: clean steps before the scale grows.
        hysteresis: overflows (since the scale last grew) before it backs off; 1 backs off at once.
        min: floor of the dynamic scale.
        max: ceiling of the dynamic scale.
    """

    mode: str = "auto"
    init: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min: float = 2.0**-14
    max: float = 2.0**24

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

    @staticmethod
    def of(value: LossScale | str | float) -> LossScale:
        """A record from what ``initialize(loss_scale=...)`` accepts: a record, a mode, or a number (static)."""
        if isinstance(value, LossScale):
            return value
        if isinstance(value, str):
            return LossScale(mode=value)
        scale = float(value)
        return LossScale(mode="static", init=scale, min=min(scale, LossScale.min), max=max(scale, LossScale.max))

    def resolved(self, compute_dtype: torch.dtype) -> LossScale:
        """The record with ``auto`` decided for ``compute_dtype``."""
        if self.mode != "auto":
            return self
        return replace(self, mode="dynamic" if compute_dtype == torch.float16 else "none")

    def start(self) -> LossScaleState:
        """The state before the first step.

        Raises:
            ConfigError: the mode is still ``auto``.
        """
        if self.mode == "auto":
            raise ConfigError("loss scale mode 'auto' must be resolved for a compute dtype before it starts")
        return LossScaleState(self, 1.0 if self.mode == "none" else self.init, 0, self.hysteresis)


@dataclass(frozen=True)
class LossScaleState:
    """The scale in force and what it takes to change it."""

    rule: LossScale
    scale: float
    clean_steps: int
    overflows_left: int

    def update(self, found_inf: bool) -> LossScaleState:
        """The state after a step whose gradients overflowed (``found_inf``) or were applied."""
        rule = self.rule
        if rule.mode != "dynamic":
            return self
        if found_inf:
            left = self.overflows_left - 1
            if left > 0:
                return replace(self, clean_steps=0, overflows_left=left)
            return replace(self, scale=max(self.scale * rule.backoff_factor, rule.min), clean_steps=0, overflows_left=0)
        clean = self.clean_steps + 1
        if clean < rule.growth_interval:
            return replace(self, clean_steps=clean)
        return LossScaleState(rule, min(self.scale * rule.growth_factor, rule.max), 0, rule.hysteresis)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"rule": asdict(self.rule), "scale": self.scale, "clean_steps": self.clean_steps,
                "overflows_left": self.overflows_left}  # fmt: skip

    def restored(self, saved: dict[str, Any]) -> LossScaleState:
        """This machine at the saved point; where the rule's mode was changed since, its own fresh start."""
        if saved["rule"]["mode"] != self.rule.mode or self.rule.mode != "dynamic":
            return self
        scale = min(max(float(saved["scale"]), self.rule.min), self.rule.max)
        return LossScaleState(
            self.rule, scale, int(saved["clean_steps"]), min(int(saved["overflows_left"]), self.rule.hysteresis)
        )
