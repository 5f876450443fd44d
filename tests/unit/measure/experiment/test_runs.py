"""Short runs of the experiments show what they are about; formats against the noise of FP32 on small tasks."""

from __future__ import annotations

from dataclasses import replace
from math import hypot
from statistics import stdev

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from dtrain.config.optim import SGD
from dtrain.engine.initialize import initialize
from dtrain.measure.experiment import accumulation, formats, gradient_histogram, loss_scaling, master_weights
from dtrain.measure.experiment.accumulation import MATMUL, SUMS, VECTORS
from dtrain.measure.experiment.formats import PRECISIONS, FormatCurves, FormatsResult, TaskComparison, draw, run
from dtrain.measure.experiment.gradient_histogram import SCALES
from dtrain.measure.experiment.master_weights import WithoutMasters
from dtrain.measure.experiment.networks import convnet, detector, regression
from dtrain.measure.experiment.tasks import TASKS, ProductShares, SmallTask, TaskCurve
from dtrain.planning.calls import CallRecorder
from dtrain.planning.products import products
from dtrain.precision.formats import BF16, FP16, FP32
from dtrain.precision.fp16_products import fp16_products
from dtrain.tasks import IGNORE_INDEX


def test_accumulation() -> None:
    result = accumulation.run(longest=4096, trials=16)
    assert len(result.cases) == len(VECTORS) * (len(SUMS) + 1)
    for case in result.cases:
        assert len(case.errors) == len(case.bounds) == len(result.lengths) == 12
        for error, bound in zip(case.errors, case.bounds, strict=True):
            assert bound is None or error <= bound, case
    place = result.lengths.index(16)
    for floats in SUMS:
        case = result.of("worst case", floats.name)
        bound = case.bounds[place]
        assert bound is not None
        assert 0.8 * bound < case.errors[place] <= bound
    errors = {floats: result.error("positive", floats.name, 4096) for floats in SUMS}
    assert (errors[FP16] > 0.05, errors[BF16] > 0.8, errors[FP32] < 1e-5) == (True, True, True)
    for length in result.lengths:  # a matmul of FP16 tensors sums in FP32
        assert result.error("positive", MATMUL, length) <= FP16.unit_roundoff + 1e-5


@pytest.mark.exhaustive
def test_loss_scaling() -> None:
    """60 steps: the fewest after which FP32 is under its bound by a quarter."""
    result = loss_scaling.run(steps=60, seeds=(0,), scales=("none", "dynamic"))
    assert result.fp32 < 0.12  # of the variance
    assert result.final("fp16", "none") > 0.85
    (fp32,) = result.of("fp32", "none")
    (fp16,) = result.of("fp16", "dynamic")
    assert result.final("fp16", "dynamic") == pytest.approx(result.fp32, rel=0.15)
    assert fp16.curve.skipped <= 2
    assert len(fp16.curve.losses) == 6
    assert fp16.curve.losses == pytest.approx(fp32.curve.losses, rel=0.15)


def test_a_scale_recovers_the_gradients_of_a_detector_and_a_classifier_needs_none() -> None:
    found, other = gradient_histogram.run([detector(), convnet()], steps=30).networks
    counted = found.counted()
    assert counted.total == 30 * 16 * (2 * 8 * 16**2 + 2 * 16 * 8**2 + 64 + 3)
    assert 0.5 < counted.zeros / counted.total < 0.8  # 66.8 % in the paper's detector
    shares = [found.flushed(scale) for scale in SCALES]
    assert shares == sorted(shares, reverse=True)
    assert (SCALES[0], SCALES[-1]) == (1, 32768)
    assert shares[0] > 0.999
    assert shares[-1] < 0.05
    assert counted.overflowing(FP16, SCALES[-1]) == 0
    assert other.flushed() < 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_is_the_loop_that_updates_rounded_weights(dtype: torch.dtype) -> None:
    """The same bits as a loop without dtrain that keeps nothing but 16-bit weights."""
    start, lr, scale = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), 2.0**-8, 2.0**6
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    model = nn.Linear(8, 8, bias=False)
    model.weight.data.copy_(start)
    rule = SGD(lr=lr, momentum=0.0)
    engine = initialize(model, optimizer=rule, precision=dtype, loss_scale=scale, max_grad_norm=None, seed=0)
    observer = WithoutMasters()
    observer.round(engine)
    weight = start.to(dtype)
    updates = lost = 0
    for _ in range(20):
        engine.backward(engine(x).square().mean())
        engine.step()
        observer.round(engine)
        leaf = weight.clone().requires_grad_()
        ((x.to(dtype) @ leaf.T).float().square().mean() * scale).backward()
        assert leaf.grad is not None
        moved = weight.float() - lr * (leaf.grad.float() / scale)
        updates += int((moved != weight.float()).sum())
        lost += int(((moved != weight.float()) & (moved.to(dtype) == weight)).sum())
        weight = moved.to(dtype)
    assert torch.equal(engine.master_state()["weight"], weight.float())
    assert (observer.updates, observer.lost) == (updates, lost)
    assert 0 < lost < updates


