"""AdamW over flat FP32 tensors, in one pass: unscale, moments, master, and the cast into the compute replica.

The arena is updated segment by segment, so that the first groups travel while others are updated. There are two ways,
one of which is chosen at the start of a run (their bits differ in the last places): torch's own fused kernel
(``torch._fused_adamw_``) block by block, so that the cast finds the masters in the cache, and plain tensor code that is
compiled. Both give the same bits however the arena is cut at chunks or sharded, and neither asks the device anything:
whether an update is skipped is decided there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dtrain.distributed.logging import logger
from dtrain.errors import ConfigError
from dtrain.optim.compiled import CompiledAdamW
from dtrain.precision.compiler import has_compiler
from dtrain.precision.float8.options import has_tensor_cores
from dtrain.precision.float8.cast import E4M3, cast
from dtrain.sharding.replicas import UpdateSlice
from dtrain.sharding.layout import CHUNK

_BLOCK = 512 * CHUNK
"""Elements updated before they are cast, on a CPU: they must stay in the cache, and hide what a call costs."""


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
        can_store = not casts_float8 or device.type != "cuda" or has_tensor_cores(device)
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


class FlatAdamW:
    """Applies :class:`AdamW` to the segments of an arena.

    Args:
        rule: hyper-parameters, with ``compile`` decided (see :meth:`AdamW.on`).
        segments: each a list of slices, cut where the weight-decay class changes.

    Raises:
        ConfigError: the update is to be compiled and cannot be.
    """

    def __init__(self, rule: AdamW, segments: Sequence[Sequence[UpdateSlice]]) -> None:
        if not isinstance(rule.compile, bool):
            raise ValueError("AdamW.compile is 'auto'; call AdamW.on(device) first")
        self._way = CompiledAdamW(rule, segments) if rule.compile else BlockedAdamW(rule, segments)

    @torch.no_grad()
    def update(self, number: int, scalars: UpdateScalars) -> None:
        """One update of segment ``number`` and the cast into its replica, if it has one; the main grads are used up.

        A skipped update casts too: the replica gets the bits that it has.
        """
        self._way.update(number, scalars)


class BlockedAdamW:
    """torch's fused kernel, block by block."""

    def __init__(self, rule: AdamW, segments: Sequence[Sequence[UpdateSlice]]) -> None:
        self._rule = rule
        self._segments = [[block for part in segment for block in _blocks(part)] for segment in segments]
        logger.info(
            "optimizer: AdamW by torch's fused kernel; optim.compile=true would compile it, which takes seconds"
        )

    def update(self, number: int, scalars: UpdateScalars) -> None:
        """See :meth:`FlatAdamW.update`; the main grads are left divided."""
        for block in self._segments[number]:
            _fused(self._rule, block.decayed, tuple([tensor] for tensor in block.states), scalars)
            _cast(block)


def _cast(block: UpdateSlice) -> None:
    if block.replica is None:
        return
    if block.scale is None or block.amax is None:
        block.replica.copy_(block.master)
        return
    block.replica.copy_(cast(block.master, block.scale, E4M3))
    torch.maximum(block.amax, block.master.abs().amax(), out=block.amax)


def _blocks(part: UpdateSlice) -> list[UpdateSlice]:
    """``part`` in blocks; in one piece on a GPU, which has no use for them."""
    return part.cut(_BLOCK if part.master.device.type == "cpu" else part.master.numel())


@dataclass(frozen=True)
class UpdateList:
    """Tensors of one weight-decay class that are updated together: FP32, the lists of one length, shapes alike."""

    decayed: bool
    masters: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]


class ListedAdamW:
    """torch's fused kernel on the tensors as a library below holds them; the gradients are given with each update.

    Args:
        rule: hyper-parameters; ``compile`` must not be True.
        lists: one for each weight-decay class.
    """

    def __init__(self, rule: AdamW, lists: Sequence[UpdateList]) -> None:
        self._rule = rule
        self._lists = [part for part in lists if part.masters]

    @property
    def lists(self) -> Sequence[UpdateList]:
        """What is updated, in the order in which :meth:`update` takes the gradients."""
        return self._lists

    @torch.no_grad()
    def update(self, grads: Sequence[list[Tensor]], scalars: UpdateScalars) -> None:
        """One update of all; nothing changes where ``found_inf`` is set. The gradients are left divided.

        Args:
            grads: FP32, for each of ``lists`` in its order.
            scalars: of this update.
        """
        for part, own in zip(self._lists, grads, strict=True):
            _fused(self._rule, part.decayed, (part.masters, own, part.exp_avgs, part.exp_avg_sqs), scalars)


def _fused(rule: AdamW, decayed: bool, tensors: tuple[list[Tensor], ...], scalars: UpdateScalars) -> None:
    masters, grads, exp_avgs, exp_avg_sqs = tensors
    torch._fused_adamw_(
        masters,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [scalars.step] * len(masters),
        lr=scalars.lr,
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        weight_decay=rule.weight_decay if decayed else 0.0,
        eps=rule.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=scalars.grad_divisor,
        found_inf=scalars.found_inf,
    )
