"""Checks the predictions: one module alone in the format, and the change of the loss that this makes.

FP32 is precise enough for the reference: both losses sum in the same order, and on the default model changes of 5e-7
still agree with the predictions to a fifth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from dtrain.engine.rng import keyed_rng
from dtrain.measure.probe.one_module import FormatSwitch, device_of
from dtrain.measure.probe.products import is_product
from dtrain.measure.probe.recording import micro_batch_key, unchanged
from dtrain.measure.probe.records import Analysis, Flip
from dtrain.measure.probe.sensitivity import MicroBatch, ProbeSettings
from dtrain.precision.forward import set_matmul_precision
from dtrain.precision.policy import PrecisionPolicy
from dtrain.train.setup import torch_settings_restored

_FORWARD = ("fprop", "forward")


def flip(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    analysis: Analysis,
    format_name: str,
    num: int | None = 5,
    settings: ProbeSettings | None = None,
) -> tuple[Flip, ...]:
    """Runs the worst and the best ``num`` modules alone in the format, worst first; None: all of them.

    Empty for TF32, which is a mode of the process and not of a module.

    ``analysis`` is that of the same model, micro-batches and settings. Only forwards run, so the predictions are those
    of the forward products.
    """
    settings = settings or ProbeSettings()
    if format_name == "tf32":
        return ()
    ranked = [r for r in analysis.worst(format_name) if r.product in _FORWARD]
    chosen = ranked if num is None or len(ranked) <= 2 * num else [*ranked[:num], *ranked[-num:]]
    if not chosen:
        return ()
    with torch_settings_restored(), unchanged(model), torch.no_grad():
        set_matmul_precision(PrecisionPolicy.named("fp32"))
        flipper = _Flipper(model, micro_batches, format_name, settings)
        return tuple(Flip(r.module, format_name, r.predicted, flipper.measure(r.module)) for r in chosen)


class _Flipper:
    def __init__(
        self, model: nn.Module, micro_batches: Sequence[MicroBatch], format_name: str, settings: ProbeSettings
    ) -> None:
        self.model, self.micro_batches, self.format, self.settings = model, micro_batches, format_name, settings
        self.device = device_of(model)
        self._switch = FormatSwitch(model, settings.handovers(model, micro_batches[0]), settings.float8)
        self._losses = self._run(nullcontext())

    def measure(self, name: str) -> float:
        """Returns the change of the loss, root mean square over the micro-batches."""
        losses = self._losses
        if not is_product(self.model.get_submodule(name)):
            losses = self._run(self._switch.with_rounded_inputs(name, self.format))
        with self.settings.fp16() if self.format == "fp16" else nullcontext():
            flipped = self._run(self._switch.in_format(name, self.format))
        changes = [after - before for after, before in zip(flipped, losses, strict=True)]
        if not all(map(math.isfinite, changes)):
            return math.inf
        return math.sqrt(sum(change**2 for change in changes) / len(changes))

    def _run(self, context: AbstractContextManager[object]) -> list[float]:
        losses = []
        with context:
            for index, micro_batch in enumerate(self.micro_batches):
                with keyed_rng(self.device, micro_batch_key(self.settings.seed, index)):
                    losses.append(float(self.settings.loss_of(self.model, micro_batch)))
        return losses
