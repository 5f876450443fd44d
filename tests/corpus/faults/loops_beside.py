"""An engine and the FP32 oracle side by side, and what the rows about training loops feed both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.corpus.training import SETTINGS, TOLERANCES, MicroBatch, compare_masters, loss_of_model, start, step_of
from tests.engines.matrix import Trial
from tests.helpers.oracle import Oracle

Step = Sequence[tuple[MicroBatch, float]]


class Beside:
    """Trains ``model`` with the engine of the trial, and ``alike`` (the same model by default) with the oracle."""

    def __init__(
        self,
        trial: Trial,
        model: nn.Module,
        *,
        alike: nn.Module | None = None,
        factor: Callable[[int], float] = lambda applied_steps: 1.0,
        max_grad_norm: float | None = None,
        **options: Any,
    ) -> None:
        settings = {"optimizer": SETTINGS, "schedule": factor, "max_grad_norm": max_grad_norm, "loss": loss_of_model}
        self.oracle = Oracle(model if alike is None else alike, **settings)
        self.engine = start(trial, model, max_grad_norm=max_grad_norm, **options)
        self._precision = trial.case.precision

    def step(self, micro_batches: Step, whole: Step | None = None) -> Any:
        """One step of both; asserts that they agree, and returns the engine's outcome.

        Args:
            micro_batches: of all ranks.
            whole: what the oracle takes instead, such as the same samples in one batch.
        """
        tolerance, before = TOLERANCES[self._precision], self.oracle.masters()
        want = self.oracle.step(micro_batches if whole is None else whole)
        outcome = step_of(self.engine, micro_batches)
        assert outcome.applied == want.applied, outcome
        if want.applied:
            assert math.isclose(outcome.loss, want.loss, rel_tol=tolerance), (outcome.loss, want.loss)
            assert math.isclose(outcome.grad_norm, want.grad_norm, rel_tol=tolerance), (outcome, want.grad_norm)
        if masters := self.engine.master_state():  # rank 0's; the others have none
            compare_masters(masters, self.oracle.masters(), before, tolerance, self._precision)
        return outcome


class Tagger(nn.Module):
    """The mean loss of the targets of a micro-batch, each a position with a class of three."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.hidden(x)))
        return nn.functional.cross_entropy(logits.float(), targets)


def positions(counts: Sequence[int], seed: int = 1, scale: float = 1.0) -> list[tuple[dict[str, Tensor], float]]:
    """A micro-batch of each number of targets, with that number as its weight."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for count in counts:
        x = torch.randn(count, 5, generator=draw) * scale
        made.append(({"x": x, "targets": torch.randint(3, (count,), generator=draw)}, float(count)))
    return made


def joined(micro_batches: Step) -> Step:
    """One batch of all targets."""
    parts = [micro_batch for micro_batch, _ in micro_batches]
    return [({name: torch.cat([part[name] for part in parts]) for name in ("x", "targets")}, 1.0)]
