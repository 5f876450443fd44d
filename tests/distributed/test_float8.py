"""FP8 on the native engine: the same bits at every stage and world size, through checkpoints and skipped steps."""

from __future__ import annotations

import functools
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import dtrain
from dtrain.config.precision import Float8
from dtrain.distributed.transport.choose import make_communicator
from dtrain.engine.adapters.native import NativeEngine
from dtrain.errors import ContractError, UsageError
from dtrain.precision.float8.cast import E4M3, Scaling, quantize
from dtrain.precision.float8.options import Recipe
from tests.distributed.test_memory import Stack as WideStack
from tests.distributed.test_memory import measure
from tests.engines.helpers import state_digests
from tests.helpers import unshard_models
from tests.helpers.net import Net
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

DIM = 30
WIDE = 120  # else padding to blocks of 128 would cost more than it may
RECIPES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise")


def block(dim: int) -> nn.Module:
    """Two FP8 products with biases, after a norm."""
    parts = {"norm": nn.LayerNorm(dim), "up": nn.Linear(dim, 3 * dim), "down": nn.Linear(3 * dim, dim)}
    return Net(lambda net, x: x + net.down(torch.tanh(net.up(net.norm(x)))), **parts)


class Model(nn.Module):
    """Blocks between a first and a last product, which stay in BF16."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(block(dim) for _ in range(2))
        self.last = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).float().square().mean()


def build(dim: int = DIM) -> Model:
    """Weights of magnitudes so different that many are subnormal in FP8, where a bit of the scale shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Model(dim)
        with torch.no_grad():
            for block in model.blocks:
                for linear in (block.up, block.down):
                    linear.weight.mul_(10 ** -(0.7 + 5 * torch.rand_like(linear.weight)))
    return model


def start(recipe: str = "tensorwise", model: nn.Module | None = None, **options: Any) -> Any:
    """The engine of a model; a learning rate at which the largest weights change their binade within a few steps."""
    precision = dtrain.PrecisionPolicy.named("fp8", float8=Float8(recipe))
    model = model or build(width(recipe))
    rate = 0.01 * DIM / model.first.in_features if isinstance(model, Model) else 0.01
    defaults = {"precision": precision, "seed": 1, "max_grad_norm": 0.1, "optimizer": dtrain.AdamW(lr=rate)}
    return dtrain.initialize(model, **defaults | options)


def width(recipe: str) -> int:
    return WIDE if recipe == "blockwise" else DIM


def batch(step: int, index: int, dim: int = DIM) -> Tensor:
    return torch.randn(6, dim, generator=torch.Generator().manual_seed(100 * step + index))


def train(engine: NativeEngine, steps: Sequence[int]) -> list[float]:
    """Returns the losses of ``steps``, each of twelve micro-batches of unequal weight on all ranks together."""
    losses = []
    for step in steps:
        for index in engine.accumulate(range(engine.rank, 12, engine.world_size)):
            engine.backward(engine(batch(step, index, engine.module.first.in_features)), weight=1.0 + 0.1 * index)
        losses.append(engine.step().loss)
    return losses


RULES = {"blocks.0.up": "fp16", "blocks.1.down": "fp32", "first": "fp8"}
POLICIES = {
    **{recipe: dtrain.PrecisionPolicy.named("fp8", float8=Float8(recipe)) for recipe in RECIPES},
    "rules": dtrain.PrecisionPolicy.named("fp8", rules=RULES),
}


def bits_of_stages(rank: int, world: int, stages: range) -> dict[str, list[tuple[Any, ...]]]:
    found: dict[str, list[tuple[Any, ...]]] = {name: [] for name in POLICIES}
    for name, own in found.items():
        for stage in stages:
            engine = start(model=build(width(name)), precision=POLICIES[name], zero_stage=stage, reproducible=True)
            losses = train(engine, range(4))
            buffers = [layout.name for layout in engine.sharded.layouts]
            own.append((losses, state_digests(engine), engine.loss_scale.scale, buffers))
            assert engine.memory()["unsharded"] == 0
    return found


