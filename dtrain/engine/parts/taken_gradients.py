"""Gradients as the user sees them between backward and step.

Each engine has its gradients elsewhere than in ``.grad``, or there with other values: weighted, scaled, summed over
micro-batches or ranks, sharded. After a backward each parameter that has had a gradient in the step shows a
``TakenGradient``. So a script that asks which parameters have one is told so, one that reads a value is warned,
and one that writes, or sets ``.grad`` to None or to another tensor, is stopped before the step does anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_

from torch import Tensor, nn

from dtrain.engine.outcome import StepOutcome
from dtrain.engine.parts.part import StepPart, StepUnderWay
from dtrain.engine.vote.decide import DecodedDecision
from dtrain.errors import UsageError
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.parameters.model_states import ModelStates
from dtrain.parameters.running_backward import hidden_in_backwards
from dtrain.parameters.taken_gradient import INSTEAD, Readers, TakenGradient
from dtrain.precision.fake import is_fake


class TakenGradients(StepPart):
    """Shows what parameters have instead of gradients, and notices what the user has changed.

    Autograd would add to what a parameter shows, so an engine hides it in its own backward, and in another's
    (``dtrain.parameters.running_backward.hidden_in_backwards``).

    Args:
        states: of the model.
        monitor: tells which parameters have had a gradient in the step.
        names: of the parameters, by their numbers in ``monitor``.
        keeps: whether the engine's library keeps sums in ``.grad``.
    """

    def __init__(
        self, states: ModelStates, monitor: GradientMonitor, names: Sequence[str], *, keeps: bool = False
    ) -> None:
        self._states = states
        self._monitor = monitor
        self._names = names
        self._keeps = keeps
        self._readers = Readers(states.engine)
        self._parameters: dict[str, nn.Parameter] = {}
        self._made: dict[int, tuple[Tensor, TakenGradient]] = {}  # by the id of the parameter
        self._received: set[int] = set()  # numbers of the parameters of which ``_shown`` is made
        self._tensors: list[tuple[str, Tensor]] = []
        self._shown: list[TakenGradient | None] = []
        self._held: list[Tensor | None] = []

    # -- what the step calls -----------------------------------------------------------------------------------------

    def loaded(self) -> None:
        if not self._parameters:
            # nobody reads gradients of tensors without values, of a plan
            own = self._states.module.named_parameters()
            self._parameters = {name: p for name, p in own if p.requires_grad and not is_fake(p)}

    def before_backward(self) -> None:
        """Raises ``UsageError`` if the user has changed a gradient since the last backward."""
        self._require_unchanged()
        if self._readers.is_over:
            self._drop()
        if self in hidden_in_backwards:
            hidden_in_backwards.discard(self)
            self._hide()

    def after_backward(self) -> None:
        self._readers.is_over = False
        if self._received != self._monitor.received:
            self._received = set(self._monitor.received)
            self._make()
        self._show()
        hidden_in_backwards.add(self)

    def before_reduction(self, step: StepUnderWay) -> None:
        """Raises ``UsageError`` if the user has changed a gradient; the step can be called again without it."""
        self._require_unchanged()

    def give_back(self) -> None:
        """Lets the engine's library find in ``.grad`` what it keeps there, until the step ends."""
        if self in hidden_in_backwards:
            hidden_in_backwards.discard(self)
            self._hide()

    def finalized(self, outcome: StepOutcome, decision: DecodedDecision) -> None:
        self._drop()  # only now: the search for a culprit reads them

    def end_step(self, step: StepUnderWay) -> None:
        """Shows them still, as in plain PyTorch, until the next backward; the user may clear them from now on."""
        self._readers.is_over = True
        if self not in hidden_in_backwards:
            self._set(self._shown)
            hidden_in_backwards.add(self)

    def _drop(self) -> None:
        """Holds no sums any more, which take the memory of all gradients."""
        self._held = []
        for shown in self._shown:
            if shown is not None:
                shown.held = None

    # -- what shows --------------------------------------------------------------------------------------------------

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Context of another engine's backward."""
        now = [tensor.grad for _, tensor in self._tensors]  # as the user may have changed them
        self._hide()
        try:
            yield
        finally:
            if self._readers.is_over:
                hidden_in_backwards.discard(self)
            else:
                self._set(now)

    def _make(self) -> None:
        """Makes what each parameter shows, on both of its tensors if ``fully_shard`` has two."""
        received = {self._names[number] for number in self._received}
        unsharded = self._states.unsharded_parameters() if self._parameters else {}
        self._tensors = [(name, p) for own in (self._parameters, unsharded) for name, p in own.items()]
        self._shown = [self._taken(p, name) if name in received else None for name, p in self._tensors]

    def _taken(self, parameter: Tensor, name: str) -> TakenGradient:
        if id(parameter) not in self._made:
            self._made[id(parameter)] = parameter, TakenGradient(parameter, name, self._readers)
        return self._made[id(parameter)][1]

    def _show(self) -> None:
        if self._keeps:
            self._held = [tensor.grad for _, tensor in self._tensors]
            for shown, held in zip(self._shown, self._held, strict=True):
                if shown is not None:
                    shown.held = held
        self._set(self._shown)

    def _hide(self) -> None:
        self._set(self._held if self._keeps and not self._readers.is_over else [None] * len(self._tensors))

    def _set(self, grads: Sequence[Tensor | None]) -> None:
        for number, ((name, tensor), grad) in enumerate(zip(self._tensors, grads, strict=True)):
            try:
                tensor.grad = grad
            except RuntimeError:
                if not isinstance(grad, TakenGradient):
                    raise
                # of another shape now: DeepSpeed's stage 3 has sharded or gathered it
                del self._made[id(tensor)]
                self._shown[number] = tensor.grad = self._taken(tensor, name)

    def _require_unchanged(self) -> None:
        if self._readers.is_over or self not in hidden_in_backwards:
            return
        now = [tensor.grad for _, tensor in self._tensors]
        if all(map(is_, now, self._shown)):
            return
        found = zip(self._tensors, now, self._shown, strict=True)
        changed = [(name, grad) for (name, _), grad, shown in found if grad is not shown]
        name, to = changed[0]
        self._set(self._shown)  # said once: the caller may go on with the gradients as they are
        raise UsageError(
            f"'{name}'.grad was set to {'None' if to is None else 'a tensor'} after engine.backward (set so: "
            f"{len(changed)}), which is lost: engine={self._readers.engine} has taken the gradient. Remove the line. "
            f"To leave a parameter as it is, freeze it for the forward (requires_grad_(False), and back before "
            f"engine.step); gradients are cleared by engine.step; {INSTEAD}"
        )
