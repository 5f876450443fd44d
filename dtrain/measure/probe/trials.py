"""Short trainings, one a format, with the native engine on one rank: same start, same samples, same dropout."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.precision import Float8
from dtrain.config.schema import RunConfig
from dtrain.data import Dataset
from dtrain.data.loader import Batch
from dtrain.device import TensorBytes, elapsed_ms
from dtrain.distributed.logging import logger
from dtrain.distributed.startup.setup import connect
from dtrain.engine.adapters.native import NativeEngine
from dtrain.engine.outcome import StepOutcome
from dtrain.measure.noise import perturb_by_an_ulp
from dtrain.measure.probe.records import Trial, final_loss
from dtrain.models import build_model
from dtrain.parameters.model_states import MAIN_GRAD
from dtrain.precision.float8.options import resolve_float8
from dtrain.precision.forward import set_matmul_precision
from dtrain.precision.fp16_products import fp16_products
from dtrain.precision.hardware import has_bf16_products
from dtrain.tools.processes import failure_reason
from dtrain.train.session import Session

_UNTIMED_STEPS = 3  # of a trial: kernels are chosen and memory is allocated


def is_emulated(config: RunConfig, device: torch.device) -> bool:
    """Whether ``device`` has no instructions for a format of the training, so that its time says nothing."""
    return any(_is_emulated(name, config.precision.float8, device) for name in _formats(config))


def _is_emulated(name: str, float8: Float8, device: torch.device) -> bool:
    if name == "fp8":
        return bool(resolve_float8(float8, device).emulate)
    if name == "bf16":
        return not has_bf16_products(device)
    return name == "fp16" and device.type == "cpu"


@contextmanager
def quiet() -> Iterator[None]:
    """Silences what engines log about their set-up and their skipped steps, which the probe reports itself."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class FormatTraining:
    """A training in one format whose steps the caller takes one by one.

    A step whose gradients overflow is repeated with the smaller loss scale, on the same samples with the same dropout:
    a gap then comes from the format, not from a missed update. An error ends the training, and is its ``failure``.

    Args:
        config: the run; its precision is the format.
        dataset: of the run.
        device: device to train on.
        first_gradients: FP32's first gradients on the host, by parameter; if it is empty, this training adds its own.
        perturbed: start an ulp away from the weights of ``config.seed``.

    Attributes:
        losses: loss of each step.
        skipped: steps that were skipped, repeated ones included.
        failure: why the training cannot go on.
        cosine: of the first gradients with ``first_gradients``; NaN after a failure.
    """

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        device: torch.device,
        first_gradients: dict[str, Tensor],
        *,
        perturbed: bool = False,
    ) -> None:
        self.name = config.precision.name
        self.losses: list[float] = []
        self.skipped = 0
        self.failure: str | None = None
        self.cosine = math.nan
        self._config = config
        self._device = device
        self._first_gradients = first_gradients
        self._ms: list[float] = []
        self._memory = 0
        model = None
        if perturbed:
            model = build_model(config.model, dataset.task, config.seed)
            perturb_by_an_ulp(model, config.seed)
        with quiet():
            self._session = Session.open(config, connect(device), model=model, dataset=dataset)
        assert isinstance(self._session.engine, NativeEngine)
        self.engine = self._session.engine

    def step(self, batch: Batch) -> None:
        """Takes the next step, unless the training has failed."""
        if self.failure is not None:
            return
        number = len(self.losses) + 1
        try:
            with quiet():
                outcome = self._attempt(batch)
                while outcome.reason == "overflow" and self._can_lower_scale():
                    self.skipped += 1
                    self.engine.attempted_steps -= 1  # the key of its dropout
                    outcome = self._attempt(batch)
        except Exception as error:  # of the user's model, of a library, or too many skips
            self.failure = f"step {number}: {failure_reason(error)}"
            return
        self.skipped += not outcome.applied
        if outcome.reason == "nonfinite_loss":
            self.failure = f"step {number}: {outcome.culprit}"
        elif outcome.reason == "overflow" and self._scale_is_dynamic:
            self.failure = f"step {number}: gradients overflow at any loss scale: {outcome.culprit}"
        else:
            self.losses.append(outcome.loss)
            if number == 1:
                self.cosine = self._compare_gradients()

    def _attempt(self, batch: Batch) -> StepOutcome:
        set_matmul_precision(self.engine.policy)  # a mode of the process, in which other formats train too
        # other formats' trainings lie on the device too; a CPU does not say, and would take time
        counted = TensorBytes(self._device) if self._device.type == "cuda" else nullcontext(None)
        outcomes: list[StepOutcome] = []
        around = fp16_products(self._device, _formats(self._config))
        with counted as found:
            ms = elapsed_ms(lambda: outcomes.append(self._session.step(batch, around)), self._device)
        own = sum(self.engine.memory().values()) + (0 if found is None else found.peak)
        self._memory = max(self._memory, own)
        if outcomes[0].applied:
            self._ms.append(ms)
        return outcomes[0]

    @property
    def _scale_is_dynamic(self) -> bool:
        return self.engine.loss_scale.rule.mode in ("dynamic", "calibrated")

    def _can_lower_scale(self) -> bool:
        scale = self.engine.loss_scale
        return self._scale_is_dynamic and scale.scale > scale.rule.min

    def _compare_gradients(self) -> float:
        """Compares those of the last step, before clipping; the loss scale does not change a cosine."""
        gradients = dict(self.engine.states.full_state(MAIN_GRAD))
        if not self._first_gradients:
            self._first_gradients.update({name: gradient.cpu() for name, gradient in gradients.items()})
        return cosine(gradients, self._first_gradients)

    def plain_model(self) -> nn.Module:
        """Returns a new module of the user's own, in FP32 on the device, with this training's masters and buffers."""
        config = self._config
        model = build_model(config.model, self._session.dataset.task, config.seed).float().to(self._device)
        weights = self.engine.master_state()
        buffers = dict(self.engine.module.named_buffers())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        return model

    def trial(self, reference: float) -> Trial:
        """Returns the record of this training; ``reference`` is the final loss of FP32."""
        timed = self._ms[_UNTIMED_STEPS:]
        return Trial(
            format=self.name,
            rules=_rules(self._config),
            losses=self.losses,
            ms_per_step=None if is_emulated(self._config, self._device) or not timed else statistics.median(timed),
            memory=self._memory,
            cosine=self.cosine,
            skipped=self.skipped,
            loss_scale=self.engine.loss_scale.scale,
            gap=math.inf if self.failure is not None else final_loss(self.losses) - reference,
            failure=self.failure,
        )


