"""Units of frozen weights: when they are gathered, their products, and who may read and write them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.config.precision import Float8
from dtrain.errors import ContractError, CorruptionError, ModelError, UsageError
from dtrain.precision.float8 import products as float8_products
from dtrain.precision.float8.cast import E4M3, Scaling, dequantize, quantize
from tests.distributed.test_frozen import message
from tests.helpers.adapted_models import DIM, Adapted, batch, float8_weights, start, train
from tests.helpers.bit_flips import flip_bit
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

UNITS = [f"blocks.{number}" for number in range(5)]


def gathers(rank: int, world: int, prefetch: int, recomputes: bool, reshard: bool) -> Counter[str]:
    """Returns the number of all-gathers of each flat buffer in the second step, which has one micro-batch."""
    engine = start(3, "bf16", recomputes=recomputes, prefetch=prefetch, reshard_after_forward=reshard)
    for step in range(2):
        with mock.patch.object(engine.comm.schedule, "record", wraps=engine.comm.schedule.record) as record:
            engine.backward(engine(batch(step, rank)))
            engine.step()
    return Counter(call.args[1] for call in record.call_args_list if call.args[0] == "all_gather")


@pytest.mark.parametrize(("prefetch", "recomputes"), [(0, False), (1, True)])
def test_a_unit_is_gathered_once_a_pass(prefetch: int, recomputes: bool) -> None:
    trained = {f"blocks.{number}/bfloat16" for number in (0, 1, 3, 4)} | {"root/bfloat16"}
    frozen = {f"{unit}/bfloat16/frozen" for unit in UNITS}
    root = {"root/bfloat16/frozen", "root/float32/frozen"}
    # the last 1 + prefetch units stay unsharded from forward to backward
    once = ("root/", *(f"blocks.{number}/" for number in (4, 3, 2)[: 1 + prefetch]))
    want = {label: 1 if label.startswith(once) else 2 for label in trained | frozen | root}
    assert run_ranks(2, gathers, prefetch, recomputes, True) == [want] * 2
    assert run_ranks(2, gathers, prefetch, recomputes, False) == [dict.fromkeys(want, 1)] * 2


class FrozenNorms(Adapted):
    """Trains all but the norms."""

    def __init__(self) -> None:
        super().__init__(DIM)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("norm." not in name and parameter.is_floating_point())


def groups(rank: int, world: int) -> tuple[list[dict[str, set[str]]], set[str]]:
    engines = [start(precision=precision) for precision in ("bf16", "fp32")]
    found = [{group.name: set(group.parameters) for group in engine.sharded.groups} for engine in engines]
    return found, {replica.layout.name for replica in start(3, "bf16", model=FrozenNorms()).sharded.frozen}


def test_only_norms_join_the_root() -> None:
    """A flat buffer of frozen norms in every unit would be mostly padding, and double the all-gathers."""
    names = {name for name, p in Adapted(DIM).named_parameters() if p.is_floating_point()}
    want = []
    for precision in ("bf16", "fp32"):
        in_units = {n for n in names if n.startswith("blocks.") and (precision == "fp32" or ".norm." not in n)}
        of_units = {unit: {name for name in in_units if name.startswith(f"{unit}.")} for unit in UNITS}
        want.append({"": names - in_units, **of_units})
    assert run_ranks(2, groups) == [(want, {"root/float32/frozen"})] * 2


def test_no_product_gives_a_weight_gradient_and_only_those_that_run_are_measured() -> None:
    engine = start(0)
    with mock.patch.object(float8_products, "multiply", wraps=float8_products.multiply) as multiply:
        engine.backward(engine(batch(0, 0)))
    shapes = Counter(tuple(n for one in call.args[:2] for n in one.values.shape) for call in multiply.call_args_list)
    rows = batch(0, 0).numel()
    # one layer's output has the shapes of the other's input gradient, which the first block's first layer does not need
    assert shapes == {(rows, DIM, 2 * DIM, DIM): 5 + 5, (rows, 2 * DIM, DIM, 2 * DIM): 5 + 4}
    engine.step()
    with engine.measure_precision() as measurement:
        train(engine, range(1))
    report: Any = measurement.report()
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
        linear: Any = dtrain.initialize(model, precision=policy, zero_stage=0).module[1]  # type: ignore[index]
        assert len(linear.quantized_weight.copies(linear.weight_parameter)[0].scale) == 96
        assert (linear.quantized_weight.gradient_factor is None) == trained
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(linear(leaf), leaf, grad.bfloat16())
        errors.append(float((dx - exact).norm() / exact.norm()))
    assert 0.001 < errors[0] < 1.1 * errors[1] < 0.1, errors


class Peeks(Adapted):
    """The root reads a frozen weight of a block."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.peek: Callable[[], Tensor] = lambda: torch.zeros(())

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.peek().float()