@functools.cache
def bits(world: int, stages: range) -> dict[str, list[tuple[Any, ...]]]:
    found: list[dict[str, list[tuple[Any, ...]]]] = run_ranks(world, bits_of_stages, stages)
    return found[0]


@pytest.mark.parametrize(
    ("world", "stages"),
    [(2, range(3, 4)), *(pytest.param(world, range(4), marks=pytest.mark.exhaustive) for world in (2, 3, 4))],
)
def test_equal_bits(world: int, stages: range) -> None:
    single = bits(1, range(1))
    for name, (reference,) in single.items():
        losses = reference[0]
        assert losses[-1] < 0.8 * losses[0], "it learns"
        assert [found[:3] for found in bits(world, stages)[name]] == [reference[:3]] * len(stages), name
    assert len({str(single[recipe]) for recipe in RECIPES}) == len(RECIPES), "the control"
    root = [f"root/{dtype}" for dtype in ("float8_e4m3fn", "bfloat16", "float16", "float32")]
    blocks = ["blocks.0/float8_e4m3fn", "blocks.0/float16", "blocks.1/float8_e4m3fn"]
    assert single["rules"][0][3] == [*root, *blocks], "buffers of four formats"


def stage_3_gathers_what_odd_models_need(rank: int, world: int) -> None:
    unshard_models.DIM = DIM  # what is too small is no FP8 product
    for recipe, name in zip(RECIPES[:2], ("checkpointed_inside", "interleaved"), strict=True):
        found = []
        for options in ({"zero_stage": 2}, {"zero_stage": 3, "keep_gathered": ["blocks.1"], "prefetch": 2}):
            engine = start(recipe, unshard_models.build(name), reproducible=True, **options)
            assert len(engine.contract.float8_modules) >= 2, name
            losses = []
            for step in range(2):
                for index in engine.accumulate([rank, world + rank]):
                    engine.backward(engine(unshard_models.batch(step, index)))
                losses.append(engine.step().loss)
            found.append((losses, state_digests(engine)))
        assert found[0] == found[1], name


def replicas_are_the_masters(rank: int, world: int) -> None:
    """After some steps each Linear finds what its master gives when it is cast whole, once, with one scale."""
    for recipe in RECIPES:
        engine = start(recipe, zero_stage=2)
        for step in range(3):
            train(engine, [step])
            masters = engine.master_state()
            for name in engine.contract.float8_modules if rank == 0 else ():
                assert_is_cast_of(engine.module.get_submodule(name), masters[f"{name}.weight"], recipe)


def assert_is_cast_of(module: Any, master: Tensor, recipe: str) -> None:
    found = module.quantized_weight.copies(module._parameters["weight"])
    rows = quantize(master, E4M3, Recipe(recipe).weight_scaling)
    want = [(rows.values, rows.scale)]
    if recipe == "rowwise":
        columns = quantize(master.t(), E4M3, Scaling.ROWS)
        want.append((columns.values.t(), columns.scale))
    for own, (values, scale) in zip(found, want, strict=False):
        assert torch.equal(own.values.view(torch.uint8), values.contiguous().view(torch.uint8))
        assert torch.equal(own.scale, scale)
    error = (module.weight - master).abs()
    assert (error <= 0.08 * master.abs() + 0.002 * master.abs().amax()).all(), "half a unit of E4M3, and BF16"
    with pytest.raises(UsageError, match="is read outside a forward"):  # who reads past the module gets no numbers
        module._parameters["weight"].isnan()