def failed_trial(config: RunConfig, error: Exception) -> Trial:
    """Returns the record of a training that could not be built."""
    precision = config.precision.name
    return Trial(precision, _rules(config), [], None, 0, math.nan, 0, 1.0, math.inf, failure_reason(error))


def _rules(config: RunConfig) -> dict[str, str]:
    return {str(pattern): name for pattern, name in config.precision.rules.items()}


def _formats(config: RunConfig) -> set[str]:
    return {config.precision.name, *config.precision.rules.values()}


def cosine(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Returns the cosine of two gradients, each of all tensors by name; NaN if one is zero or not finite."""
    dot = squares = reference_squares = 0.0
    for name, expected in reference.items():
        ours: Any = gradients[name].to(expected.device).double().flatten()
        theirs: Any = expected.double().flatten()
        dot += float(ours @ theirs)
        squares += float(ours @ ours)
        reference_squares += float(theirs @ theirs)
    norms = math.sqrt(squares) * math.sqrt(reference_squares)
    return dot / norms if norms and math.isfinite(norms) else math.nan


def interleave(trainings: Sequence[FormatTraining], steps: Sequence[Batch]) -> None:
    """Trains all formats on ``steps``, one step of each in turn, so that a busy machine slows all alike."""
    for number, batch in enumerate(steps, start=1):
        for training in trainings:
            training.step(batch)
        if number % max(1, len(steps) // 4) == 0:
            logger.info("  step %d of %d: %s", number, len(steps), ", ".join(map(_progress, trainings)))


def _progress(training: FormatTraining) -> str:
    return f"{training.name} {'failed' if training.failure is not None else f'{training.losses[-1]:.4f}'}"
