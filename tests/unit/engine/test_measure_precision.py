"""What a measured step reports, against direct counts on the tensors; the step itself keeps its bits."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtrain
from dtrain.engine.measurement.float8 import _cast_sums
from dtrain.engine.step import StepEngine
from dtrain.errors import ConfigError, UsageError
from dtrain.precision.float8.cast import E4M3, E5M2, Scaling, dequantize, quantize
from dtrain.precision.float8.options import Recipe
from dtrain.precision.histogram import Histogram
from dtrain.precision.report import PrecisionReport
from tests.engines import float8_model
from tests.helpers.one_rank import loss_of, start, train_step
from tests.helpers.runs import Run
from tests.helpers.runs import start as start_run
from tests.helpers.zoo import make


def measured(engine: StepEngine, step: Callable[[], object], *activations: str) -> PrecisionReport:
    with engine.measure_precision(activations) as measurement:
        step()
    report = measurement.report()
    assert measurement.report() is report
    assert PrecisionReport.from_dict(report.to_dict()) == report
    return report


def zoo_step(engine: StepEngine, model: str = "transformer", num_micro_batches: int = 2) -> dtrain.StepOutcome:
    entry, first = make(model), engine.attempted_steps * num_micro_batches
    for index in engine.accumulate(range(first, first + num_micro_batches)):
        engine.backward(entry.loss(engine, entry.batch(index)), weight=index + 1.0)
    return engine.step()


def plain_gradients(name: str) -> dict[str, list[Tensor]]:
    """The gradients of both micro-batches of the first step, in plain PyTorch."""
    entry = make(name)
    model, found = entry.build(0), {}
    for index in range(2):
        model.zero_grad(set_to_none=True)
        entry.loss(model, entry.batch(index)).backward()
        for parameter, values in model.named_parameters():
            if values.grad is not None:
                found.setdefault(parameter, []).append(values.grad)
    return found


@pytest.mark.parametrize(
    ("model", "name", "stage"), [("tied", "native", 0), ("partly_frozen", "native", 3), ("sometimes_used", "fsdp2", 2)]
)
def test_counts_are_those_of_the_gradients(model: str, name: str, stage: int) -> None:
    engine = start_run(Run(model), engine=name, zero_stage=stage, precision="fp32", loss_scale=1024.0)
    report = measured(engine, lambda: zoo_step(engine, model))
    direct = plain_gradients(model)
    assert {own.name for own in report.parameters} >= set(direct)
    largest = max(float(grad.abs().max()) for grads in direct.values() for grad in grads)
    assert 65504 / 16 < largest * report.better_scale * 8 <= 65504
    for own in report.parameters:
        grads = direct.get(own.name, [])
        counted = Histogram.of(torch.cat([grad.flatten() for grad in grads]) if grads else torch.empty(0))
        if name == "fsdp2":  # its gradients of unused parameters are zeros
            counted = Histogram((counted.zeros + own.gradient.total - counted.total, *counted.counts[1:]))
        assert own.gradient == counted.scaled(1024.0), own.name
        assert report.unscaled()[own.name] == counted
        assert own.largest == max((float(grad.abs().max()) for grad in grads), default=0.0)


class Planted(nn.Linear):
    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum() + self.bias.sum()


def test_planted_underflow_is_named_with_its_share() -> None:
    generator = torch.Generator().manual_seed(3)
    lost, kept = 2.0 ** -torch.empty(700).uniform_(25.1, 33.0, generator=generator), torch.full((300,), 2.0**-12)
    gradient = torch.cat((lost, kept, torch.zeros(50)))
    engine: Any = start(Planted(len(gradient), 1))
    report = measured(engine, lambda: (engine.backward(engine(gradient)), engine.step()))
    assert all(own.shares.overflow_fp16 == 0.0 for own in report.parameters)
    assert report.better_scale == 4096  # 1 x 8 x 4,096 <= 65,504
    worst, other = report.worst()
    assert (worst.name, other.name) == ("weight", "bias")
    direct = (lost.half() == 0).float().mean() * 0.7
    assert worst.shares.flushed_fp16 == pytest.approx(float(direct), abs=1e-6) == pytest.approx(0.7, abs=0.01)
    still = float(((lost * 4096).half() == 0).sum()) / 1000
    assert worst.shares.recovered_fp16 == pytest.approx(0.7 - still)
    assert worst.shares.zeros == pytest.approx(50 / 1050)
    # at a scale of its own, 2^-12 becomes 256 in E4M3, whose smallest number is 2^-9: 2^-20 is the first to be lost
    scaled = torch.cat((lost, kept)) * 2.0**20
    assert worst.shares.flushed_e4m3 == pytest.approx(float((scaled.to(E4M3).float() == 0).float().mean()))
    assert other.shares.flushed_fp16 == other.shares.subnormal_fp16 == 0.0


@pytest.mark.parametrize(("name", "stage"), [("native", 3), ("fsdp2", 2)])
def test_update_losses_equal_direct_ones(name: str, stage: int) -> None:
    engine = start_run(Run("transformer", lr=1e-4), engine=name, zero_stage=stage, precision="bf16")
    for _ in range(2):
        zoo_step(engine)
    before = engine.master_state()
    report = measured(engine, lambda: zoo_step(engine))
    after = engine.master_state()
    shares = []
    for own in report.parameters:
        old, update = before[own.name], after[own.name] - before[own.name]
        changed = update != 0
        assert own.update.num_changed == int(changed.sum())
        for dtype, lost in ((torch.bfloat16, own.update.lost_bf16), (torch.float16, own.update.lost_fp16)):
            stored = old.to(dtype)
            same = (stored.float() + update).to(dtype) == stored
            assert lost == pytest.approx(int((same & changed).sum()) / int(changed.sum()))
            shares.append(lost)
        if own.update.ratio is None:
            assert not old.any()
        else:
            assert own.update.ratio == pytest.approx(float(update.norm() / old.norm()), rel=1e-5)
    assert min(shares) < 0.2 < 0.5 < max(shares)


def bad_step(engine: Any) -> None:
    """The second of two micro-batches is a dummy."""
    for factor in engine.accumulate((1e38, 0.0)):
        engine.backward(loss_of(engine) * factor, weight=float(factor > 0))
    outcome = engine.step()
    assert not outcome.applied
    assert (outcome.culprit is not None and outcome.culprit.origin is not None) == engine.explain_skips


def test_a_skipped_step_has_no_updates_and_neither_dummies_nor_its_explanation_are_counted() -> None:
    activations = []
    for explains in (True, False):
        engine = start(loss_scale=1024.0)
        engine.explain_skips = explains
        report = measured(engine, lambda engine=engine: bad_step(engine), "*")
        assert train_step(engine).applied
        assert (report.step, report.applied) == (1, False)
        assert all(own.update is None for own in report.parameters)
        assert [own.gradient.total for own in report.parameters] == [own.numel for own in report.parameters]
        bad = [own for own in report.parameters if own.gradient.num_nonfinite]
        assert bad
        assert all(own.largest is None and own.shares.overflow_fp16 > 0 for own in bad)
        activations.append([counted for own in report.activations for counted in (own.output, own.gradient)])
    assert any(histogram.total for histogram in activations[0])
    assert activations[0] == activations[1]


def test_an_operand_with_an_infinity_has_no_underflow() -> None:
    x = torch.arange(128.0).view(8, 16)
    x[3, 3] = math.inf
    for scaling in Scaling:
        _, underflows, *_ = _cast_sums(x, E4M3, scaling).tolist()
        assert underflows == 0


def operands_of(engine: StepEngine, name: str) -> dict[str, list[Tensor]]:
    seen: dict[str, list[Tensor]] = {"input": [], "gradient": []}
    module = engine.module.get_submodule(name)
    module.register_forward_pre_hook(lambda _, args: seen["input"].append(args[0].detach().clone()))
    module.register_full_backward_hook(lambda _, __, grads: seen["gradient"].append(grads[0].detach().clone()))
    return seen


def sqnr(pairs: list[tuple[Tensor, Tensor]]) -> float:
    signal = sum(float(x.double().square().sum()) for x, _ in pairs)
    noise = sum(float((q.double() - x.double()).square().sum()) for x, q in pairs)
    return 10 * math.log10(signal / noise)


@pytest.mark.parametrize(
    ("name", "stage", "recipe"),
    [
        ("native", 2, "rowwise"),
        ("native", 0, "rowwise_bf16_wgrad"),
        ("native", 2, "blockwise"),
        ("fsdp2", 3, "tensorwise"),
        ("fsdp2", 2, "blockwise"),
    ],
)
def test_float8_operands_are_measured_as_they_are_cast(name: str, stage: int, recipe: str) -> None:
    precision = dtrain.PrecisionPolicy.named("fp8", float8=dtrain.Float8(recipe=recipe))
    engine = float8_model.start(name, stage, precision)
    float8_model.train_step(engine, 2)
    module = float8_model.FLOAT8[1]
    seen, weight = operands_of(engine, module), engine.master_state()[f"{module}.weight"]
    report = measured(engine, lambda: float8_model.train_step(engine, 2))
    names = ("fprop", "dgrad") if recipe == "rowwise_bf16_wgrad" else ("fprop", "dgrad", "wgrad")
    products = itertools.product(float8_model.FLOAT8, names)
    assert [(own.module, own.product) for own in report.float8] == list(products)
    options = Recipe.of(engine.policy.float8, torch.bfloat16)

    def cast(
        x: Tensor, dtype: torch.dtype, *, columns: bool = False, scaling: Scaling = options.scaling
    ) -> tuple[Tensor, Tensor]:
        rows = x.reshape(-1, x.shape[-1]).float()
        rows = rows.t() if columns else rows
        return rows, dequantize(quantize(rows, dtype, scaling))

    stored = weight.bfloat16() if name == "fsdp2" else weight  # gathered in BF16 and cast from that
    of_weight = options.weight_scaling
    rounded = {columns: cast(stored, E4M3, columns=columns, scaling=of_weight)[1] for columns in (False, True)}
    expected = {
        ("fprop", "input"): [cast(x, E4M3) for x in seen["input"]],
        ("fprop", "weight"): [(weight, rounded[False])],
        ("dgrad", "gradient"): [cast(x, options.grad_dtype) for x in seen["gradient"]],
        ("dgrad", "weight"): [(weight.t(), rounded[True])],
        ("wgrad", "gradient"): [cast(x, options.grad_dtype, columns=True) for x in seen["gradient"]],
        ("wgrad", "input"): [cast(x, E4M3, columns=True) for x in seen["input"]],
    }
    expected = {key: pairs for key, pairs in expected.items() if key[0] in names}
    for product in (own for own in report.float8 if own.module == module):
        for operand in product.operands:
            pairs = expected.pop((product.product, operand.operand))
            assert operand.sqnr_db == pytest.approx(sqnr(pairs), abs=1e-3), (product.product, operand.operand)
            flushed = sum(int(((q == 0) & (x != 0)).sum()) for x, q in pairs) / sum(x.numel() for x, _ in pairs)
            assert operand.underflow == pytest.approx(flushed)
            assert operand.saturated == 0.0
        assert product.sqnr_db < min(operand.sqnr_db or math.inf for operand in product.operands)
        formats = {operand.format for operand in product.operands if operand.operand == "gradient"}
        assert formats <= {"e4m3" if options.grad_dtype != E5M2 else "e5m2"}
    assert not expected


class Repeated(nn.Module):
    """Its block may run under activation checkpointing, which repeats the forward in backward."""

    checkpoints = False

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.block, x, use_reentrant=False) if self.checkpoints else self.block(x)
        return (y - 1).square().mean()


@pytest.mark.parametrize("checkpoints", [False, True])
def test_activations_are_counted_once(checkpoints: bool) -> None:
    model, x, outputs = Repeated(), torch.randn(3, 4), []
    handle = model.block.register_forward_hook(lambda *args: outputs.append(args[2]))
    (gradient,) = torch.autograd.grad(model(x) * 8.0, outputs)
    handle.remove()
    model.checkpoints = checkpoints
    engine: Any = start(model, loss_scale=8.0)
    report = measured(engine, lambda: (engine.backward(engine(x)), engine.step()), "bl*")
    assert [own.module for own in report.activations] == ["block", "block.0", "block.1"]
    assert report.activations[0].output == Histogram.of(outputs[0])
    assert report.activations[0].gradient == Histogram.of(gradient)
    assert report.activations[1].output.total == 24


@pytest.mark.parametrize(("name", "stage"), [("native", 3), ("ddp", 0), ("fsdp2", 2)])
def test_weights_have_the_same_bits(name: str, stage: int) -> None:
    states, hooks = [], []
    for is_measured in (False, True):
        engine = float8_model.start(name, stage, "bf16" if name == "fsdp2" else "fp8")
        for _ in range(3):
            with engine.measure_precision(["*"]) if is_measured else contextlib.nullcontext():
                float8_model.train_step(engine, 2)
        states.append((engine.master_state(), engine.comm.schedule.hash))
        hooks.append([(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in engine.module.modules()])
    assert hooks[0] == hooks[1]
    assert states[0][1] == states[1][1]
    assert all(torch.equal(states[0][0][key], states[1][0][key]) for key in states[0][0])


def test_misuse_is_refused() -> None:
    engine = start()
    with engine.measure_precision() as measurement:
        pass
    assert measurement.report() is None
    with engine.measure_precision() as measurement:
        train_step(engine)
        with pytest.raises(UsageError, match="call it after the context"):
            measurement.report()
        with pytest.raises(UsageError, match="inside itself"), engine.measure_precision():
            pass
        with pytest.raises(UsageError, match="a second step"):
            train_step(engine)
    with pytest.raises(UsageError, match="ended between backward and step"), engine.measure_precision():
        engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match="between backward and step"), engine.measure_precision():
        pass
    engine.step()
    with pytest.raises(ConfigError, match="'nowhere' matches no module"), engine.measure_precision(["nowhere"]):
        pass
    report = measured(engine, lambda: train_step(engine))
    assert report.step == 3
