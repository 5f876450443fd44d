"""Declares what a training loop calls in each step; see ``dtrain.engine.interface.Engine`` for the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dtrain.distributed.communicator import Communicator
from dtrain.engine.micro_batch import MicroBatches
from dtrain.engine.outcome import StepOutcome
from dtrain.engine.parts.stragglers import BusyMeter
from dtrain.engine.run_state import RunState
from dtrain.engine.vote.finalize import StepFinalizer
from dtrain.errors import ConfigError
from dtrain.precision.contract import Contract
from dtrain.precision.loss_scale import LossScaleState
from dtrain.precision.policy import PrecisionPolicy

Batch = TypeVar("Batch")


class TrainingLoop(ABC):
    """Runs a training step on all ranks; ``dtrain.engine.interface.Engine`` documents the attributes."""

    name: str
    module: nn.Module
    comm: Communicator
    policy: PrecisionPolicy
    contract: Contract
    num_parameters: int
    ema_decay: float | None
    busy: BusyMeter
    library_config: Mapping[str, Any] | None = None
    explain_skips: bool = False

    _batch: MicroBatches
    _run: RunState
    _finalizer: StepFinalizer

    @property
    def rank(self) -> int:
        """Index of this rank."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.comm.world_size

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.comm.device

    @property
    def run_id(self) -> str:
        """Name of the run, kept by its checkpoints."""
        return self._run.run_id

    @property
    def seed(self) -> int:
        """Key of the random numbers of forwards; a load replaces it by the saved one."""
        return self._run.seed

    @property
    def is_synchronous(self) -> bool:
        """Whether reading an outcome costs nothing; else it waits for the device."""
        return self._finalizer.is_synchronous

    @property
    def attempted_steps(self) -> int:
        """Number of steps taken, skipped ones included."""
        return self._run.attempted_steps

    @attempted_steps.setter
    def attempted_steps(self, steps: int) -> None:
        self._run.attempted_steps = steps

    @property
    def applied_steps(self) -> int:
        """Number of updates of the masters.

        On a GPU this waits for the last step's decision. If that step was skipped, all ranks search for the culprit
        together: while one rank reads this, the others must read it too or train on.
        """
        self._finalizer.finalize_step()
        return self._run.applied_steps

    @property
    def loss_scale(self) -> LossScaleState:
        """The loss scale after the last step; on a GPU reading it waits like reading ``applied_steps``."""
        self._finalizer.finalize_step()
        return self._finalizer.scale

    @property
    def data_cursor(self) -> int:
        """Samples consumed so far; advanced by the caller, saved, and compared in each vote."""
        return self._run.data_cursor

    @data_cursor.setter
    def data_cursor(self, samples: int) -> None:
        self._run.data_cursor = samples

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Holds the forward and the backward of the next micro-batch of this step.

        Every rank runs the same number of micro-batches; a rank with fewer adds finite dummies with ``weight=0``. If
        none was marked as the last, ``step`` reduces. An exception ends the batch: if no backward came before it,
        the next micro-batch is the first again.

        Args:
            last: whether it is this rank's last one before ``step``; its backward starts the reductions that need
                all micro-batches.

        Raises:
            UsageError: inside another micro-batch, after the last one, or after a backward outside of any.

        Examples:
            >>> engine = dtrain.initialize(torch.nn.Linear(2, 1), precision="fp32")
            >>> for index in range(3):
            ...     with engine.micro_batch(last=index == 2):
            ...         engine.backward(engine(torch.ones(4, 2)).mean())
            >>> engine.step().weight
            3.0
        """
        return self._batch.micro_batch(last=last)

    def accumulate(self, batch: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the micro-batches of ``batch``, each inside ``micro_batch``.

        Args:
            batch: this rank's micro-batches, of any type. Every rank gives as many; a rank with fewer adds finite
                dummies with ``weight=0``.

        Raises:
            UsageError: ``batch`` is empty or no iterable; called again before ``step``, unless the last loop ended
                before any backward; or ``step`` was called inside the loop.

        Examples:
            >>> engine = dtrain.initialize(torch.nn.Linear(2, 1), precision="fp32")
            >>> for x in engine.accumulate([torch.ones(3, 2), torch.ones(5, 2)]):
            ...     engine.backward(engine(x).mean(), weight=len(x))  # a mean over samples, not micro-batches
            >>> engine.step().weight
            8.0
        """
        return self._batch.accumulate(batch)

    def request_stop(self) -> None:
        """Requests, through the next vote, that all ranks stop after that step; the request holds for one step."""
        self._batch.stop_requested = True  # a rank that stopped alone would leave the others waiting in a collective

    def expect_save(self) -> None:
        """Declares that the weights after the next ``step`` will be saved; for one step, the same on all ranks.

        The update leaves fingerprints of what it wrote, which the save compares with what reaches the file. Without it
        a save still audits all but the masters and optimizer states that only one rank holds. In ranks that differ in
        it ``step`` raises a ``DivergenceError``.
        """
        self._batch.save_expected = True

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's own forward under the precision policy; returns its output, in FP32 unless it has a loss."""

    @abstractmethod
    def backward(self, loss: Any, *, weight: float | Tensor = 1.0, **options: Any) -> None:
        """Runs the backward of the mean ``loss`` of one micro-batch, times the loss scale.

        Args:
            loss: a 0-dim FP32 tensor, or a model output with a ``loss`` entry or attribute.
            weight: of this loss in the global mean; a number or a 0-dim device tensor, for instance the micro-batch's
                token count.
            **options: those of ``Tensor.backward`` are refused, unless they are off.

        Raises:
            ContractError: the loss is not FP32.
            UsageError: a second backward on one micro-batch or of one graph; a gradient that was changed after the last
                backward; an option; or a weight that is negative or not finite.
        """

    @abstractmethod
    def step(
        self, *, lr: float | None = None, max_grad_norm: float | None = None, grad_factor: float = 1.0
    ) -> StepOutcome:
        """Reduces, votes, and updates on all ranks or on none.

        All arguments must be the same on all ranks. On a GPU the host does not wait for the decision; what is wrong
        with this step is then raised by the next call of the engine, or when the outcome is read.

        Args:
            lr: overrides the schedule for this step, except of groups with a schedule of their own.
            max_grad_norm: overrides the clipping threshold of ``dtrain.initialize`` for this step; ``math.inf``
                clips nothing, None keeps that threshold.
            grad_factor: factor of this step's gradient, before its norm is taken. For loops that add the gradients of
                their micro-batches instead of averaging them: the number of micro-batches.

        Raises:
            CheckpointError: an asynchronous save has failed; call it again.
            CorruptionError: the audit found wrong bits; nothing was updated. Load a checkpoint.
            DivergenceError: the ranks no longer do the same thing; nothing was updated.
            NonFiniteError: ``max_consecutive_skips`` consecutive steps were skipped.
            UsageError: without a backward before it.

        Examples:
            >>> engine = dtrain.initialize(torch.nn.Linear(2, 1, bias=False), precision="fp32")
            >>> engine.backward(engine(torch.tensor([[3.0, 4.0]])).sum())
            >>> outcome = engine.step(lr=0.01)
            >>> outcome.applied, outcome.grad_norm, outcome.lr
            (True, 5.0, 0.01)
        """

    def graphed_step(self, forward: Callable[[Any], Any]) -> Callable[..., StepOutcome]:
        """Returns a function that trains a whole step, from CUDA graphs once it has run a few.

        It is called with this rank's micro-batches, trees of tensors, their ``weights`` (1 each, unless given) and the
        arguments of ``step``. Steps whose tensors have other shapes have graphs of their own; four at most.

        Args:
            forward: returns the loss of a micro-batch, or an output that has it. It is captured: it runs no more once
                there are graphs, so it may depend on nothing but the micro-batch.

        Raises:
            ConfigError: the engine was not set up with ``graph=True``, or no graph can hold its steps.

        Examples:
            >>> def train_step(engine):
            ...     return engine.graphed_step(lambda micro: engine(micro).square().mean())
        """
        raise ConfigError(f"engine.graph=true: engine={self.name} captures no steps; use engine=native")