def misuse(rank: int, world: int) -> dict[str, Any]:
    x, model = batch(0, 0), Peeks()
    block: Any = model.blocks[1]
    engine = start(3, "bf16", model=model)
    said: dict[str, Any] = {}
    model.peek = lambda: block.up.weight.sum()
    said["read"] = message(ModelError, lambda: engine(x))
    raw = dict(model.named_parameters())["blocks.1.up.weight"]
    model.peek = raw.sum
    said["raw"] = bool(engine(x).isnan())
    model.peek = lambda: torch.zeros(())
    with engine.eval():
        engine(x)
    said["between"] = message(UsageError, lambda: model.embedding.weight.sum())
    said["whole"] = bool(model.blocks[3].codes.any())  # type: ignore[operator]
    engine.backward(engine(x))
    raw.data = torch.zeros_like(raw)
    said["replaced"] = message(ContractError, engine.step)
    return said


def test_a_sharded_frozen_weight_read_elsewhere_is_an_error_with_the_fix() -> None:
    for said in run_ranks(2, misuse):
        assert "'blocks.1.up.weight' is read outside the forward of 'blocks.1'" in said["read"]
        assert "keep_gathered=['blocks.1.up.weight']" in said["read"]
        assert said["raw"], "NaN: no number that could be taken for one"
        assert "'embedding.weight' is read outside a forward of the engine" in said["between"]
        assert said["whole"], "the codes are not sharded"
        assert "parameter 'blocks.1.up.weight' no longer lies in its flat buffer" in said["replaced"]


def modify(rank: int, world: int) -> None:
    for stage in (0, 3):
        engine = start(stage)
        before = float8_weights(engine)
        name, other = "blocks.1.up.weight", "blocks.1.down.weight"
        with engine.modify_weights("blocks.1.*"):
            written = engine.module.get_parameter(name)
            assert torch.equal(written, before[name])
            written.mul_(3.7)
            wanted = written.clone()
        after = float8_weights(engine)
        assert torch.equal(after[name], dequantize(quantize(wanted, E4M3, Scaling.TENSOR)))
        assert torch.equal(after[other], before[other]), "written with the same values"
        train(engine, range(2))
        with torch.no_grad():
            said = message(UsageError, dict(engine.module.named_parameters())[name].zero_)
        assert "'blocks.1.up.weight' is read outside a forward of the engine" in said


def test_they_are_written_in_modify_weights() -> None:
    run_ranks(2, modify)


def flipped(rank: int, world: int, stage: int, what: str) -> list[Any]:
    engine = start(stage)
    train(engine, range(2))
    if rank == world - 1:
        weights = next(w for w in engine.states.frozen_float8 if "blocks.1.down.weight" in w.names)
        shard = next(s for s in weights.codes() if s.name == "blocks.1.down.weight" and s.kind == what)
        flip_bit(shard.data, 0, 23 if what == "frozen_scale" else 5)
    engine.comm.barrier()
    with pytest.raises(CorruptionError) as caught:
        train(engine, range(2, 3))
    return [(item.ranks, item.tensor, item.kind) for item in caught.value.corruptions]


@pytest.mark.parametrize(("stage", "what"), [(0, "frozen"), (3, "frozen"), (3, "frozen_scale")])
def test_an_audit_names_a_flipped_bit(stage: int, what: str) -> None:
    assert run_ranks(2, flipped, stage, what) == [[((1,), "blocks.1.down.weight", what)]] * 2
