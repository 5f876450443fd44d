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
from dtrain.measure.probe.records import FORWARD, Analysis, Flip
from dtrain.measure.probe.sensitivity import MicroBatch, ProbeSettings
from dtrain.precision.forward import set_matmul_precision
from dtrain.precision.policy import PrecisionPolicy
from dtrain.train.setup import torch_settings_restored


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
    ranked = [r for r in analysis.worst(format_name) if r.product in FORWARD]
    chosen = ranked if num is None or len(ranked) <= 2 * num else [*ranked[:num], *ranked[-num:]]
    if not chosen:
        return ()
    with torch_settings_restored(), unchanged(model), torch.no_grad():
        set_matmul_precision(PrecisionPolicy.named("fp32"))
        device = device_of(model)
        switch = FormatSwitch(model, settings.handovers(model, micro_batches[0]), settings.float8)

        def losses(context: AbstractContextManager[object]) -> list[float]:
            found = []
            with context:
                for index, micro_batch in enumerate(micro_batches):
                    with keyed_rng(device, micro_batch_key(settings.seed, index)):
                        found.append(float(settings.loss_of(model, micro_batch)))
            return found

        exact = losses(nullcontext())
        flips = []
        for r in chosen:
            before = exact
            if not is_product(model.get_submodule(r.module)):
                before = losses(switch.with_rounded_inputs(r.module, format_name))
            with settings.fp16() if format_name == "fp16" else nullcontext():
                after = losses(switch.in_format(r.module, format_name))
            flips.append(Flip(r.module, format_name, r.predicted, _rms_change(before, after)))
        return tuple(flips)


def _rms_change(before: Sequence[float], after: Sequence[float]) -> float:
    changes = [flipped - exact for exact, flipped in zip(before, after, strict=True)]
    if not all(map(math.isfinite, changes)):
        return math.inf
    return math.sqrt(sum(change**2 for change in changes) / len(changes))
