"""The outcome of a step, and the culprit of a skipped one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.precision.module_values import ValueRange

MAX_NORM = 2.0**63
"""Norm of an applied gradient, about 9.2e18, above which its squares could overflow in the optimizer's FP32 states."""


@dataclass(frozen=True)
class Origin:
    """The place where the first number that is not finite arose, found by running the culprit's micro-batch again.

    Attributes:
        place: ``output`` or ``input`` of a module, in the forward; ``output gradient`` or ``input gradient``, in the
            backward; ``weight gradient``, if every gradient between modules is finite; or empty, if none was found.
        module: path of the module; empty for the model itself.
        class_name: its class.
        caller: path of the module whose forward called it; None for the model itself. What is wrong with an ``input``
            was computed there, outside of other modules.
        values: the tensor itself, or its gradient; for a weight gradient, the gradient of what the module returned.
        inputs: what the module took in the forward.
        outputs: what it returned.
        weights: its own parameters.
        note: what else is known, such as which part was not searched.
    """

    place: str
    module: str = ""
    class_name: str = ""
    caller: str | None = None
    values: ValueRange | None = None
    inputs: tuple[ValueRange, ...] = ()
    outputs: tuple[ValueRange, ...] = ()
    weights: tuple[ValueRange, ...] = ()
    note: str = ""

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Origin:
        """Returns the origin that ``dataclasses.asdict`` made plain."""
        ranges = {key: tuple(ValueRange(**item) for item in values[key]) for key in ("inputs", "outputs", "weights")}
        own = values["values"]
        return Origin(**{**values, **ranges, "values": None if own is None else ValueRange(**own)})

    def __str__(self) -> str:
        if not self.place:
            return self.note
        name = f"'{self.module}' ({self.class_name})" if self.module else f"the model ({self.class_name})"
        where = "" if self.caller is None else f" in {repr(self.caller) if self.caller else 'the model'}"
        causes = {
            "input": f", computed{where} outside of other modules" if where else "",
            "output gradient": f", by the backward of what follows it{where}",
            "input gradient": ", by its own backward",
        }
        around = self.outputs if self.place == "output gradient" else self.inputs
        shown = [str(item) for item in (self.values, *around, *self.weights) if item is not None]
        ranges = f": {', '.join(dict.fromkeys(shown))}" if shown else ""
        note = f"; {self.note}" if self.note else ""
        return f"first in the {self.place} of {name}{causes.get(self.place, '')}{ranges}{note}"


@dataclass(frozen=True)
class Culprit:
    """The first loss or gradient that made a step fail.

    Attributes:
        rank: the rank whose loss or gradient was not finite; for a reduced gradient, the owner of the shard in which it
            was found, or -1 if every element is finite and only the norm is too large.
        step: attempted steps before this one.
        phase: ``forward loss``; ``local gradient``, as it left a rank's backward; or ``reduced gradient``, if every
            gradient that a rank recorded was finite and their sum is not.
        micro_batch: local index of the micro-batch; None for a reduced gradient.
        tensor: name of the parameter, the first in the order of backward; None for a loss.
        start: its first element that is not finite, in row-major order.
        stop: one past the last of them.
        num_inf: infinite elements of its gradient, summed over ranks; 1 for an infinite loss.
        num_nan: the same for NaN.
        num_bad_losses: micro-batches on all ranks whose loss is not finite (forward loss).
        origin: where in the model it arose, if the engine explains skips (``engine.explain_skips``).
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
    origin: Origin | None = None

    def __str__(self) -> str:
        return self._where_found() + (f"; {self.origin}" if self.origin is not None else "")

    def _where_found(self) -> str:
        if self.phase == "reduced gradient":  # on which rank it arose is not known
            where = f"; owner of the shard: rank {self.rank}"
        else:
            where = f" on rank {self.rank}" + ("" if self.micro_batch is None else f", micro-batch {self.micro_batch}")
        if self.phase == "forward loss":
            kind = "NaN" if self.num_nan else "Inf"
            return f"forward loss is {kind}{where} (losses of this step that are not finite: {self.num_bad_losses})"
        if self.tensor is None:
            return (
                f"{self.phase}: every element is finite, but the norm after clipping is above {MAX_NORM:.1e} (under "
                f"deepspeed: that of the main grads above {MAX_NORM:.1e} / sqrt(ranks))"
            )
        counts = ", ".join(f"{n} {kind}" for n, kind in ((self.num_inf, "Inf"), (self.num_nan, "NaN")) if n)
        return f"{self.phase} of '{self.tensor}'[{self.start}:{self.stop}] not finite ({counts}){where}"


@dataclass(frozen=True)
class StepOutcome:
    """Result of a step; the same value on every rank.

    On a GPU a field is copied from the device when it is first read, so a loop that reads none never waits.

    Attributes:
        applied: whether the optimizer updated the masters.
        reason: why it was not applied; if several hold, the first of

            - ``nonfinite_loss``: the loss of a micro-batch on any rank is Inf or NaN; the loss scale stays;
            - ``overflow``: a gradient is Inf or NaN, or its norm after clipping is above 9.2e18; a dynamic or
              calibrated loss scale shrinks (``LossScale.hysteresis``);
            - ``empty``: the weights of all micro-batches of all ranks are 0.

            None: it was applied. A weight that is negative or not finite, and ranks that diverge, are errors instead.
        loss: weighted mean over all micro-batches of all ranks: sum(weight x loss) / sum(weight).
        weight: sum of the weights of all micro-batches of all ranks.
        grad_norm: global L2 norm of the unscaled gradient, before clipping.
        loss_scale: the factor in the gradients of this step.
        lr: learning rate of this step.
        culprit: the cause, if the step was skipped for a non-finite number. The ranks search for it together: on a
            GPU, if one rank reads it before its next forward, every other rank must read it too or take its next step.
        stop_requested: whether any rank asked to stop (``Engine.request_stop``).

    Examples:
        >>> engine = dtrain.initialize(torch.nn.Linear(2, 1), precision="fp32")
        >>> for micro in engine.accumulate([torch.ones(1, 2), torch.full((1, 2), torch.inf)]):
        ...     engine.backward(engine(micro).square().mean())
        >>> outcome = engine.step()
        >>> outcome.applied, outcome.reason, outcome.culprit.phase, outcome.culprit.micro_batch
        (False, 'nonfinite_loss', 'forward loss', 1)
    """

    applied: bool
    reason: str | None
    loss: float
    weight: float
    grad_norm: float
    loss_scale: float
    lr: float
    culprit: Culprit | None
    stop_requested: bool
