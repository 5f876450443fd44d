"""How low precision goes wrong: each failure made to happen, detected, and cured by what dtrain does.

Every number that is printed is computed here and now, on one weight under a real engine.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from textwrap import fill

import torch
from torch import Tensor, nn

from dtrain.engine.initialize import initialize, underflow_warning
from dtrain.engine.interface import Engine, StepOutcome
from dtrain.errors import DtrainError
from dtrain.optim.adamw import AdamW
from dtrain.precision.float8.options import Float8Options
from dtrain.precision.formats import BF16, FP16, product_bound
from dtrain.precision.loss_scale import LossScale
from dtrain.precision.policy import PrecisionPolicy
from dtrain.precision.regions import full_precision

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Failure:
    """One way to go wrong.

    Attributes:
        title: what it is.
        shown: what comes of it, a line each.
        detected: how dtrain notices, a line each.
        cured: what dtrain does instead, a line each.
    """

    title: str
    shown: list[str] = field(default_factory=list)
    detected: list[str] = field(default_factory=list)
    cured: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = {"shown": self.shown, "detected": self.detected, "cured": self.cured}
        texts = [f"  {name:8}  {line}" for name, lines in parts.items() for line in lines]
        return "\n".join([self.title, *(fill(text, 118, subsequent_indent=" " * 12) for text in texts)])


class Scale(nn.Module):
    """One weight, ``product``, times its input."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.product = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.product.weight, weight)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [1, 1] to [1, 1]."""
        y: Tensor = self.product(x)
        return y


class SquareLoss(Scale):
    """One weight that returns a loss of its own: the sum of squares, as a product, which is low like all products."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [1, 1] to a loss [] that nothing protects."""
        y: Tensor = self.product(x).flatten()
        return y @ y


class GuardedLoss(Scale):
    """The same with the loss in a region that the policy leaves alone."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [1, 1] to a loss []."""
        y: Tensor = self.product(x).flatten()
        with full_precision():
            return y @ y


def show_failures() -> None:
    """Makes every failure happen and prints it; a few seconds."""
    print("\n\n".join(str(make()) for make in FAILURES), flush=True)


def product_overflow() -> Failure:
    """A product beyond FP16's largest number."""
    failure = Failure(f"A product overflows: FP16 ends at {FP16.max:,.0f}")
    factors = {name: torch.tensor(300.0, dtype=dtype) for name, dtype in _DTYPES.items()}
    failure.shown += [f"{name}: 300 x 300 = {float(factor * factor):g}" for name, factor in factors.items()]
    engine = _start(Scale(300.0), "fp16")
    outcome = _step(engine, 300.0)
    failure.detected.append(f"precision=fp16: {_told(outcome)}; the weight is still {_weight(engine):g}")
    for name, policy in {
        "precision=bf16": PrecisionPolicy.named("bf16"),
        "precision=fp16 and the rule product: fp32": PrecisionPolicy.named("fp16", rules={"product": "fp32"}),
    }.items():
        failure.cured.append(f"{name}: {_told(_step(_start(Scale(300.0), policy), 300.0))}")
    return failure


def gradient_overflow() -> Failure:
    """A gradient that overflows because the loss is scaled too much."""
    failure = Failure("A scaled gradient overflows: the loss is fine, its gradient times the loss scale is not")
    scaled = torch.tensor(8.0, dtype=torch.float16) * 65536
    failure.shown.append(f"fp16: a gradient of 8 times a loss scale of 65536 = {float(scaled):g}")
    engine = _start(Scale(1.0), "fp16")
    outcome = _step(engine, 8.0)
    failure.detected.append(f"precision=fp16: {_told(outcome)}; the weight is still {_weight(engine):g}")
    skips, outcome = _until_applied(engine, 8.0)
    failure.cured.append(
        f"loss_scale=dynamic, the default: halved by each of {skips + 1} skipped steps, then {_told(outcome)} at "
        f"{outcome.loss_scale:g}"
    )
    rule = LossScale(mode="calibrated", calibration_steps=3)
    engine = _start(Scale(1.0), "fp16", loss_scale=rule)
    while engine.applied_steps <= rule.calibration_steps:
        outcome = _step(engine, 8.0)
    failure.cured.append(
        f"loss_scale=calibrated: after {rule.calibration_steps} measured steps {outcome.loss_scale:g}, the largest "
        f"power of two below {FP16.max:,.0f} / (8 x {rule.margin:g})"
    )
    return failure


def lost_addends() -> Failure:
    """Updates that are less than half a step of the weights' format."""
    failure = Failure("Small addends are lost: weights stop to move where an update is less than half their epsilon")
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
        failure.cured.append(
            f"precision={name}, FP32 masters: 100 applied steps of 1e-4 each: to {_weight(engine):.8g}"
        )
    return failure


