"""Defines the parts that watch or guard a step. The engine calls them at fixed places; each can be left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from dtrain.engine.outcome import StepOutcome
from dtrain.engine.vote.decide import Decision, DecodedDecision


@dataclass(frozen=True)
class Forward:
    """A call of the engine.

    Attributes:
        step: attempted steps before it.
        micro_batch: its number in the step.
        key: of its random numbers, None for none.
        args, kwargs: of the model.
        is_first: whether it is the first of its micro-batch; those before it were given up.
        begins_step: whether the step begins with it.
        is_evaluating: whether it is inside ``engine.eval``.
        is_training: whether a backward may follow.
        belongs_to_step: whether it is of the step under way: it trains, or is inside ``engine.micro_batch``.
        is_explained: whether a skip of the step will be explained, which runs it again.
    """

    step: int
    micro_batch: int
    key: int | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_first: bool
    begins_step: bool
    is_evaluating: bool
    is_training: bool
    belongs_to_step: bool
    is_explained: bool


@dataclass
class StepUnderWay:
    """A call of ``engine.step``, from its arguments to its outcome.

    Attributes:
        number: attempted steps before it.
        update: number of its update, from 1, if it is applied.
        lr: learning rate.
        rule_lrs: see ``dtrain.optim.rule.UpdateScalars``.
        max_grad_norm: norm to which the gradient is clipped; infinite for no clipping.
        grad_factor: of the gradient, before its norm is taken.
        loss_scale: in force during its backward.
        data_cursor: samples consumed before it.
        stop_requested: whether a stop after it was requested on this rank.
        is_saved: whether its weights will be saved.
        written_weights, written_text, written_names: what the user has written since the last step: its hash, 0 for
            nothing, its fingerprints as JSON, and the names of the parameters.
        save_failed: whether this rank knows that the asynchronous save under way has failed.
        busy_s: see ``dtrain.engine.vote.record.HostRecord``.
        decision: of all ranks, on the device; None before the vote.
        outcome: None until the step has been voted on.
    """

    number: int
    update: int
    lr: float
    rule_lrs: tuple[tuple[int, float], ...]
    max_grad_norm: float
    grad_factor: float
    loss_scale: float
    data_cursor: int
    stop_requested: bool
    is_saved: bool
    written_weights: int = 0
    written_text: str = "{}"
    written_names: Sequence[str] = ()
    save_failed: bool = False
    busy_s: float = 0.0
    decision: Decision | None = None
    outcome: StepOutcome | None = None


class StepWork(NamedTuple):
    """Runs a step on the device: the engine launches it, or a graph replays it.

    ``reduce`` completes the main grads. ``vote`` returns the decision of all ranks, and what the host unpacks as
    ``DecodedDecision``. ``update`` updates masters and replicas, or leaves them as they are.
    """

    reduce: Callable[[], None]
    vote: Callable[[StepUnderWay], tuple[Decision, Tensor]]
    update: Callable[[StepUnderWay, Decision], None]


class StepPart:
    """A part of the engine that watches or guards its steps; it has some of these methods.

    A part gets what it needs in its constructor - model states, communicator, options - and never the engine. All ranks
    have the same parts, so a method may communicate; not ``before_forward``, because one rank may run a forward alone.
    """

    def loaded(self) -> None:
        """Called when the states are complete: at the end of the set-up, and after each load."""

    def before_forward(self, call: Forward) -> None:
        """Called before the model's forward, in training and in evaluation."""

    def before_backward(self) -> None:
        """Called before a backward; the last step is finalized."""

    def after_backward(self) -> None:
        """Called after a backward."""

    def before_reduction(self, step: StepUnderWay) -> None:
        """Called first in a step, while reductions may still run; if it raises, the caller can repeat the step."""

    def before_update(self, step: StepUnderWay) -> None:
        """Called when the main grads are complete, before the vote; a ``DtrainError`` on all ranks ends the step."""

    def after_update(self, step: StepUnderWay) -> None:
        """Called when the update is launched; on a GPU the host does not know yet whether it changes anything."""

    def finalized(self, outcome: StepOutcome, decision: DecodedDecision) -> None:
        """Called when the decision on a step is known, in order; on a GPU at the latest before the next collective."""

    def end_step(self, step: StepUnderWay) -> None:
        """Called last in a step, also after an error in ``before_update``; on a GPU its outcome is not known yet."""


HOOKS = tuple(name for name in vars(StepPart) if not name.startswith("_"))


class StepParts(StepPart):
    """The parts of an engine in their order: each method calls that of all parts that have it."""

    def __init__(self, parts: Sequence[StepPart]) -> None:
        self.parts = tuple(parts)
        for hook in HOOKS:
            has = [getattr(part, hook) for part in parts if getattr(type(part), hook) is not getattr(StepPart, hook)]
            setattr(self, hook, partial(_call_all, has))  # a part that lacks it costs nothing


def _call_all(methods: Sequence[Callable[..., None]], *args: Any) -> None:
    for method in methods:
        method(*args)
