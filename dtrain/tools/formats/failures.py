"""Demonstrates the failures of reduced precision: each is reproduced, detected and fixed.

Every printed number is computed on the spot, mostly on a model of one weight under a real engine.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from textwrap import fill

import torch
from torch import Tensor, nn

import dtrain
from dtrain.config.optim import AdamW
from dtrain.config.precision import Float8, LossScale
from dtrain.engine.initialize import underflow_warning
from dtrain.engine.interface import Engine
from dtrain.engine.outcome import StepOutcome
from dtrain.errors import DtrainError
from dtrain.precision.float8.cast import E4M3, cast
from dtrain.precision.formats import BF16, FP16, product_bound
from dtrain.precision.policy import PrecisionPolicy
from dtrain.precision.regions import full_precision

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Failure:
    """A failure of reduced precision: lines that reproduce it, detect it and prevent it."""

    title: str
    shown: list[str] = field(default_factory=list)
    detected: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        sections = {"shown": self.shown, "detected": self.detected, "fixed": self.fixed}
        texts = [f"  {name:8}  {line}" for name, lines in sections.items() for line in lines]
        return "\n".join([self.title, *(fill(text, 118, subsequent_indent=" " * 12) for text in texts)])


class Scale(nn.Module):
    """Multiplies its input [1, 1] by one weight, ``product``."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.product = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.product.weight, weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.product(x)
        return y


class SquareLoss(Scale):
    """Returns a loss of its own: the sum of squares as a matmul, in reduced precision like all matmuls."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.product(x).flatten()
        return y @ y


class GuardedLoss(Scale):
    """Returns the same loss, computed in :func:`dtrain.full_precision`."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.product(x).flatten()
        with full_precision():
            return y @ y


def show_failures() -> None:
    """Reproduces and prints every failure; takes a few seconds."""
    print("\n\n".join(str(make()) for make in FAILURES), flush=True)


def product_overflow() -> Failure:
    failure = Failure(f"A product overflows: FP16 ends at {FP16.max:,.0f}")
    factors = {name: torch.tensor(300.0, dtype=dtype) for name, dtype in _DTYPES.items()}
    failure.shown += [f"{name}: 300 x 300 = {float(factor * factor):g}" for name, factor in factors.items()]
    engine = _start(Scale(300.0), "fp16")
    outcome = _step(engine, 300.0)
    failure.detected.append(f"precision=fp16: {_describe(outcome)}; the weight is still {_weight(engine):g}")
    for name, policy in {
        "precision=bf16": PrecisionPolicy.named("bf16"),
        "precision=fp16 and the rule product: fp32": PrecisionPolicy.named("fp16", rules={"product": "fp32"}),
    }.items():
        failure.fixed.append(f"{name}: {_describe(_step(_start(Scale(300.0), policy), 300.0))}")
    return failure


def gradient_overflow() -> Failure:
    failure = Failure("A scaled gradient overflows: the loss is fine, its gradient times the loss scale is not")
    scaled = torch.tensor(8.0, dtype=torch.float16) * 65536
    failure.shown.append(f"fp16: a gradient of 8 times a loss scale of 65536 = {float(scaled):g}")
    engine = _start(Scale(1.0), "fp16")
    outcome = _step(engine, 8.0)
    failure.detected.append(f"precision=fp16: {_describe(outcome)}; the weight is still {_weight(engine):g}")
    skips, outcome = _until_applied(engine, 8.0)
    failure.fixed.append(
        f"loss_scale=dynamic, the default: halved by each of {skips + 1} skipped steps, then {_describe(outcome)} at "
        f"{outcome.loss_scale:g}"
    )
    rule = LossScale(mode="calibrated", calibration_steps=3)
    engine = _start(Scale(1.0), "fp16", loss_scale=rule)
    while engine.applied_steps <= rule.calibration_steps:
        outcome = _step(engine, 8.0)
    failure.fixed.append(
        f"loss_scale=calibrated: after {rule.calibration_steps} measured steps {outcome.loss_scale:g}, the largest "
        f"power of two below {FP16.max:,.0f} / (8 x {rule.margin:g})"
    )
    return failure


def lost_addends() -> Failure:
    failure = Failure("Small addends are lost: weights stop moving when an update is less than half their epsilon")
    one = {name: torch.tensor(1.0, dtype=dtype) for name, dtype in _DTYPES.items()}
    failure.shown += [f"{name}: 1 + 1e-4 = {float(value + 1e-4):.8g}" for name, value in one.items()]
    for name in ("bf16", "fp16"):
        weight = one[name].clone()
        for _ in range(100):
            weight -= 1e-4
        failure.shown.append(f"{name}: 100 updates of 1e-4 each take a weight from 1 to {weight.item():.8g}")
    try:
        PrecisionPolicy("bf16", torch.bfloat16, master_dtype=torch.bfloat16)
    except DtrainError as error:
        failure.detected.append(f"a policy with such weights is refused: {error}")
    for name in ("bf16", "fp16"):
        engine = _start(Scale(1.0), name, optimizer=AdamW(lr=1e-4, weight_decay=0.0))
        while engine.applied_steps < 100:
            _step(engine, 1.0)
        failure.fixed.append(
            f"precision={name}, FP32 masters: 100 applied steps of 1e-4 each: to {_weight(engine):.8g}"
        )
    return failure


