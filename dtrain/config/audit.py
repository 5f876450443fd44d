"""The record of audits: ``dtrain.Audit(every=100)`` in a script, the keys of ``audit`` on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.config.fields import CheckedRecord, at_least


@dataclass(frozen=True)
class Audit(CheckedRecord):
    """Checks of the bits in memory, and of arithmetic. See docs/trust/audit.md."""

    every: int = at_least(
        100,
        0,
        "Steps from one audit of weights and optimizer states to the next; each save audits too. 0: no audit at all.",
    )
    replay_every: int = at_least(
        0, 0, "Steps from one micro-batch that is computed twice more, and compared bit for bit, to the next; 0: none."
    )

    def is_due(self, step: int) -> bool:
        """Whether the weights after ``step`` attempted steps are audited."""
        return self.every > 0 and step % self.every == 0

    def replays(self, step: int) -> bool:
        """Whether a micro-batch of the step that ends with ``step`` attempted steps is computed twice more."""
        return self.replay_every > 0 and step % self.replay_every == 0