def test_norms_keep_their_fp32_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    engine = initialize(model, precision="bf16", seed=0)
    value = torch.tensor([1.0001, 1.0, 1.0, 1.0])
    with engine.modify_weights():
        model[1].weight.copy_(value)
    WithoutMasters().round(engine)
    state = engine.master_state()
    assert torch.equal(state["1.weight"], value)
    assert torch.equal(state["0.weight"], state["0.weight"].bfloat16().float())


@pytest.mark.exhaustive
def test_small_updates_are_lost_without_masters_in_bf16_first() -> None:
    rates = (1e-5, 1e-3)
    result = master_weights.run([(regression(), rates, (0,))], steps=60)
    assert {len(curve.losses) for item in result.trainings for curve in (item.with_masters, item.without)} == {6}
    found = {(name, lr): result.of("regression", name, lr)[0] for name in ("fp16", "bf16") for lr in rates}
    for name, updates, progress in (("fp16", 0.7, 0.6), ("bf16", 0.95, 0.9)):
        assert found[name, 1e-5].lost_updates > updates
        assert found[name, 1e-5].lost_progress > progress
    assert found["fp16", 1e-3].lost_updates < 0.1 < found["bf16", 1e-3].lost_updates
    assert abs(found["fp16", 1e-3].lost_progress) < 0.1
    for lr in rates:  # with masters both formats train alike
        fp16, bf16 = found["fp16", lr], found["bf16", lr]
        progress = fp16.untrained - fp16.with_masters.final
        assert progress > 0
        assert abs(bf16.with_masters.final - fp16.with_masters.final) < 0.02 * progress


def shorter(task: SmallTask, steps: int, every: int, *more: str) -> SmallTask:
    words = f"launch.device=cpu train.steps={steps} train.eval_every={every} train.eval_batches=4"
    return replace(task, overrides=" ".join((task.overrides, words, *more)))


def curves(precision: str, *losses: list[float]) -> FormatCurves:
    return FormatCurves(precision, [TaskCurve(item, None, 1) for item in losses])


def compared(bf16: FormatCurves) -> TaskComparison:
    fp32, same = [[5.0, 1.0], [6.0, 3.0]], [[5.0, 1.0], [6.0, 3.0]]
    others = [bf16, curves("fp16", *same), curves("fp8", *same)]
    perturbed = curves("fp32", [5.5, 1.6]).curves
    return TaskComparison("any", "", [1, 2], ProductShares(0.5, 0.25, 1, 2), curves("fp32", *fp32), perturbed, others)


def test_gaps_are_in_units_of_seed_and_rounding_noise_at_that_step() -> None:
    item = compared(curves("bf16", [5.0, 2.0], [7.0, 3.0]))
    start, end = hypot(stdev([5.0, 5.5]), stdev([5.0, 6.0])), hypot(stdev([1.0, 1.6]), stdev([1.0, 3.0]))
    assert (item.noise(0).unit, item.noise().unit) == (start, end)
    assert item.gaps("bf16", 0) == [0.0, 1 / start]
    assert item.gaps("bf16") == [1 / end, 0.0]
    assert item.mean_gaps("bf16") == [0.5 / start, 0.5 / end]


