"""Declares the methods that each adapter defines and the step calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dtrain.distributed.progress import Phase
from dtrain.engine.interface import Engine
from dtrain.engine.parts.part import StepWork
from dtrain.engine.parts.stragglers import PHASES
from dtrain.engine.parts.taken_gradients import TakenGradients
from dtrain.engine.request import StepOptions
from dtrain.optim.rule import UpdateScalars
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.parameters.micro_batch_weight import Weight


class EngineHooks(Engine):
    """The methods of an engine that differ from library to library.

    Attributes:
        forward_communicates: whether a forward issues collectives, so that all ranks run it together.
        searches_backward: whether a backward can be repeated without its gradients reaching a main grad.
        keeps_gradients: whether the library keeps gradients in ``.grad`` between a backward and the step.
        options: settings of a step.
        monitor: records every gradient as it leaves this rank's backward.
        work: runs a step on the device.
    """

    options: StepOptions
    monitor: GradientMonitor
    work: StepWork

    forward_communicates = False
    searches_backward = False
    keeps_gradients = False
    _taken: TakenGradients

    @property
    def timed_phases(self) -> Sequence[Phase]:
        """The phases of a step in which this engine sees each of its waits for other ranks."""
        return PHASES

    @property
    def dummies_need_graph(self) -> bool:
        """Whether each rank must run the backward of every micro-batch, because it communicates there."""
        return self.forward_communicates

    @abstractmethod
    def _call_model(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the model's own forward; called under autocast, with keyed random numbers."""

    @abstractmethod
    def _backward(self, loss: Tensor, weight: Weight) -> None:
        """Runs the backward of ``loss`` times the loss scale; gradients enter the main grads times ``weight``.

        Records each gradient in ``monitor`` as it leaves this rank's backward. A dummy's loss may have no graph.
        """

    def _discard_forward(self) -> None:
        """Releases what the engine holds of a forward that gets no backward."""

    def finish_gradients(self) -> None:
        """Waits for all reductions of this step: main grads are complete, still scaled and weighted; idempotent."""
        if self.keeps_gradients:
            self._taken.give_back()
        self._finish_gradients()

    @abstractmethod
    def _finish_gradients(self) -> None:
        """Implements ``finish_gradients``."""

    def _squares(self) -> Tensor:
        """Returns FP64 [n], n >= 1, whose sum is that of the squares of this rank's own main grads."""
        return self.states.squares()

    def _canonical_sums(self, squares: Tensor) -> dict[str, Tensor]:
        """Returns the ``sum_squares`` and ``sum_weights`` of ``decide`` formed in canonical order, if any are."""
        return {}

    @abstractmethod
    def _update(self, scalars: UpdateScalars) -> None:
        """Runs one update of masters and optimizer states from the main grads, then refreshes the compute weights.

        If ``scalars.found_inf`` is not 0, masters, states and compute weights keep their bits.
        """

    @abstractmethod
    def _clear_gradients(self) -> None:
        """Clears all gradients after a step, applied or skipped."""

    @abstractmethod
    def _watch_reductions(self) -> None:
        """Checks the dtypes of the next step's reductions."""