def gradient_underflow() -> Failure:
    failure = Failure(f"Gradients underflow: FP16 begins at {FP16.min_subnormal:.2g}")
    failure.shown += [
        f"{name}: a gradient of 1e-8 = {float(torch.tensor(1e-8, dtype=dtype)):.5g}" for name, dtype in _DTYPES.items()
    ]
    engine = _start(Scale(1.0), "fp16", loss_scale="none")
    warning = underflow_warning(engine.contract, LossScale(mode="none"))
    failure.detected.append(f"precision=fp16, loss_scale=none, at the start: {warning}")
    outcome = _step(engine, 1.0, factor=1e-8)
    failure.detected.append(
        f"then {_describe(outcome)}, grad_norm {outcome.grad_norm:g} beside a loss that is not 0; the weight is still "
        f"{_weight(engine):g}"
    )
    for name in ("fp16", "bf16"):
        engine = _start(Scale(1.0), name)
        outcome = _step(engine, 1.0, factor=1e-8)
        failure.fixed.append(
            f"precision={name}, its own loss scale of {outcome.loss_scale:g}: {_describe(outcome)}, grad_norm "
            f"{outcome.grad_norm:.5g}; the weight moves to {_weight(engine):.6g}"
        )
    return failure


def unprotected_loss() -> Failure:
    failure = Failure("A loss is not protected: it is computed in the products' format")
    engine = _start(SquareLoss(300.0), "fp16")

    def shown(loss: Tensor) -> Tensor:
        failure.shown.append(f"precision=fp16: the model's own loss of 300 x 300 = {loss.item():g}, {loss.dtype}")
        return loss

    try:
        _step(engine, 1.0, loss=shown)
    except DtrainError as error:
        failure.detected.append(f"engine.backward refuses it: {error}")
    for name, model, loss in (
        ("the loss of what the model returns, which is FP32", Scale(300.0), _sum_of_squares),
        ("the model's own in dtrain.full_precision()", GuardedLoss(300.0), torch.sum),
    ):
        engine = _start(model, "fp16")
        skips, outcome = _until_applied(engine, 1.0, loss)
        failure.fixed.append(
            f"precision=fp16, {name}: after {skips} skips {_describe(outcome)} at loss scale {outcome.loss_scale:g}"
        )
    return failure


def hidden_overflow() -> Failure:
    failure = Failure("A cast hides an overflow: FP8 E4M3 has no Inf")
    inf = torch.tensor(math.inf)
    failure.shown.append(f"fp8 e4m3: Inf cast = {float(cast(inf, torch.tensor(1.0), E4M3)):g}")
    model = nn.Sequential(OrderedDict(product=nn.Linear(16, 16, bias=False)))
    nn.init.ones_(model.get_parameter("product.weight"))
    policy = PrecisionPolicy.named("fp8", rules={"product": "fp8"}, float8=Float8(choice="all"))
    engine = _start(model, policy)
    for value, report in ((math.inf, failure.detected), (1.0, failure.fixed)):
        x = torch.ones(16, 16)
        x[0, 0] = value
        report.append(f"precision=fp8, one input of 256 is {value:g}: {_describe(_step(engine, x, loss=torch.mean))}")
    failure.fixed.insert(
        0, "the scale of a tensor with a non-finite value is NaN, so the product is NaN, and all ranks skip the step"
    )
    return failure


def reduced_precision_sums() -> Failure:
    length = 4096
    failure = Failure("A sum in reduced precision stops growing: 1 is less than half a unit in its last place")
    bound = product_bound(length, BF16)
    for name in ("bf16", "fp16"):
        total = torch.zeros((), dtype=_DTYPES[name])
        for _ in range(length):
            total += 1
        failure.shown.append(f"{name}: {length:,} ones added one by one = {total.item():,g}")
        failure.detected.append(
            f"{name}: {1 - total.item() / length:.1%} is lost; {length:,} BF16 products, summed in FP32, lose "
            f"{bound:.1%} at most"
        )
    model = nn.Linear(length, 1, bias=False)
    nn.init.ones_(model.weight)
    engine = _start(model, "bf16")
    product = engine(torch.ones(1, length, device=engine.device)).item()
    failure.fixed.append(f"precision=bf16, a Linear of {length:,} ones, summed in FP32: {product:,g}")
    return failure


FAILURES: Sequence[Callable[[], Failure]] = (
    product_overflow,
    gradient_overflow,
    lost_addends,
    gradient_underflow,
    unprotected_loss,
    hidden_overflow,
    reduced_precision_sums,
)


def _start(
    model: nn.Module,
    precision: str | PrecisionPolicy,
    *,
    loss_scale: str | LossScale = "auto",
    optimizer: AdamW | None = None,
) -> Engine:
    rule = optimizer or AdamW(lr=1e-3, weight_decay=0.0)
    return dtrain.initialize(model, optimizer=rule, precision=precision, loss_scale=loss_scale, seed=0)


def _step(
    engine: Engine, x: float | Tensor, *, factor: float = 1.0, loss: Callable[[Tensor], Tensor] = torch.sum
) -> StepOutcome:
    """Trains a step as a user's loop does; a number ``x`` is the whole input."""
    inputs = x if isinstance(x, Tensor) else torch.full((1, 1), x)
    engine.backward(factor * loss(engine(inputs.to(engine.device))))
    return engine.step()


def _sum_of_squares(y: Tensor) -> Tensor:
    return y.square().sum()


def _until_applied(engine: Engine, x: float, loss: Callable[[Tensor], Tensor] = torch.sum) -> tuple[int, StepOutcome]:
    """Returns the number of skipped steps before the first applied one, and its outcome."""
    skips = 0
    while not (outcome := _step(engine, x, loss=loss)).applied:  # the engine raises after too many
        skips += 1
    return skips, outcome


def _weight(engine: Engine) -> float:
    (master,) = engine.master_state().values()
    return master.item()


def _describe(outcome: StepOutcome) -> str:
    if outcome.applied:
        return f"the step is applied, loss {outcome.loss:.6g}"
    return f"the step is skipped, {outcome.reason}: {outcome.culprit}"
