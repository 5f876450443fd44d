"""The micro-batch that an engine is at, and which one may follow it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtrain.errors import UsageError


@dataclass(eq=False)
class MicroBatch:
    """A micro-batch of the step under way.

    Attributes:
        number: its index on this rank, from 0 in each step.
        is_last: whether it is this rank's last one in the step, whose backward reduces.
        state: ``unmarked``, if the caller marks no micro-batches, so that a step has one; ``open`` inside
            ``engine.micro_batch``; ``closed`` after it; ``over`` if none can follow it in this step.
        num_forwards: forwards of it in training mode so far.
    """

    number: int = 0
    is_last: bool = True
    state: Literal["unmarked", "open", "closed", "over"] = "unmarked"
    num_forwards: int = 0

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
        """Raises ``UsageError`` if a backward now would belong to no micro-batch."""
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