@pytest.mark.parametrize(("recipe", "how"), [("tensorwise", "update"), ("rowwise", "load")])
def test_an_overflow_in_a_weight_is_not_hidden(recipe: str, how: str, tmp_path: Path) -> None:
    """E4M3 has no Inf, and the cast makes 448 of it, which nobody would notice."""
    engine = start(recipe, audit=0)  # which would refuse to save such a master
    train(engine, [0])
    buffer = next(buffer for buffer in engine.sharded.buffers if buffer.layout.dtype == E4M3)
    buffer.master[buffer.layout.slots[0].start + 17] = math.inf
    if how == "update":
        (_,) = train(engine, [1])  # computes with the replicas of before
    else:
        engine.save(tmp_path)
        engine.load(tmp_path)
    engine.backward(engine(batch(2, 0)))
    outcome = engine.step()
    assert (outcome.applied, outcome.reason) == (False, "nonfinite_loss")


def _up(engine: NativeEngine) -> Any:
    return engine.module.get_submodule("blocks.0.up")


def _replace(engine: NativeEngine) -> None:
    _up(engine)._parameters["weight"].data = torch.ones(3 * DIM, DIM).bfloat16()


@torch.no_grad()
def _write(engine: NativeEngine) -> None:
    """Its parameter holds no weight: the write would be lost, and what guards its neighbours with it."""
    dict(engine.module.named_parameters())["blocks.0.up.weight"].zero_()


CHANGES: list[tuple[Callable[[NativeEngine], Any], type[Exception], str]] = [
    (lambda engine: _up(engine).half(), UsageError, r"\.weight' is read outside"),
    (_replace, ContractError, r"\.weight' no longer lies"),
    (lambda engine: _up(engine)._parameters["weight"].requires_grad_(False), ContractError, r"\.weight' was frozen"),
    (_write, UsageError, r"\.weight' is read outside .* engine.modify_weights"),
    (lambda engine: engine.module.load_state_dict(engine.module.state_dict()), UsageError, "is an FP8 replica"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), CHANGES)
def test_a_weight_that_changes_past_the_engine_is_noticed(
    change: Callable[[NativeEngine], Any], error: type[Exception], message: str
) -> None:
    engine = start(zero_stage=2)
    engine.backward(engine(batch(0, 0)))
    with pytest.raises(error, match=message):  # noqa: PT012
        change(engine)
        engine.step()


def modify(rank: int, world: int) -> None:
    for stage in (1, 3) if world > 1 else (2,):
        engine = start(zero_stage=stage)
        name = "blocks.0.up.weight"
        if stage == 3:
            with pytest.raises(UsageError, match=r"'blocks\.0\.up\.weight' is read outside a forward"):
                _up(engine).weight.sum()
        engine.backward(engine(batch(0, 0)))
        engine.step()
        before = engine.master_state()
        with engine.modify_weights("blocks.0"):
            shown = _up(engine).weight
            assert shown.dtype == torch.float32
            shown.mul_(0.5)
            block = engine.module.get_submodule("blocks.0")
            block.load_state_dict(block.state_dict())
        after = engine.master_state()
        for other, old in before.items():
            assert torch.equal(after[other], old / 2 if other == name else old), other
        loss = engine(batch(0, 0))
        folder = tempfile.mkdtemp() if rank == 0 else ""
        path = engine.save(engine.comm.exchange_text(folder)[0])
        fresh = start(zero_stage=stage)
        fresh.load(path)
        assert torch.equal(fresh(batch(0, 0)), loss), "the replicas follow the masters"


@pytest.mark.parametrize(
    ("world", "check"),
    [(2, stage_3_gathers_what_odd_models_need), (2, replicas_are_the_masters), (1, modify), (2, modify)],
)
def test_weights(world: int, check: Callable[..., None]) -> None:
    run_ranks(world, check)