def test_a_worse_format_is_told_from_noise() -> None:
    item = compared(curves("bf16", [5.0, 9.0], [6.0, 11.0]))
    assert formats.finding(FormatsResult([0, 1], [item])) == (
        "Outside FP32's own noise: BF16 on any (+5.4 units); other mean gaps are at most 0.0 units at the end, "
        "0.0 at any step"
    )
    same = compared(curves("bf16", [5.0, 1.0], [6.5, 3.0]))
    assert formats.finding(FormatsResult([0, 1], [same])) == (
        "No format can be told from FP32's own noise; mean gaps are at most 0.0 units at the end, 0.3 at any step"
    )
    rows = formats.tables(FormatsResult([0, 1], [item]))[0].rows
    assert rows[3][:3] == ("", "fp8", "50% fp8 (Linears: 1 of 2); convolutions, 25%, bf16")


SMALL = ("train.global_batch_size=8", "train.micro_batch_size=8")
SHARES = {  # of the products: in convolutions, and in FP8; lower and upper bounds
    "convnet": (0.99, 1.0, 0.0, 0.0),
    "diffusion": (0.9, 1.0, 0.0, 0.1),
    "regression": (0.0, 0.0, 0.1, 1.0),
}


@pytest.mark.exhaustive
def test_every_task_trains_in_every_format_and_is_drawn() -> None:
    chosen = [shorter(task, 2, 1, *SMALL) for task in TASKS]
    result = run(chosen, seeds=(0, 1))
    for item in result.tasks:
        assert item.steps == [1, 2]
        assert item.noise().seed > 0
        assert (item.fp32.metric is None) == (not item.metric)
        finals = {tuple(found.losses()) for found in (item.fp32, *item.formats)}
        # without an FP8 Linear, FP8 is BF16 bit by bit
        assert len(finals) == 1 + len(PRECISIONS) - (item.shares.num_float8 == 0)
        if item.task in SHARES:
            least, most, least_float8, most_float8 = SHARES[item.task]
            assert least <= item.shares.convolutions <= most
            assert least_float8 <= item.shares.float8 <= most_float8
    assert len(formats.tables(result)[0].rows) == len(chosen) * (1 + len(PRECISIONS))
    draw(figure := Figure(), result)
    assert len(figure.axes) >= len(chosen)


@pytest.mark.exhaustive
def test_a_convnet_follows_its_fp32_curve_in_every_format() -> None:
    whole = next(task for task in TASKS if task.name == "convnet")
    task = shorter(whole, 60, 15, "data.size=8", "schedule.warmup_steps=2", "optim.lr=2e-3")
    fp32, *others = (task.train(precision, 0) for precision in ("fp32", *PRECISIONS))
    assert fp32.losses[-1] < 0.8 * fp32.losses[0]
    for precision, curve in zip(PRECISIONS, others, strict=True):
        assert curve.losses != fp32.losses
        # not at a larger learning rate, where FP32 parts from itself as much if its weights begin an ulp apart
        assert curve.losses == pytest.approx(fp32.losses, rel=0.02), precision
        assert curve.skipped <= 2


@pytest.mark.parametrize(
    "task",
    [pytest.param(task, marks=[pytest.mark.exhaustive] if task.name != "convnet" else []) for task in TASKS],
    ids=lambda task: task.name,
)
def test_all_products_in_fp16_are_emulated(task: SmallTask) -> None:
    task = shorter(task, 1, 1, *SMALL)
    session = task.session("fp16", 0)
    model, emulated = session.engine.module, fp16_products(session.engine.device, ["fp16"])
    with CallRecorder(model) as computed, emulated, CallRecorder(model) as asked:
        session.step()
    assert {product.format for product in products(asked.calls)} == {"fp16"}
    assert {product.format for product in products(computed.calls)} == {"fp32"}
    assert len(products(asked.calls)) == len(products(computed.calls)) > 0


def test_a_task_weighs_micro_batches_by_the_targets_that_count() -> None:
    words = ("train.global_batch_size=4", "train.micro_batch_size=2")
    session = shorter(TASKS[0], 1, 1, *words).session("fp32", 0)
    batch = next(session.loader)
    batch[0]["targets"][:, 1:] = IGNORE_INDEX
    whole = {name: torch.cat([micro[name] for micro in batch]) for name in batch[0]}
    with torch.no_grad():
        loss = float(session.engine.module(**whole).loss)
    assert session.step(batch).loss == pytest.approx(loss, rel=1e-6)
