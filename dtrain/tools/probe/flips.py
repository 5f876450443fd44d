"""Checks the predictions: one module alone in the format, and the change of the loss that this makes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import nn

from dtrain.engine.rng import keyed_rng
from dtrain.tools.probe.one_module import Handovers, device_of, in_format, observe_handovers, with_rounded_inputs
from dtrain.tools.probe.products import is_product
from dtrain.tools.probe.recording import micro_batch_key, unchanged
from dtrain.tools.probe.records import Analysis, Flip
from dtrain.tools.probe.sensitivity import MicroBatch, Settings

_FORWARD = ("fprop", "forward")


def flip(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    analysis: Analysis,
    format_name: str,
    num: int | None = 5,
    settings: Settings | None = None,
) -> tuple[Flip, ...]:
    """Runs the worst and the best ``num`` modules alone in the format, worst first; None: all of them.

    ``analysis`` is that of the same model, micro-batches and settings. Only forwards run, so the predictions are those
    of the forward products.
    """
    settings = settings or Settings()
    ranked = sorted(
        (r for r in analysis.products if r.format == format_name and r.product in _FORWARD),
        key=lambda r: (not math.isnan(r.predicted), r.predicted),
        reverse=True,
    )
    chosen = ranked if num is None or len(ranked) <= 2 * num else [*ranked[:num], *ranked[-num:]]
    if not chosen:
        return ()
    with unchanged(model), torch.no_grad():
        flipper = _Flipper(model, micro_batches, format_name, settings)
        return tuple(Flip(r.module, format_name, r.predicted, flipper.measure(r.module)) for r in chosen)


class _Flipper:
    def __init__(
        self, model: nn.Module, micro_batches: Sequence[MicroBatch], format_name: str, settings: Settings
    ) -> None:
        self.model, self.micro_batches, self.format, self.settings = model, micro_batches, format_name, settings
        self.device = device_of(model)
        with keyed_rng(self.device, micro_batch_key(settings.seed, 0)):
            self.handovers: Handovers = observe_handovers(
                model, lambda: settings.loss_of(model, micro_batches[0]), self.device
            )
        self._losses = self._run(nullcontext())

    def measure(self, name: str) -> float:
        """Returns the change of the loss, root mean square over the micro-batches."""
        losses = self._losses
        if not is_product(self.model.get_submodule(name)):
            losses = self._run(with_rounded_inputs(self.model, name, self.format, self.handovers))
        with ExitStack() as stack:
            if self.format == "fp16":
                stack.enter_context(self.settings.fp16())
            flipped = self._run(in_format(self.model, name, self.format, self.handovers, float8=self.settings.float8))
        changes = [flipped - before for flipped, before in zip(flipped, losses, strict=True)]
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