def gradient_underflow() -> Failure:
    """Gradients below FP16's least number."""
    failure = Failure(f"Gradients underflow: FP16 begins at {FP16.min_subnormal:.2g}")
    failure.shown += [
        f"{name}: a gradient of 1e-8 = {float(torch.tensor(1e-8, dtype=dtype)):.5g}" for name, dtype in _DTYPES.items()
    ]
    engine = _start(Scale(1.0), "fp16", loss_scale="none")
    warning = underflow_warning(engine.contract, LossScale(mode="none"))
    failure.detected.append(f"precision=fp16, loss_scale=none, at the start: {warning}")
    outcome = _step(engine, 1.0, factor=1e-8)
    failure.detected.append(
        f"then {_told(outcome)}, grad_norm {outcome.grad_norm:g} beside a loss that is not 0; the weight is still "
        f"{_weight(engine):g}"
    )
    for name in ("fp16", "bf16"):
        engine = _start(Scale(1.0), name)
        outcome = _step(engine, 1.0, factor=1e-8)
        failure.cured.append(
            f"precision={name}, its own loss scale of {outcome.loss_scale:g}: {_told(outcome)}, grad_norm "
            f"{outcome.grad_norm:.5g}; the weight moves to {_weight(engine):.6g}"
        )
    return failure


def unprotected_loss() -> Failure:
    """A loss that is computed in the dtype of the products."""
    failure = Failure("A loss is not protected: it is computed in the products' format")
    engine = _start(SquareLoss(300.0), "fp16")
    loss = engine(_input(engine, 1.0))
    failure.shown.append(f"precision=fp16: the model's own loss of 300 x 300 = {loss.item():g}, {loss.dtype}")
    try:
        engine.backward(loss)
    except DtrainError as error:
        failure.detected.append(f"engine.backward refuses it: {error}")
    for name, model, loss in (
        ("the loss of what the model returns, which is FP32", Scale(300.0), _sum_of_squares),
        ("the model's own in dtrain.full_precision()", GuardedLoss(300.0), torch.sum),
    ):
        engine = _start(model, "fp16")
        skips, outcome = _until_applied(engine, 1.0, loss)
        failure.cured.append(
            f"precision=fp16, {name}: after {skips} skips {_told(outcome)} at loss scale {outcome.loss_scale:g}"
        )
    return failure


def hidden_overflow() -> Failure:
    """A cast that makes a number of Inf."""
    failure = Failure("A cast hides an overflow: FP8 E4M3 has no Inf")
    inf = torch.tensor(math.inf)
    failure.shown.append(f"fp8 e4m3: Inf cast = {float(inf.to(torch.float8_e4m3fn)):g}")
    model = nn.Sequential(OrderedDict(product=nn.Linear(16, 16, bias=False)))
    nn.init.ones_(model.get_parameter("product.weight"))
    policy = PrecisionPolicy.named("fp8", rules={"product": "fp8"}, float8=Float8Options(choice="all"))
    engine = _start(model, policy)
    for value, report in ((math.inf, failure.detected), (1.0, failure.cured)):
        x = torch.ones(16, 16, device=engine.device)
        x[0, 0] = value
        engine.backward(engine(x).mean())
        report.append(f"precision=fp8, one input of 256 is {value:g}: {_told(engine.step())}")
    failure.cured.insert(0, "the scale of what is not finite is NaN, so the product is, and no rank takes the step")
    return failure


def low_sums() -> Failure:
    """Sums whose every partial sum is rounded to a low format."""
    length = 4096
    failure = Failure("A sum in a low format stops to grow: one more is less than half a step of the sum")
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
    failure.cured.append(f"precision=bf16, a Linear of {length:,} ones, summed in FP32: {product:,g}")
    return failure


FAILURES: Sequence[Callable[[], Failure]] = (
    product_overflow,
    gradient_overflow,
    lost_addends,
    gradient_underflow,
    unprotected_loss,
    hidden_overflow,
    low_sums,
)


def _start(
    model: nn.Module,
    precision: str | PrecisionPolicy,
    *,
    loss_scale: str | LossScale = "auto",
    optimizer: AdamW | None = None,
) -> Engine:
    rule = optimizer or AdamW(lr=1e-3, weight_decay=0.0)
    return initialize(model, optimizer=rule, precision=precision, loss_scale=loss_scale, seed=0)


def _step(
    engine: Engine, x: float, *, factor: float = 1.0, loss: Callable[[Tensor], Tensor] = torch.sum
) -> StepOutcome:
    engine.backward(factor * loss(engine(_input(engine, x))))
    return engine.step()


def _sum_of_squares(y: Tensor) -> Tensor:
    return y.square().sum()


def _until_applied(engine: Engine, x: float, loss: Callable[[Tensor], Tensor] = torch.sum) -> tuple[int, StepOutcome]:
    """How many steps were skipped before one was applied, and that one."""
    skips = 0
    while not (outcome := _step(engine, x, loss=loss)).applied:  # the engine itself ends a long row of them
        skips += 1
    return skips, outcome


def _input(engine: Engine, x: float) -> Tensor:
    return torch.full((1, 1), x, device=engine.device)


def _weight(engine: Engine) -> float:
    (master,) = engine.master_state().values()
    return master.item()


def _told(outcome: StepOutcome) -> str:
    if outcome.applied:
        return f"the step is applied, loss {outcome.loss:.6g}"
    return f"the step is skipped, {outcome.reason}: {outcome.culprit}"
