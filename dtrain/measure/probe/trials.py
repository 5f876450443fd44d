"""Short trainings, one a format, with the native engine on one rank: same start, same samples, same dropout."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from dtrain.config.precision import Float8
from dtrain.config.schema import RunConfig
from dtrain.distributed.logging import logger
from dtrain.distributed.startup.setup import connect
from dtrain.engine.adapters.native import NativeEngine
from dtrain.engine.outcome import StepOutcome
from dtrain.measure.probe.noise import MicroBatches, cosine, final_loss, perturb_by_an_ulp
from dtrain.measure.probe.records import Trial
from dtrain.models import build_model
from dtrain.parameters.model_states import MAIN_GRAD
from dtrain.precision.float8.options import resolve_float8
from dtrain.precision.forward import set_matmul_precision
from dtrain.precision.fp16_products import FP16Products
from dtrain.precision.hardware import has_bf16_products
from dtrain.tasks import Task
from dtrain.tools.processes import failure_reason
from dtrain.train.session import micro_batch_weight
from dtrain.train.setup import make_engine
from dtrain.train.validation import to_device

_UNTIMED_STEPS = 3  # of a trial: kernels are chosen and memory is allocated


def is_emulated(config: RunConfig, device: torch.device) -> bool:
    """Whether ``device`` has no instructions for a format of the training, so that its time says nothing."""
    precision = config.precision
    return any(_is_emulated(name, precision.float8, device) for name in {precision.name, *precision.rules.values()})


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
        task: of the data.
        device: device to train on.
        perturbed: start an ulp away from the weights of ``config.seed``.

    Attributes:
        losses: loss of each step.
        skipped: steps that were skipped, repeated ones included.
        failure: why the training cannot go on.
    """

    def __init__(self, config: RunConfig, task: Task | int, device: torch.device, *, perturbed: bool = False) -> None:
        self.name = config.precision.name
        self.losses: list[float] = []
        self.skipped = 0
        self.failure: str | None = None
        self._config = config
        self._task = task
        self._num_targets = config.train.micro_batch_size * config.targets_per_sample
        self._device = device
        self._is_emulated = is_emulated(config, device)
        self._uses_fp16 = "fp16" in (self.name, *config.precision.rules.values())
        self._seconds: list[float] = []
        self._memory = 0
        model = build_model(config.model, task, config.seed)
        if perturbed:
            perturb_by_an_ulp(model, config.seed)
        with quiet():
            engine = make_engine(config, model, connect(device))
        assert isinstance(engine, NativeEngine)
        self.engine = engine

    def step(self, micro_batches: MicroBatches) -> None:
        """Takes the next step, unless the training has failed."""
        if self.failure is not None:
            return
        number = len(self.losses) + 1
        try:
            with quiet():
                outcome = self._attempt(micro_batches)
                while outcome.reason == "overflow" and self._can_lower_scale():
                    self.skipped += 1
                    self.engine.attempted_steps -= 1  # the key of its dropout
                    outcome = self._attempt(micro_batches)
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

    def _attempt(self, micro_batches: MicroBatches) -> StepOutcome:
        engine = self.engine
        set_matmul_precision(engine.policy)  # a mode of the process, in which other formats train too
        emulated: AbstractContextManager[object] = nullcontext()
        if self._uses_fp16 and self._device.type == "cpu":
            emulated = FP16Products()
        before = self._begin_memory()
        self._wait()
        begin = time.perf_counter()
        with emulated:
            for micro in engine.accumulate(micro_batches):
                weight = micro_batch_weight(micro, self._num_targets)
                engine.backward(engine(**to_device(micro, self._device)), weight=weight)
        outcome = engine.step()
        self._wait()
        seconds = time.perf_counter() - begin
        self._end_memory(before)
        if outcome.applied:
            self._seconds.append(seconds)
        return outcome

    @property
    def _scale_is_dynamic(self) -> bool:
        return self.engine.loss_scale.rule.mode in ("dynamic", "calibrated")

    def _can_lower_scale(self) -> bool:
        scale = self.engine.loss_scale
        return self._scale_is_dynamic and scale.scale > scale.rule.min

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _begin_memory(self) -> int:
        if self._device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def _end_memory(self, before: int) -> None:
        own = sum(self.engine.memory().values())
        if self._device.type == "cuda":  # other formats' trainings lie there too
            own += torch.cuda.max_memory_allocated(self._device) - before
        self._memory = max(self._memory, own)

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradient of the last step by parameter, before clipping, times the loss scale."""
        return dict(self.engine.states.full_state(MAIN_GRAD))

    def first_cosine(self, reference: Mapping[str, Tensor]) -> float:
        """Returns the cosine of the gradients of the step just taken with ``reference``; NaN after a failure."""
        return math.nan if self.failure is not None else cosine(self.gradients(), reference)

    def plain_model(self) -> nn.Module:
        """Returns a new module of the user's own, in FP32 on the device, with this training's masters and buffers."""
        config = self._config
        model = build_model(config.model, self._task, config.seed).float().to(self._device)
        weights = self.engine.master_state()
        buffers = dict(self.engine.module.named_buffers())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        return model

    def trial(self, reference: float, first_cosine: float) -> Trial:
        """Returns the record of this training.

        Args:
            reference: final loss of FP32.
            first_cosine: cosine of its first gradient with FP32's.
        """
        timed = self._seconds[_UNTIMED_STEPS:]
        return Trial(
            format=self.name,
            rules={str(pattern): name for pattern, name in self._config.precision.rules.items()},
            losses=self.losses,
            ms_per_step=None if self._is_emulated or not timed else 1000 * statistics.median(timed),
            memory=self._memory,
            cosine=first_cosine,
            skipped=self.skipped,
            loss_scale=self.engine.loss_scale.scale,
            gap=math.inf if self.failure is not None else self.final_loss - reference,
            failure=self.failure,
        )

    @property
    def final_loss(self) -> float:
        """Mean loss over the last quarter of the steps."""
        return final_loss(self.losses)


def failed_trial(config: RunConfig, error: Exception) -> Trial:
    """Returns the record of a training that could not be built."""
    rules = {str(pattern): name for pattern, name in config.precision.rules.items()}
    return Trial(config.precision.name, rules, [], None, 0, math.nan, 0, 1.0, math.inf, failure_reason(error))


def train(training: FormatTraining, steps: Sequence[MicroBatches], first_gradients: Mapping[str, Tensor]) -> float:
    """Takes all ``steps``; returns the cosine of the first gradient with ``first_gradients``."""
    training.step(steps[0])
    found = training.first_cosine(first_gradients)
    for micro_batches in steps[1:]:
        training.step(micro_batches)
    return found


def interleave(
    trainings: Sequence[FormatTraining], steps: Sequence[MicroBatches]
) -> tuple[dict[str, Tensor], list[float]]:
    """Trains all formats on ``steps``, one step of each in turn, so that a busy machine slows all alike.

    Returns:
        The first gradient of the first training, on the host, and each training's cosine with it.
    """
    first_gradients: dict[str, Tensor] = {}
    cosines: list[float] = []
    for number, micro_batches in enumerate(steps, start=1):
        for training in trainings:
            training.step(micro_batches)
        if number == 1:
            first_gradients = {name: gradient.cpu() for name, gradient in trainings[0].gradients().items()}
            cosines = [training.first_cosine(first_gradients) for training in trainings]
        if number % max(1, len(steps) // 4) == 0:
            logger.info("  step %d of %d: %s", number, len(steps), ", ".join(map(_progress, trainings)))
    return first_gradients, cosines


def _progress(training: FormatTraining) -> str:
    return f"{training.name} {'failed' if training.failure is not None else f'{training.losses[-1]:.4f}'}"
