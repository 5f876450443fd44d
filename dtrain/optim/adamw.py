"""AdamW: its hyper-parameters, and its rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dtrain.distributed.logging import logger
from dtrain.errors import ConfigError
from dtrain.optim.rule import Rule, SegmentKernel, StateSpec, UpdateGroup, UpdateScalars, UpdateSlice
from dtrain.precision.hardware import has_compiler


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

    def on(self, device: torch.device) -> AdamW:
        """Returns the same with ``compile`` decided for ``device``.

        A CPU takes the fused kernel, which is within a fifth of the compiled update and starts at once.
        """
        if self.compile != "auto":
            return self
        return replace(self, compile=device.type == "cuda" and has_compiler(device))


class AdamWRule(Rule):
    """AdamW by one of three implementations.

    Torch's fused kernel (``torch._fused_adamw_``) updates lists of tensors, and an arena block by block. If the update
    is compiled, an arena is updated by tensor code on a CPU and by a Triton kernel on a GPU.

    Args:
        record: hyper-parameters, with ``compile`` decided (see :meth:`AdamW.on`).
    """

    states = (StateSpec("exp_avg"), StateSpec("exp_avg_sq"))

    def __init__(self, record: AdamW) -> None:
        if not isinstance(record.compile, bool):
            raise ValueError("AdamW.compile is 'auto'; call AdamW.on(device) first")
        self._record = record
        self.is_compiled = record.compile

    def apply(self, group: UpdateGroup, grads: list[Tensor], scalars: UpdateScalars) -> None:
        """Updates the tensors in one call of torch's fused kernel; the gradients are left divided."""
        exp_avgs, exp_avg_sqs = group.states
        lr, step, grad_divisor, found_inf = scalars.tensors
        record = self._record
        torch._fused_adamw_(
            group.masters,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [step] * len(group.masters),  # read only: the kernel leaves counting to its caller
            lr=lr,
            beta1=record.betas[0],
            beta2=record.betas[1],
            weight_decay=record.weight_decay if group.decayed else 0.0,
            eps=record.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_divisor,
            found_inf=found_inf,
        )

    def segment_kernel(self, segments: Sequence[Sequence[UpdateSlice]]) -> SegmentKernel | None:
        """Returns the compiled kernel for the device of ``segments``, if one is asked for."""
        if not self.is_compiled:
            logger.info(
                "optimizer: AdamW by torch's fused kernel; optim.compile=true would compile it, which takes seconds"
            )
            return None
        if any(part.master.device.type == "cuda" for segment in segments for part in segment):
            from dtrain.optim.tiled import TiledAdamW  # it imports Triton, which a CPU build of torch does not have

            return TiledAdamW(self._record, segments)
        from dtrain.optim.compiled import CompiledAdamW  # which imports the record from here

        return CompiledAdamW(self._record, segments)
