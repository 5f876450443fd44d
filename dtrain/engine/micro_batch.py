"""The micro-batch that an engine is at, which one may follow it, and how a loop marks them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

import torch
from torch import nn

from dtrain.engine.arguments import iterated
from dtrain.engine.vote.losses import LossAccumulator
from dtrain.errors import UsageError

Batch = TypeVar("Batch")

_END = object()  # of a batch


@dataclass(eq=False)
class MicroBatch:
    """A micro-batch of the step under way.

    Attributes:
        number: its index on this rank, from 0 in each step.
        is_last: whether it is this rank's last one in the step, whose backward reduces.
        state: ``unmarked``, if the caller marks no micro-batches, so that a step has one; ``open`` inside
            ``engine.micro_batch``; ``closed`` after it; ``over`` if none can follow it in this step.
        num_forwards: forwards of it in training mode so far.
        num_stale: those of them before the last write or load of weights.
    """

    number: int = 0
    is_last: bool = True
    state: Literal["unmarked", "open", "closed", "over"] = "unmarked"
    num_forwards: int = 0
    num_stale: int = 0

    def following(self, *, is_last: bool, has_backward: bool) -> MicroBatch:
        """Returns the micro-batch after this one, open.

        Args:
            is_last: whether it is the last one.
            has_backward: whether the step has had a backward.

        Raises:
            UsageError: none can follow.
        """
        if self.state == "closed":
            return MicroBatch(self.number + 1, is_last, "open")
        if self.state == "open":
            raise UsageError(
                f"engine.micro_batch inside micro-batch {self.number}, which has not ended; leave its 'with' block, or "
                f"the loop over engine.accumulate, before the next"
            )
        if self.state == "over":
            raise UsageError(
                f"engine.micro_batch after micro-batch {self.number}, which was the last of this step or ended with an "
                f"exception; call engine.step() first. {INCOMPLETE}"
            )
        if has_backward:
            raise UsageError(
                "a micro-batch begins after an engine.backward outside of any, which is a whole step's; call "
                "engine.step() first, or put every backward of the step into 'with engine.micro_batch(last=...):'"
            )
        # forwards before the first micro-batch have drawn its random numbers
        return MicroBatch(0, is_last, "open", self.num_forwards)

    def require_open(self) -> None:
        """Raises ``UsageError`` if a backward now would belong to no micro-batch, or to weights that are gone."""
        if self.num_forwards and self.num_forwards == self.num_stale:
            raise UsageError(
                "engine.backward of a forward before engine.modify_weights or engine.load, whose weights are gone; run "
                "the forward again"
            )
        if self.state in ("closed", "over"):
            raise UsageError(
                f"engine.backward outside a micro-batch, after micro-batch {self.number}; put every backward of a step "
                f"into 'with engine.micro_batch(last=...):' or 'for micro in engine.accumulate(batch):', or none"
            )


INCOMPLETE = (
    "If an exception ended the loop over the last batch, that step is incomplete on this rank: call engine.step() only "
    "if every rank stopped at the same micro-batch, else build a new engine and load a checkpoint"
)
"""End of an error message about a step that cannot continue."""


class MicroBatches:
    """The micro-batches of the step under way, as the caller marks them.

    Args:
        losses: of this rank's micro-batches, one for each backward.

    Attributes:
        current: the micro-batch under way.
        is_evaluating: inside ``evaluation``.
        backward_failed: a backward has begun and not ended.
        stop_requested, save_expected: by the caller, for this step.
        has_old_gradients: whether the gradients of the last step are there still.
    """

    def __init__(self, losses: LossAccumulator) -> None:
        self.current = MicroBatch()
        self.is_evaluating = False
        self.has_old_gradients = False
        self.backward_failed = False
        self.stop_requested = self.save_expected = False
        self._losses = losses

    @property
    def number(self) -> int:
        """Index of the micro-batch under way."""
        return self.current.number

    @property
    def has_backward(self) -> bool:
        """Whether the step has had a backward."""
        return bool(self._losses)

    def end_step(self) -> None:
        """Forgets what belonged to the step under way, voted on or not, but its gradients, which are cleared later."""
        self.has_old_gradients = True
        self._losses.clear()
        self.stop_requested = self.save_expected = False
        self._end_batch()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Holds a micro-batch; see ``dtrain.engine.interface.Engine.micro_batch``."""
        if not isinstance(last, bool):
            raise UsageError(f"engine.micro_batch(last={last!r}): expected True or False")
        self.current = current = self.current.following(is_last=last, has_backward=self.has_backward)
        ended = False
        try:
            yield
            ended = True
        finally:
            self._close(current, is_over=last or not ended)

    def accumulate(self, batch: Iterable[Batch]) -> Iterator[Batch]:
        """Yields micro-batches; see ``dtrain.engine.interface.Engine.accumulate``."""
        return self._accumulate(iterated(batch))

    def _accumulate(self, items: Iterator[Batch]) -> Iterator[Batch]:
        before = self.current.state
        if before == "open" or (before != "unmarked" and self.has_backward):
            # two batches in one step would give two micro-batches one number, and with it one RNG key
            raise UsageError(
                f"engine.accumulate was called again before engine.step, or after engine.micro_batch; one batch makes "
                f"one step. {INCOMPLETE}"
            )
        # one item is read ahead: the last micro-batch is known before its backward, which reduces
        following: Batch | object = next(items, _END)
        if following is _END:
            raise UsageError("engine.accumulate got an empty batch; every rank gives at least one micro-batch")
        if before != "unmarked":
            self._end_batch()  # micro-batches without any backward: as if they had not been
        current: MicroBatch | None = None
        try:
            while following is not _END:
                if current is not None and self.current is not current:
                    raise UsageError(
                        "engine.step was called inside a loop over engine.accumulate that has more micro-batches; one "
                        "batch makes one step, so call it after the loop"
                    )
                micro, following = cast(Batch, following), next(items, _END)
                with self.micro_batch(last=following is _END):
                    current = self.current
                    yield micro
        finally:
            if current is not None:
                self._close(current, is_over=True)

    def _close(self, current: MicroBatch, *, is_over: bool) -> None:
        """Ends ``current``, and the batch too if it is over and nothing of it counts."""
        current.state = "over" if is_over else "closed"
        # an abandoned generator is closed late: a newer batch may have begun
        if is_over and self.current is current and not self.has_backward:
            self._end_batch()

    def _end_batch(self) -> None:
        """Resets the numbering for the next batch."""
        self.current = MicroBatch()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of a backward; after an error in it this rank has issued fewer reductions than the others."""
        self.backward_failed = True
        try:
            yield
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise UsageError(
                f"the loss of micro-batch {self.number} is of a graph that another engine.backward has freed; run the "
                f"forward again in each micro-batch, or add the losses of one forward and call engine.backward once"
            ) from error
        self.backward_failed = False

    @contextmanager
    def evaluation(self, model: nn.Module) -> Iterator[None]:
        """Context of forwards that consume no micro-batch number and build no graph; ``model`` is in eval mode."""
        # of each module: a user may keep some in eval mode while the others train
        modes = [(module, module.training) for module in model.modules()]
        outer = self.is_evaluating
        model.eval()
        self.is_evaluating = True
        try:
            with torch.no_grad():
                yield
        finally:
            self.is_evaluating = outer
            for module, mode in modes:
                module.training = mode
