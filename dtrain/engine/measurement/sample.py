"""Measures what one step of an engine loses to precision: gradients, updates, FP8 operands, activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from dtrain.checkpoint.snapshot import TensorShard
from dtrain.engine.measurement.activations import ActivationMeasurement
from dtrain.engine.measurement.float8 import Float8Measurement
from dtrain.engine.measurement.hooks import hookable_modules, matching_modules
from dtrain.engine.measurement.totals import max_over_ranks, sum_over_ranks
from dtrain.engine.measurement.updates import UpdateMeasurement
from dtrain.engine.outcome import StepOutcome
from dtrain.errors import UsageError
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.parameters.magnitudes import MagnitudeCounts
from dtrain.parameters.model_states import MASTER, ModelStates
from dtrain.precision.contract import Contract
from dtrain.precision.float8.linear import Float8Linear
from dtrain.precision.histogram import Histogram
from dtrain.precision.loss_scale import LossScaleState, fitting_scale
from dtrain.precision.report import GradientShares, ParameterPrecision, PrecisionReport, UpdateShares
from dtrain.precision.rules import format_name


class PrecisionSample:
    """Implements ``dtrain.engine.interface.PrecisionMeasurement`` for one step.

    Args:
        states: of the model.
        activations: patterns of module names.
        backward_names: the names of the trained parameters, as ``monitor`` numbers them.
        monitor: counts the gradients of the step.
        scale: of the loss in the step.
        step: counted from 1.
        finalize: finalizes the last step.

    Attributes:
        outcome: of the step, once it is taken.
    """

    def __init__(
        self,
        states: ModelStates,
        activations: Sequence[str],
        *,
        backward_names: Sequence[str],
        monitor: GradientMonitor,
        scale: LossScaleState,
        step: int,
        finalize: Callable[[], None],
    ) -> None:
        modules = matching_modules(states.module, activations, "engine.measure_precision")
        masters = {shard.name: shard for shard in _masters(states)}
        linears = {
            name: module for name, module in hookable_modules(states.module).items() if isinstance(module, Float8Linear)
        }
        self.outcome: StepOutcome | None = None
        self._states = states
        self._finalize = finalize
        self._names = backward_names
        self._monitor = monitor
        self._scale, self._scale_rule = scale.scale, scale.rule
        self._activations = ActivationMeasurement(modules, states.comm.device)
        self._float8 = Float8Measurement(linears, masters, states.comm.device)
        self._magnitudes: MagnitudeCounts | None = None
        self._update: UpdateMeasurement | None = None
        self._step = step
        self._report: PrecisionReport | None = None
        self._hooks = ExitStack()
        self._is_open = False

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Context of the step."""
        self._is_open = True
        try:
            with self._hooks:
                self._hooks.enter_context(self._activations.hooks())
                self._hooks.enter_context(self._float8.hooks())
                yield
        finally:
            self._is_open = False

    def close_hooks(self) -> None:
        """Ends the counting in forward and backward: a replay, or the explanation of a skip, runs them again."""
        self._hooks.close()

    def begin_update(self) -> None:
        """Takes what backward has recorded, and copies the masters."""
        self.close_hooks()
        states = self._states
        self._magnitudes = self._monitor.magnitudes
        numbers = {name: number for number, name in enumerate(self._names)}
        self._update = UpdateMeasurement(_masters(states), numbers, states.comm.device)

    def end_update(self) -> None:
        """Compares the masters with their copy."""
        assert self._update is not None
        self._update.finish(_masters(self._states))

    def require_single_step(self) -> None:
        """Raises ``UsageError`` if the step has been taken."""
        if self.outcome is not None:
            raise UsageError("a second step inside engine.measure_precision; one context measures one step")

    def report(self) -> PrecisionReport | None:
        """Returns what the step has lost, None if none was taken; all ranks call."""
        if self._is_open:
            raise UsageError("report() inside engine.measure_precision; call it after the context")
        if self._report is None and self.outcome is not None:
            self._finalize()  # [Note: finalize before the next collective]
            self._report = self._summed(self.outcome.applied)
        return self._report

    def _summed(self, applied: bool) -> PrecisionReport:
        states, comm = self._states, self._states.comm
        # none: every micro-batch was a dummy
        own = self._magnitudes or MagnitudeCounts(len(self._names), comm.device)
        counts = sum_over_ranks(comm, own.counts, label="counts of gradients").tolist()
        largest = max_over_ranks(comm, own.largest, label="largest gradients").tolist()
        updates: Sequence[UpdateShares | None] = [None] * len(counts)
        assert self._update is not None
        if applied:
            updates = self._update.totals(comm)
        finite = [value / self._scale for value in largest if value and math.isfinite(value)]
        better = fitting_scale(max(finite), self._scale_rule) if finite else None
        factor = 1.0 if better is None else better / self._scale
        parameters = []
        for number, name in enumerate(self._names):
            histogram, top = Histogram(tuple(counts[number])), largest[number]
            parameters.append(
                ParameterPrecision(
                    name,
                    math.prod(states.shapes[name]),
                    _gradient_format(states.contract, name),
                    top / self._scale if math.isfinite(top) else None,
                    histogram,
                    GradientShares.of(histogram, top, factor),
                    updates[number],
                )
            )
        return PrecisionReport(
            step=self._step,
            applied=applied,
            loss_scale=self._scale,
            better_scale=better,
            parameters=tuple(parameters),
            float8=self._float8.totals(comm),
            activations=self._activations.totals(comm, factor),
        )


def _masters(states: ModelStates) -> Iterator[TensorShard]:
    """Yields this rank's share of the masters; over all ranks each element once, so the other replicas have none."""
    return states.owned_shards(MASTER) if states.mesh.replicate.rank == 0 else iter(())


def _gradient_format(contract: Contract, name: str) -> str:
    """Returns the format in which the module that owns parameter ``name`` computes its gradient."""
    owner = name.rpartition(".")[0]
    format = next((module.format for module in contract.modules if module.name == owner), "fp8")
    return format_name(contract.policy.compute_dtype) if format == "fp8" else format
