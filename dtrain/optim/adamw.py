"""AdamW's hyper-parameters, and the records of an update's tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.precision.hardware import has_compiler, has_float8_tensor_cores


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019, algorithm 2).

    Attributes:
        lr: peak learning rate; a schedule scales it.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled; not applied to parameters of one dimension or none (norms, biases).
        compile: whether the update is compiled, on a GPU also the norm and the vote, which takes seconds at the start;
            ``auto``: on a GPU with a compiler for all that the update writes.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    compile: bool | str = "auto"

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"AdamW betas must be two numbers from 0 to below 1; got {self.betas}")
        for name in ("lr", "eps", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"AdamW {name} must be at least 0; got {getattr(self, name)}")
        if not isinstance(self.compile, bool) and self.compile != "auto":
            raise ConfigError(f"AdamW compile must be True, False or 'auto'; got {self.compile!r}")

    def on(self, device: torch.device, *, casts_float8: bool = False) -> AdamW:
        """Returns the same with ``compile`` decided for ``device``.

        A CPU takes the fused kernel, which is within a fifth of the compiled update and starts at once.

        Args:
            device: device of the update.
            casts_float8: whether the update writes FP8 replicas, which it does with delayed scales.

        Raises:
            ConfigError: ``compile`` is True, and the compiler cannot write FP8 on this GPU.
        """
        can_store = not casts_float8 or device.type != "cuda" or has_float8_tensor_cores(device)
        if self.compile is True and not can_store:
            raise ConfigError(
                f"optim.compile=true with float8 weight_scale=delayed: the update writes FP8, and Triton does so from "
                f"compute capability 8.9 on, which {device} has not; use optim.compile=auto, or weight_scale=current"
            )
        if self.compile != "auto":
            return self
        return replace(self, compile=device.type == "cuda" and can_store and has_compiler(device))


@dataclass(frozen=True)
class UpdateScalars:
    """Scalars that all segments of one update share.

    Attributes:
        lr: learning rate of this update.
        step: number of this update, counted from 1, for the bias correction.
        grad_divisor: divisor of the main grads: loss scale x sum of weights / clip coefficient; 0-dim, any float dtype.
        found_inf: if it is not 0, the update is skipped, and masters, moments and replicas keep their bits, whatever
            the main grads are; 0-dim, any float dtype, on the device of ``grad_divisor``.
    """

    lr: float
    step: int
    grad_divisor: Tensor
    found_inf: Tensor

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns all four as 0-dim FP32 tensors, filled in on the device without a copy; ``found_inf`` is 0 or 1."""
        fill = partial(torch.full, (), dtype=torch.float32, device=self.grad_divisor.device)
        divisor, found_inf = self.grad_divisor.detach(), self.found_inf.detach() != 0
        return fill(self.lr), fill(float(self.step)), divisor.to(torch.float32), found_inf.to(torch.float32)

    def bias_corrections(self, betas: tuple[float, float]) -> tuple[float, float]:
        """Returns 1 - beta^step of both moments, without the cancellation of the difference."""
        first, second = (-math.expm1(self.step * math.log(beta)) if beta else 1.0 for beta in betas)
        return first, second

    def to(self, device: torch.device) -> UpdateScalars:
        """Returns the same with its tensors on ``device``."""
        return replace(self, grad_divisor=self.grad_divisor.to(device), found_inf=self.found_inf.to(device))


@dataclass(frozen=True)
class UpdateSlice:
    """A range of the arena with one weight-decay class.

    All tensors are 1-D, of one length, and FP32 except the replica.

    Attributes:
        replica: the masters are cast into it; None if it is the masters' own storage, or is cast later.
        scale: 0-dim FP32, for an FP8 replica: divisor of the masters before the cast.
        amax: 0-dim FP32, beside ``scale``: raised to the largest magnitude of the masters.
    """

    decayed: bool
    master: Tensor
    main_grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    replica: Tensor | None
    scale: Tensor | None = None
    amax: Tensor | None = None

    @property
    def states(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Master, main grad and both moments."""
        return self.master, self.main_grad, self.exp_avg, self.exp_avg_sq

    def cut(self, size: int) -> list[UpdateSlice]:
        """Returns parts of ``size`` elements, the last one shorter."""
        return [
            replace(
                self,
                master=self.master[part],
                main_grad=self.main_grad[part],
                exp_avg=self.exp_avg[part],
                exp_avg_sq=self.exp_avg_sq[part],
                replica=None if self.replica is None else self.replica[part],
            )
            for part in (slice(start, start + size) for start in range(0, self.master.numel(), size))
        ]


@dataclass(frozen=True)
class UpdateGroup:
    """Parameters of one weight-decay class, as FP32 tensors of any shape; the lists have one length."""

    decayed: bool
    masters: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
