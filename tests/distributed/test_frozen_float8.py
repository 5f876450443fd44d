"""Frozen weights in FP8: one byte a parameter, two products, the same bits at every stage and world size."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.checkpoint import CheckpointReader, verify
from dtrain.checkpoint.format.integrity import verify_checkpoint
from dtrain.config.engines import Native
from dtrain.config.precision import Float8
from dtrain.engine.native import NativeEngine
from dtrain.errors import CheckpointError, CorruptionError, UsageError
from dtrain.precision.float8 import products as float8_products
from dtrain.precision.float8.cast import E4M3, dequantize, quantize
from dtrain.precision.float8.linear import Float8Linear
from tests.distributed.test_frozen import corrupt, message
from tests.distributed.test_memory import live_storages
from tests.helpers.adapted_models import Adapted, batch
from tests.helpers.bit_flips import flip_bit
from tests.helpers.float8_models import RECIPES
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

DIM = 32
LINEARS = [f"blocks.{number}.{name}" for number in range(5) for name in ("up", "down")]
NUM_WEIGHTS = 10 * 2 * DIM * DIM


def start(
    stage: int = 3,
    recipe: str = "tensorwise",
    *,
    dim: int = DIM,
    seed: int = 0,
    precision: str = "fp8",
    frozen_source: Any = None,
    **options: Any,
) -> NativeEngine:
    torch.set_num_threads(1)
    policy = dtrain.PrecisionPolicy.named(precision, float8=Float8(recipe))
    engine = dtrain.initialize(
        Adapted(dim, seed, recomputes=options.pop("recomputes", False)),
        engine=Native(zero_stage=stage, **options), precision=policy, seed=5, max_grad_norm=0.5, audit=1,
        optimizer=dtrain.AdamW(lr=0.01), frozen_source=frozen_source,
    )  # fmt: skip
    assert isinstance(engine, NativeEngine)
    return engine


def train(engine: NativeEngine, steps: range = range(3)) -> list[float]:
    """Two micro-batches a step of all ranks together, of unequal weight."""
    losses = []
    for step in steps:
        for index in engine.accumulate(range(engine.rank, 2, engine.world_size)):
            engine.backward(engine(batch(step, index)), weight=1.0 + index)
        losses.append(engine.step().loss)
    return losses


def frozen_weights(engine: NativeEngine) -> dict[str, Tensor]:
    """The weights that the FP8 products compute with; all ranks call."""
    return {name: values.clone() for weights in engine.frozen_float8 for name, values in weights.full()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- bits --------------------------------------------------------------------------------------------------------------


def bits(rank: int, world: int, recipe: str, stages: range) -> list[tuple[list[float], Any, Any]]:
    """Losses, masters and frozen weights by stage; recomputation gathers them again, and must not change a bit."""
    found = []
    for stage in stages:
        engine = start(stage, recipe, reproducible=True, recomputes=stage == 3)
        assert set(LINEARS) == set(engine.contract.float8_modules)
        before = frozen_weights(engine)
        losses = train(engine)
        assert same(frozen_weights(engine), before)
        assert engine.memory()["unsharded"] == 0
        found.append((losses, engine.master_state(), before))
    return found


def test_every_stage_and_world_size_has_the_same_bits_cast_once_from_the_unrounded_weights() -> None:
    own, curves = Adapted(DIM), []
    for recipe in RECIPES:
        ((losses, masters, frozen),) = run_ranks(1, bits, recipe, range(1))[0]
        curves.append(losses)
        for other_losses, other_masters, other_frozen in run_ranks(2, bits, recipe, range(4))[0]:
            assert other_losses == losses, recipe
            assert same(other_masters, masters)
            assert same(other_frozen, frozen)
        for name, values in frozen.items():
            weight = own.get_parameter(name).detach()
            assert torch.equal(values, dequantize(quantize(weight, E4M3, rowwise=recipe == "rowwise"))), name
            assert not torch.equal(values, weight)
    assert curves[0] != curves[1], "the control: recipes differ"


# -- products ----------------------------------------------------------------------------------------------------------


def test_no_product_gives_a_weight_gradient_and_only_those_that_run_are_measured() -> None:
    engine = start(0)
    shapes: Counter[tuple[int, ...]] = Counter()
    real = float8_products.multiply

    def counted(left: Any, right: Any, *args: Any, **kwargs: Any) -> Tensor:
        shapes[tuple(left.values.shape) + tuple(right.values.shape)] += 1
        return real(left, right, *args, **kwargs)

    with mock.patch.object(float8_products, "multiply", counted):
        engine.backward(engine(batch(0, 0)))
    rows = batch(0, 0).numel()
    # one layer's output has the shapes of the other's input gradient, which the first block's first layer does not need
    assert shapes == {(rows, DIM, 2 * DIM, DIM): 5 + 5, (rows, 2 * DIM, DIM, 2 * DIM): 5 + 4}
    engine.step()
    with engine.measure_precision() as measurement:
        train(engine, range(1))
    report = measurement.report()
    assert report is not None
    products = Counter((one.product, tuple(operand.operand for operand in one.operands)) for one in report.float8)
    assert products == {("fprop", ("input",)): 10, ("dgrad", ("gradient",)): 9}, "no weight: it has no master"


def test_one_row_wise_copy_gives_the_input_gradient_of_two() -> None:
    """Its error is no larger, though the weights' rows have magnitudes from 1 to 1e-3."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator) * torch.logspace(0, -3, 96)[:, None]
    x, grad = torch.randn(40, 64, generator=generator), torch.randn(40, 96, generator=generator)
    exact = grad @ weight
    errors = []
    for trained in (False, True):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 96, bias=False))
        model.extra = torch.nn.Linear(64, 64)  # the last product
        model[1].weight = torch.nn.Parameter(weight.clone(), requires_grad=trained)
        policy = dtrain.PrecisionPolicy.named("fp8", float8=Float8("rowwise"))
        engine = dtrain.initialize(model, precision=policy, zero_stage=0)
        linear = engine.module[1]  # type: ignore[index]
        assert isinstance(linear, Float8Linear)
        assert len(linear.quantized_weight.copies(linear.weight_parameter)[0].scale) == 96
        assert (linear.quantized_weight.gradient_factor is None) == trained
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(linear(leaf), leaf, grad.bfloat16())
        errors.append(float((dx - exact).norm() / exact.norm()))
    assert 0.001 < errors[0] < 1.1 * errors[1] < 0.1, errors


