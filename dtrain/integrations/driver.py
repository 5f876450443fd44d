"""Runs the steps of an engine in the order in which accelerate's loops call: forward, backward, clip, step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate.state import GradientState
from torch import Tensor

from dtrain.engine.interface import Engine
from dtrain.engine.outcome import StepOutcome
from dtrain.engine.release import Installation, release
from dtrain.errors import UsageError
from dtrain.integrations.optimizers import GroupRates

NO_LOCAL_STEPS = (
    "each rank would take a step of its own, and all ranks of an engine take every step together, because masters are "
    "sharded over them; leave no_sync before optimizer.step(), or train without LocalSGD (enabled=False)"
)
"""Why steps without synchronized gradients are refused."""


class EngineDriver:
    """Drives one engine by the calls of a loop that was written for accelerate.

    [Note: accelerate adds, dtrain averages] accelerate divides each loss by ``gradient_accumulation_steps``, adds the
    gradients of all backwards before a step, and averages over the ranks. dtrain averages over all micro-batches of
    all ranks. The two differ by the number of backwards / ``gradient_accumulation_steps``, which is known at the step
    only: ``engine.step`` takes it as a factor of the gradient, so a step with fewer or more backwards, such as the
    last one of an epoch, is the same in both.

    [Note: the last micro-batch] An engine reduces during the backward of a micro-batch that is marked as the last, else
    in ``step``. A loop for accelerate never says that a backward is the last, so it is inferred: gradients are to be
    synchronized, and there were two rounds or more, each with one backward. A round ends at a step, where
    ``accumulate`` begins, and at both ends of ``no_sync``. So the first steps reduce late, and so do loops with two
    backwards a round. Two rounds, because a loop that steps ``if index % k == 0`` has one backward in the first, and k
    in the others.

    Args:
        engine: the engine.
        optimizer: the user's, whose learning rates the steps take.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        self._engine: Engine | None = engine
        self._optimizer = optimizer
        self._rates = GroupRates(optimizer)
        self._gradient_state = GradientState()
        self._block: AbstractContextManager[None] | None = None  # the micro-batch that is open
        self._is_last = False  # whether it, or the last one closed, is marked as the last
        self._num_unsynced = 0  # ``no_sync`` blocks around the loop now
        self._round = self._longest_round = 0  # backwards
        self._num_rounds = 0  # that had backwards
        self._num_backwards = 0  # of the step under way
        self._is_weighted = False  # whether these had weights
        self._max_grad_norm: float | None = None
        self._norms: list[Tensor] = []

    @property
    def engine(self) -> Engine:
        """The engine; raises ``UsageError`` once another one has the model."""
        if self._engine is None:
            raise UsageError(
                "this model was prepared again, by another Trainer or accelerator.prepare, which has ended this "
                "engine; use the newer one, which has continued with these weights"
            )
        return self._engine

    def leave(self, installation: Installation) -> None:
        """Ends the engine, and makes its model plain again with the whole weights; all ranks call."""
        if self.has_backward:
            raise UsageError(
                "this model is prepared again between accelerator.backward and optimizer.step() of its first engine; "
                "take the step before"
            )
        self.close()
        release(self.engine, installation)
        self._engine = None

    @property
    def has_backward(self) -> bool:
        """Whether the step under way has had a backward."""
        return self._num_backwards > 0

    # -- micro-batches -----------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's forward: of a micro-batch if gradients are on, else of an evaluation or a sample."""
        if torch.is_grad_enabled():
            self._open()
        elif not self.engine.module.training:
            with self.engine.eval():
                return self.engine(*args, **kwargs)
        return self.engine(*args, **kwargs)

    def backward(self, loss: Any, weight: float | Tensor | None) -> None:
        """Runs the backward of ``loss``; with weights the step averages by them instead of adding."""
        if self.has_backward and self._is_weighted != (weight is not None):
            raise UsageError(
                "accelerator.backward with a weight and without one in the same step; give all of them a weight, or "
                "none"
            )
        self._open()
        if self._block is None:
            raise UsageError(
                f"a second accelerator.backward before optimizer.step(), in a loop that had one in each of its "
                f"{self._num_rounds} steps so far, so that the gradients of the first are reduced already; put all "
                f"backwards of a step but the last into 'with accelerator.no_sync(model):', or add their losses"
            )
        self.engine.backward(loss, weight=1.0 if weight is None else weight)
        self._is_weighted = weight is not None
        self._num_backwards += 1
        self._round += 1
        self.close()

    def end_round(self) -> None:
        """Ends a round; see [Note: the last micro-batch]."""
        self._longest_round = max(self._longest_round, self._round)
        self._num_rounds += self._round > 0
        self._round = 0

    @contextmanager
    def unsynchronized(self) -> Iterator[None]:
        """Context of micro-batches that are not the last of their step."""
        self.end_round()
        self._num_unsynced += 1
        try:
            yield
        finally:
            self._num_unsynced -= 1
            self.end_round()

    def _expects_last(self) -> bool:
        is_synchronized = self._gradient_state.sync_gradients and not self._num_unsynced
        return is_synchronized and self._num_rounds > 1 and self._longest_round == 1 and not self._round

    def _open(self) -> None:
        expects_last = self._expects_last()
        if self._block is not None:
            if expects_last or not self._is_last:
                return
            self.close()  # a forward without a backward opened it, before gradients had to wait
        if self._is_last and self.has_backward:
            return  # its last one is over; a forward now is for another engine's backward
        self._is_last = expects_last
        self._block = self.engine.micro_batch(last=expects_last)
        self._block.__enter__()

    def close(self) -> None:
        """Ends the micro-batch that is open, if any; its forward may have had no backward."""
        if self._block is not None:
            block, self._block = self._block, None
            block.__exit__(None, None, None)

    # -- the step ----------------------------------------------------------------------------------------------------

    def clip(self, max_norm: float) -> Tensor:
        """Lets the next step clip its gradient; returns its norm, 0-dim FP32, NaN until the step has run."""
        own = self._max_grad_norm
        self._max_grad_norm = max_norm if own is None else min(own, max_norm)
        norm = torch.full((), torch.nan, device=self.engine.device)
        self._norms.append(norm)
        return norm

    def step(self) -> StepOutcome:
        """Takes the step: see [Note: accelerate adds, dtrain averages].

        Raises:
            UsageError: no backward came before it, hyper-parameters changed that the update cannot follow, or the ranks
                would take steps of their own.
        """
        if not self.has_backward:
            raise UsageError("optimizer.step() without accelerator.backward(loss) before it")
        if self._num_unsynced and self.engine.world_size > 1:
            raise UsageError(f"optimizer.step() inside no_sync on {self.engine.world_size} ranks: {NO_LOCAL_STEPS}")
        factor = 1.0 if self._is_weighted else self._num_backwards / self._gradient_state.num_steps
        outcome = self.engine.step(lr=self._rates.current(), max_grad_norm=self._max_grad_norm, grad_factor=factor)
        self.close()
        self.end_round()
        for norm in self._norms:
            norm.fill_(outcome.grad_norm)  # on a GPU the host waits for it here, as schedulers do for ``applied``
        self._norms.clear()
        self._num_backwards, self._is_last, self._max_grad_norm = 0, False, None
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch's schedulers warn
        return outcome
