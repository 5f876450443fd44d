"""The interface of every engine, and the outcome of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dtrain.checkpoint import Retention
from dtrain.distributed.communicator import Communicator
from dtrain.errors import UsageError
from dtrain.precision.contract import Contract
from dtrain.precision.policy import PrecisionPolicy

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Culprit:
    """The first loss or gradient that made a step fail.

    Attributes:
        rank: the rank whose loss or gradient was not finite; for a reduced gradient, the owner of the shard in which it
            was found, or -1 if every element is finite and only the norm is not.
        step: attempted steps before this one.
        phase: ``forward loss``; ``local gradient``, as it left a rank's backward; or ``reduced gradient``, if every
            rank's own gradient was finite and only their sum is not.
        micro_batch: local index of the micro-batch; None for a reduced gradient.
        tensor: name of the parameter, the first in the order of backward; None for a loss.
        start: its first element that is not finite, in row-major order.
        stop: one past the last of them.
        num_inf: infinite elements of its gradient, summed over ranks; 1 for an infinite loss.
        num_nan: the same for NaN.
        num_bad_losses: micro-batches on all ranks whose loss is not finite (forward loss).
    """

    rank: int
    step: int
    phase: str
    micro_batch: int | None = None
    tensor: str | None = None
    start: int | None = None
    stop: int | None = None
    num_inf: int = 0
    num_nan: int = 0
    num_bad_losses: int = 0

    def __str__(self) -> str:
        where = f"on rank {self.rank}" + (f", micro-batch {self.micro_batch}" if self.micro_batch is not None else "")
        if self.phase == "forward loss":
            kind = "NaN" if self.num_nan else "Inf"
            return f"forward loss is {kind} {where} (losses of this step that are not finite: {self.num_bad_losses})"
        if self.tensor is None:
            return f"{self.phase}: every element is finite, but their norm overflows FP32"
        counts = ", ".join(f"{n} {kind}" for n, kind in ((self.num_inf, "Inf"), (self.num_nan, "NaN")) if n)
        return f"{self.phase} of '{self.tensor}'[{self.start}:{self.stop}] not finite ({counts}) {where}"


@dataclass(frozen=True)
class StepOutcome:
    """Result of a step; the same value on every rank.

    On a GPU a field is copied from the device when it is first read, so a loop that reads none never waits.

    Attributes:
        applied: whether the optimizer updated the masters.
        reason: None if applied, else ``overflow``, ``nonfinite_loss`` or ``empty``.
        loss: weighted mean over all micro-batches of all ranks.
        grad_norm: global L2 norm of the unscaled gradient, before clipping.
        loss_scale: the factor in the gradients of this step.
        lr: learning rate of this step.
        culprit: the cause, if the step was skipped for a non-finite number. The ranks search for it together: on a
            GPU, if one rank reads it before its next forward, every other rank must read it too or take its next step.
        stop_requested: whether any rank asked to stop (:meth:`Engine.request_stop`).
    """

    applied: bool
    reason: str | None
    loss: float
    grad_norm: float
    loss_scale: float
    lr: float
    culprit: Culprit | None
    stop_requested: bool


class LazyOutcome(StepOutcome):
    """An outcome that the host has not read yet.

    Args:
        peek: reads all fields except the culprit; communicates with no rank.
        finalize_step: reads all fields; ranks that skipped the step search for the culprit together.
    """

    def __init__(self, peek: Callable[[], StepOutcome], finalize_step: Callable[[], StepOutcome]) -> None:
        # around the frozen dataclass, whose fields stay unset: each read of one reaches __getattr__
        self.__dict__["_peek"], self.__dict__["_finalize_step"] = peek, finalize_step

    def __getattr__(self, name: str) -> Any:
        if name not in StepOutcome.__dataclass_fields__:
            raise AttributeError(name)
        # all ranks search for a culprit together; every other field is in the vote that this rank has
        read = self.__dict__["_finalize_step" if name == "culprit" else "_peek"]
        return getattr(read(), name)

    def __eq__(self, other: object) -> bool:
        names = StepOutcome.__dataclass_fields__
        return isinstance(other, StepOutcome) and all(getattr(self, name) == getattr(other, name) for name in names)

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name) for name in StepOutcome.__dataclass_fields__))

    def __reduce__(self) -> tuple[Any, ...]:
        outcome = self.__dict__["_finalize_step"]()  # a copy or pickle holds values and not the device
        return StepOutcome, tuple(getattr(outcome, name) for name in StepOutcome.__dataclass_fields__)


class Engine(ABC):
    """One training step on all ranks: forward, backward, reduction, vote, update.

    Attributes:
        module: the user's model; its parameters are the compute replicas.
        comm: the ranks that train together.
        policy: the precision policy in force.
        contract: that policy resolved on the model.
        attempted_steps: steps taken, skipped ones included.
        data_cursor: samples consumed so far; advanced by the caller, saved, and compared in each vote.
        library_config: configuration of the library below, as plain values; None if it takes none.
    """

    name: str
    module: nn.Module
    comm: Communicator
    policy: PrecisionPolicy
    contract: Contract
    num_parameters: int
    attempted_steps: int = 0
    data_cursor: int = 0
    library_config: Mapping[str, Any] | None = None

    def __init__(self) -> None:
        self._micro_batch = 0
        self._is_last = True  # without accumulate a step has one micro-batch
        self._batch: object | None = None  # a token of the current batch
        self._evaluating = False
        self._stop_requested = False

    @property
    def is_synchronous(self) -> bool:
        """Whether reading an outcome costs nothing; else it waits for the device."""
        return True

    @property
    @abstractmethod
    def applied_steps(self) -> int:
        """Number of updates of the masters.

        On a GPU this waits for the last step's decision, and ranks that skipped the step search for the culprit
        together.
        """

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

    def accumulate(self, batch: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the micro-batches of ``batch``, numbers them, and marks the last one.

        Every rank gives the same number of micro-batches; a rank with fewer adds finite dummies with ``weight=0``.

        Raises:
            UsageError: called again before ``step``, unless the last loop ended before any backward.
        """
        if self._batch is not None:
            # two batches in one step would give two micro-batches one number, and with it one RNG key
            raise UsageError(
                "engine.accumulate was called again before engine.step; one batch makes one step. If an exception "
                "ended the loop over the last batch, that step is incomplete on this rank: call engine.step() only if "
                "every rank stopped at the same micro-batch, else build a new engine and load a checkpoint"
            )
        items = iter(batch)  # one item is read ahead: the last micro-batch is known before its backward, which reduces
        try:
            current = next(items)
        except StopIteration:
            raise UsageError(
                "engine.accumulate got an empty batch; every rank gives at least one micro-batch"
            ) from None
        self._batch = current_batch = object()
        self._micro_batch, self._is_last = 0, False
        try:
            for following in items:
                yield current
                self._micro_batch += 1
                current = following
            self._is_last = True
            yield current
        finally:
            # an abandoned generator is closed late: a newer batch may have begun
            if self._batch is current_batch and not self._has_backward():
                self._end_batch()

    def _end_batch(self) -> None:
        """Resets the numbering for the next batch."""
        self._micro_batch, self._is_last, self._batch = 0, True, None

    @abstractmethod
    def _has_backward(self) -> bool:
        """Whether the current step has had a backward."""

    @contextmanager
    def eval(self) -> Iterator[None]:
        """Forwards inside consume no micro-batch number and build no graph; the module is in eval mode."""
        # of each module: a user may keep some in eval mode while the others train
        modes = [(module, module.training) for module in self.module.modules()]
        outer = self._evaluating
        self.module.eval()
        self._evaluating = True
        try:
            with torch.no_grad():
                yield
        finally:
            self._evaluating = outer
            for module, mode in modes:
                module.training = mode

    def request_stop(self) -> None:
        """Requests, through the next vote, that all ranks stop after that step; the request holds for one step."""
        self._stop_requested = True  # a rank that stopped alone would leave the others waiting in a collective

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's own forward under the precision policy; returns what the model returns."""

    @abstractmethod
    def backward(self, loss: Any, *, weight: float | Tensor = 1.0) -> None:
        """Runs the backward of the mean ``loss`` of one micro-batch, times the loss scale.

        Args:
            loss: a 0-dim FP32 tensor, or a model output with a ``loss`` entry or attribute.
            weight: of this loss in the global mean; a number or a 0-dim device tensor, for instance the micro-batch's
                token count.

        Raises:
            ContractError: the loss is not FP32.
            UsageError: a second backward on one micro-batch, or a weight that is negative or not finite.
        """

    @abstractmethod
    def step(self, *, lr: float | None = None) -> StepOutcome:
        """Reduces, votes, and updates on all ranks or on none.

        Args:
            lr: overrides the schedule for this step; the same on all ranks.

        Raises:
            DivergenceError: the ranks no longer do the same thing; nothing was updated.
            NonFiniteError: too many consecutive steps were skipped.
            UsageError: without a backward before it.
        """

    @abstractmethod
    def save(
        self,
        directory: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float | None] | None = None,
        retention: Retention | None = None,
        asynchronous: bool = False,
        when_busy: str = "wait",
    ) -> Path | None:
        """Writes a checkpoint under ``directory``; all ranks call. Returns its path.

        An asynchronous save returns once this rank's part is copied to host memory, which is reused by the next one; a
        thread of each rank writes it. One save is under way at a time. If it fails, every rank raises the same
        ``CheckpointError``, once: from the :meth:`step` after the one whose vote reports it, from the next
        :meth:`save` or :meth:`load`, or from :meth:`wait_for_save`. Training can continue: the step that raises it has
        done nothing and can be called again. A process that ends without :meth:`wait_for_save` waits for the thread,
        which logs a failure; the exit code does not show it.

        Args:
            directory: usually ``run/checkpoints``.
            extra: the caller's own JSON.
            config: the run's configuration, stored redacted.
            metrics: losses to list; those that are None or not finite are left out. ``keep_best`` compares
                ``val_loss``.
            retention: which checkpoints are kept; None: ``Retention()``, the newest two.
            asynchronous: see above.
            when_busy: if the save before it is still under way, ``wait`` for it, or ``skip`` this one.

        Returns:
            The path, where an asynchronous save is not visible yet; None if it is skipped.

        Raises:
            CheckpointError: any rank failed; no checkpoint became visible.
        """

    @abstractmethod
    def prepare_saves(self) -> None:
        """Connects the threads that save, so that the first asynchronous save need not; all ranks call.

        Raises:
            CommunicationError: a rank has died or hangs.
        """

    @abstractmethod
    def is_saving(self) -> bool:
        """Whether an asynchronous save is under way on any rank; all ranks call."""

    @abstractmethod
    def wait_for_save(self) -> Path | None:
        """Returns the path of the last asynchronous save once it is committed, None before any; all ranks call.

        Raises:
            CheckpointError: it failed on any rank.
        """

    @abstractmethod
    def leave_save(self, *, cancel: bool = False) -> None:
        """Returns when an asynchronous save under way has ended on this rank, however it does; asks no other rank.

        For a rank that stops training by an exception and is about to leave the process group.

        Args:
            cancel: stop writing at once: a rank has gone, so that it cannot be committed.
        """

    @abstractmethod
    def load(self, path: str | Path) -> dict[str, Any]:
        """Restores the newest checkpoint under ``path`` that verifies, or the one at ``path``; returns its ``extra``.

        Raises:
            CheckpointError: none verifies, or it is of another model.
        """

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes on this rank by kind: master, moments, compute, main_grad, buffers, unsharded, and unreduced_grad.

        ``unsharded`` are the full replicas that stage 3 holds now, none between steps. ``unreduced_grad`` are
        micro-batch gradients before their reduction. Neither is model state, so neither is in the formula.
        """

    @abstractmethod
    def memory_formula(self) -> dict[str, int]:
        """Bytes on this rank by the ZeRO formula: master, moments, compute, main_grad."""

    @abstractmethod
    def master_state(self) -> dict[str, Tensor]:
        """Returns {name: FP32 full tensor on CPU} on rank 0, {} elsewhere; gathered one by one; all ranks call."""