# -- memory ------------------------------------------------------------------------------------------------------------

WIDE = 256


def memory(rank: int, world: int) -> dict[tuple[str, int], tuple[int, int, int]]:
    """Returns bytes of frozen parameters, by the formula, and bytes that no kind accounts for."""
    found = {}
    for recipe, stage in (("tensorwise", 0), ("tensorwise", 3), ("rowwise", 2), ("rowwise", 3)):
        gc.collect()
        gc.freeze()  # objects that exist already are neither searched nor counted
        engine = start(stage, recipe, dim=WIDE)
        train(engine, range(1))
        gc.collect()
        held = engine.memory()
        unknown = sum(live_storages(engine.comm).values()) - sum(held.values())
        found[recipe, stage] = held["frozen"], engine.memory_formula()["frozen"], unknown
    return found


def test_they_take_a_byte_each() -> None:
    frozen = {name: p for name, p in Adapted(WIDE).named_parameters() if not p.requires_grad}
    float8 = {name: p for name, p in frozen.items() if name.removesuffix(".weight") in LINEARS}
    others = sum(p.numel() * (1 if p.dtype == torch.int8 else 4 if "norm" in n else 2) for n, p in frozen.items())
    total = others - sum(p.numel() for p in float8.values())  # others has counted them as BF16
    codes = frozen["blocks.3.codes"].numel()  # int8 is no floating point, so it is never sharded
    for found in run_ranks(2, memory):
        for (recipe, stage), (held, formula, unknown) in found.items():
            assert formula == (total if stage < 3 else -(-total // 2))
            share = held if stage < 3 else held - codes / 2
            scales = 4 * sum(p.shape[0] if recipe == "rowwise" else 1 for p in float8.values())  # on every rank
            assert formula <= share <= 1.02 * formula + scales, stage
            assert abs(unknown) < 32 * 1024, stage


# -- checkpoints -------------------------------------------------------------------------------------------------------

State = tuple[dict[str, Tensor], list[float], dict[str, Tensor]]


def save(rank: int, world: int, folder: str, recipe: str) -> State:
    engine = start(3, recipe, reproducible=True)
    train(engine, range(1))
    engine.save(folder)
    return frozen_weights(engine), train(engine, range(1, 3)), engine.master_state()


def load(rank: int, world: int, folder: str, stage: int, recipe: str) -> State:
    engine = start(stage, recipe, seed=1, reproducible=True)  # other weights, frozen ones too
    engine.load(folder)
    engine.save(f"{folder}/again-{world}-{stage}")
    return frozen_weights(engine), train(engine, range(1, 3)), engine.master_state()


def fails_to_load(rank: int, world: int, path: str, misreads: bool) -> list[str]:
    said = []
    real = CheckpointReader.read_into

    def read_into(reader: CheckpointReader, targets: Any) -> None:
        targets = list(targets)
        real(reader, targets)
        for target in targets:
            if misreads and target.name == "blocks.1.up.weight" and target.data.dtype == torch.float32:
                target.data.view(-1)[-1] += 0.05

    with mock.patch.object(CheckpointReader, "read_into", read_into):
        for stage in (0, 3):
            engine = start(stage, seed=1, reproducible=True)
            said.append(message(CheckpointError, functools.partial(engine.load, path)))
    return said


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_has_their_values_and_a_load_proves_what_it_cast(recipe: str, tmp_path: Path) -> None:
    frozen, losses, masters = run_ranks(2, save, str(tmp_path), recipe)[0]
    (path,) = tmp_path.glob("step*")
    entries = {entry.name: entry for entry in verify_checkpoint(path).tensors if entry.kind == "frozen"}
    assert {entries[f"{name}.weight"].dtype for name in LINEARS} == {torch.bfloat16}
    for world, stage in ((1, 0), (2, 3)):
        got = run_ranks(world, load, str(tmp_path), stage, recipe)[0]
        assert same(got[0], frozen)
        assert got[1] == losses
        assert same(got[2], masters)
        assert verify(tmp_path / f"again-{world}-{stage}").checkpoints
    if recipe == "rowwise":
        return
    for said in run_ranks(2, fails_to_load, str(path), True):
        for text in said:
            assert "the frozen FP8 weights of 'blocks.1/float8_e4m3fn/frozen'" in text
            assert "are not the cast of what was saved" in text
    corrupt(path, "blocks.1.up.weight")
    for said in run_ranks(2, fails_to_load, str(path), False):
        assert all("frozen:blocks.1.up.weight has the fingerprint" in text for text in said)


def test_checkpoints_go_between_precisions(tmp_path: Path) -> None:
    """BF16 weights are cast; those that were FP8 stay what they are, because BF16 has them exactly."""
    start(2, precision="bf16").save(tmp_path / "bf16")
    float8 = start(3)
    float8.load(tmp_path / "bf16")
    weight = Adapted(DIM).get_parameter("blocks.1.up.weight").detach().bfloat16()
    held = frozen_weights(float8)["blocks.1.up.weight"]
    assert torch.equal(held, dequantize(quantize(weight, E4M3, rowwise=False)))
    float8.save(tmp_path / "fp8")
    bf16 = start(2, precision="bf16", seed=1)
    bf16.load(tmp_path / "fp8")
    assert torch.equal(bf16.module.get_parameter("blocks.1.up.weight").float(), held)


# -- writes, faults, other engines -------------------------------------------------------------------------------------


def modify(rank: int, world: int) -> None:
    for stage in (0, 3):
        engine = start(stage)
        before = frozen_weights(engine)
        name, other = "blocks.1.up.weight", "blocks.1.down.weight"
        with engine.modify_weights("blocks.1.*"):
            written = engine.module.get_parameter(name)
            assert torch.equal(written, before[name])
            written.mul_(3.7)
            wanted = written.clone()
        after = frozen_weights(engine)
        assert torch.equal(after[name], dequantize(quantize(wanted, E4M3, rowwise=False)))
        assert torch.equal(after[other], before[other]), "written with the same values"
        train(engine, range(2))
        with torch.no_grad():
            dict(engine.module.named_parameters())[name].zero_()
        engine.backward(engine(batch(0, 0)))
        assert "'blocks.1.up.weight' was written to while" in message(UsageError, engine.step)


def test_they_are_written_in_modify_weights() -> None:
    run_ranks(2, modify)


def flipped(rank: int, world: int, stage: int, what: str) -> list[Any]:
    engine = start(stage)
    train(engine, range(2))
    if rank == world - 1:
        weights = next(w for w in engine.frozen_float8 if "blocks.1.down.weight" in w.names)
        shard = next(s for s in weights.codes() if s.name == "blocks.1.down.weight" and s.kind == what)
        flip_bit(shard.data, 0, 23 if what == "frozen_scale" else 5)
    engine.comm.barrier()
    with pytest.raises(CorruptionError) as caught:
        train(engine, range(2, 3))
    return [(item.ranks, item.tensor, item.kind) for item in caught.value.corruptions]


@pytest.mark.parametrize(("stage", "what"), [(0, "frozen"), (3, "frozen"), (3, "frozen_scale")])
def test_an_audit_names_a_flipped_bit(stage: int, what: str) -> None:
    assert run_ranks(2, flipped, stage, what) == [[((1,), "blocks.1.down.weight", what)]] * 2


def trained_by(rank: int, world: int, name: str) -> list[float]:
    stage = {"native": 3, "ddp": 0, "fsdp2": 2}[name]
    engine = dtrain.initialize(
        Adapted(DIM), engine=name, zero_stage=stage, precision="fp8", seed=5, max_grad_norm=0.5,
        optimizer=dtrain.AdamW(lr=0.01),
    )  # fmt: skip
    assert set(LINEARS) == set(engine.contract.float8_modules)
    losses = []
    for step in range(3):
        engine.backward(engine(batch(step, rank)))
        losses.append(engine.step().loss)
    return losses


def test_engines_agree_on_the_products() -> None:
    """Others hold the frozen weights as the trained ones, and cast them where the native engine holds FP8."""
    native, ddp, fsdp2 = (run_ranks(2, trained_by, name)[0] for name in ("native", "ddp", "fsdp2"))
    assert ddp == pytest.approx(native, rel=2e-2)
    assert fsdp2 == pytest.approx(native, rel=2e-2)
    assert native[0] > native[-1]
