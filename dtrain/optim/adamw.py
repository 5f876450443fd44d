"""AdamW's hyper-parameters, and the records that an update takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

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
        compile: whether the update is compiled, which takes seconds at the start; ``auto``: on a GPU with a compiler
            for all that the update writes.
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
        """With ``compile`` decided for ``device``.

        A CPU takes the blocked kernel: it is within a fifth of the compiled update and starts at once.

        Args:
            device: that updates.
            casts_float8: the update writes FP8 replicas itself, as delayed scales let it.

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
    """What all segments of one update share: 0-dim FP32 tensors on the device.

    Attributes:
        lr: learning rate of this update.
        step: number of this update, counted from 1, for the bias correction.
        grad_divisor: what the main grads are divided by: loss scale x sum of weights / clip coefficient.
        found_inf: 1 skips the update: masters, moments and replicas keep their bits, whatever the main grads are.
    """

    lr: Tensor
    step: Tensor
    grad_divisor: Tensor
    found_inf: Tensor

    @staticmethod
    def of(
        *, lr: float, step: int, grad_divisor: Tensor | float, found_inf: Tensor | float, device: torch.device
    ) -> UpdateScalars:
        """From numbers, which are filled in on the device so that nothing waits for a copy, or from its tensors."""
        fill = partial(torch.full, (), dtype=torch.float32, device=device)

        def scalar(value: Tensor | float) -> Tensor:
            return value.detach().to(torch.float32).reshape(()) if isinstance(value, Tensor) else fill(value)

        return UpdateScalars(fill(lr), fill(float(step)), scalar(grad_divisor), scalar(found_inf))


@dataclass(frozen=True)
class UpdateSlice:
    """A stretch of the arena with one weight-decay class; all tensors 1-D, of one length, FP32 but for the replica.

    Attributes:
        replica: takes the masters' cast; None: they are cast later.
        scale: 0-dim FP32, of an FP8 replica: what the masters are divided by first.
        amax: 0-dim FP32, beside ``scale``: grows to the largest magnitude of the masters.
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
        """In parts of ``size`` elements, the last one shorter."""
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
    """Tensors of one weight-decay class that are updated together: FP32, the lists of one length, shapes alike."""

    decayed: bool
    masters: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