def communicate(rank: int, world: int) -> dict[str, int]:
    """Gathers FP8 and reduces a maximum over both transports; counts the collectives of an engine's step."""
    for shared in (True, False):
        comm = make_communicator(dist.group.WORLD, torch.device("cpu"), shared_memory=shared)
        whole, own = comm.allocate(world * 100, E4M3), comm.allocate(100, E4M3)
        own.copy_(torch.full((100,), 2.0**rank))
        own[7] = math.nan
        comm.all_gather(whole, own, label="fp8").wait()
        want = torch.cat([torch.full((100,), 2.0**other) for other in range(world)])
        want[7::100] = math.nan
        assert torch.equal(whole.float().nan_to_num(nan=-1.0), want.nan_to_num(nan=-1.0))
        numbers = torch.tensor([float(rank), -float(rank), math.inf if rank == 1 else 1.0])
        comm.all_reduce_max(numbers, label="max").wait()
        assert numbers.tolist() == [world - 1.0, 0.0, math.inf]
    engine = start(zero_stage=2)
    engine.backward(engine(batch(1, rank)))
    engine.finish_gradients()
    with mock.patch.object(engine.comm.schedule, "record", wraps=engine.comm.schedule.record) as record:
        engine.step()
    return Counter(call.args[0] for call in record.call_args_list)


def test_fp8_travels_in_few_collectives() -> None:
    """One maximum for all weights, and one all-gather per flat buffer; biases and norms are in the root's."""
    for found in run_ranks(2, communicate):
        assert (found["all_reduce_max"], found["all_gather"]) == (1, 4)


def resume(rank: int, world: int, folder: Path, stage: int, saves: bool) -> dict[str, Any]:
    """Two steps and a save, or a load into other weights; then two steps more, and the bits of masters and scales."""
    found = {}
    for recipe in RECIPES:
        engine = start(recipe, model=None if saves else Model(width(recipe)), zero_stage=stage, reproducible=True)
        if saves:
            train(engine, [0, 1])
            engine.save(folder / recipe)
        else:
            engine.load(folder / recipe)
        losses = train(engine, [2, 3])
        found[recipe] = losses, state_digests(engine), engine.sharded.scales._table.scale.tolist()
    return found


def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    straight = run_ranks(2, resume, tmp_path, 2, True)[0]
    for world, stage in ((1, 1), (2, 3)):
        assert run_ranks(world, resume, tmp_path, stage, False)[0] == straight, f"stage {stage} on {world} ranks"


def measured(rank: int, world: int) -> dict[tuple[str, int], Any]:
    cases = [("tensorwise", 0), ("rowwise", 3)]
    return {(recipe, stage): measure(WideStack, stage, POLICIES[recipe]) for recipe, stage in cases}


def test_state_bytes_follow_the_formula() -> None:
    numel = sum(p.numel() for p in WideStack().parameters() if p.dim() == 2)
    for found in run_ranks(2, measured):
        for (recipe, stage), (live, reported, formula) in found.items():
            where = f"{recipe} at stage {stage}: {reported} against {formula}, live {live}"
            states = sum(reported[kind] for kind in formula)
            assert sum(formula.values()) <= states <= 1.03 * sum(formula.values()), where
            assert reported["unsharded"] == 0, where
            assert abs(live - sum(reported.values())) < 16 * 1024, where
            # the first product and the last one, of eight, stay BF16; biases and norms are small
            replicas = numel * 6 // 8 * (1 if recipe == "tensorwise" else 2) + numel * 2 // 8 * 2
            assert reported["compute"] == pytest.approx(replicas / (2 if stage == 3 else 1), rel=0.06), where


def test_memory_counts_what_products_keep() -> None:
    engine = start(zero_stage=2)
    between = engine.memory()["compute"]
    micro_batches = iter(engine.accumulate(range(2)))
    next(micro_batches)
    engine.backward(engine(batch(0, 0)))
    next(micro_batches)
    kept = sum(4 * 96 * 32 for name in engine.contract.float8_modules)  # decoded for the emulation, padded
    assert engine.memory()["compute"] == between + kept
    with saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):  # as offload does
        engine.backward(engine(batch(0, 1)))
    assert engine.memory()["compute"] == between + kept
    engine.step()
    assert engine.memory()["compute"] == between
