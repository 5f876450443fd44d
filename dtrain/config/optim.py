"""Keys of ``optim``: the optimizer's hyper-parameters, and the clipping threshold."""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.config.fields import CheckedRecord, above, at_least, one_of, option, setting
from dtrain.errors import ConfigError


@dataclass(frozen=True)
class AdamW(CheckedRecord):
    """AdamW on the FP32 masters (Loshchilov and Hutter, 2019)."""

    name: str = option("adamw")
    lr: float = at_least(1e-3, 0.0, "Peak learning rate.")
    betas: tuple[float, float] = setting((0.9, 0.95), "Decay rates of the two moments, each in [0, 1).")
    eps: float = at_least(1e-8, 0.0, "Term added to the denominator.")
    weight_decay: float = at_least(0.1, 0.0, "Decoupled weight decay; norms and biases are not decayed.")
    compile: bool | str = one_of(
        "auto",
        True,
        False,
        doc="Compile the update (on a GPU norm and vote too), which takes seconds; auto: on a GPU with a compiler.",
    )

    def _check(self) -> None:
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(
                f"{self._key('betas')}={list(self.betas)} must be two numbers in [0, 1), such as [0.9, 0.95]"
            )


@dataclass(frozen=True)
class OptimConfig(AdamW):
    """AdamW on the FP32 masters (Loshchilov and Hutter, 2019)."""

    max_grad_norm: float | None = above(1.0, 0.0, "Norm to which the gradient is clipped; null: no clipping.")

    @property
    def optimizer(self) -> AdamW:
        """The hyper-parameters alone."""
        return AdamW(**{name: getattr(self, name) for name in AdamW.__dataclass_fields__})
