"""FP8 under every engine that has it: one training, weights cast when they must be, skips, checkpoints, memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.config.capabilities import CAPABILITIES
from dtrain.config.precision import Float8
from dtrain.distributed.setup import disconnect
from dtrain.engine.step import StepEngine
from dtrain.errors import ConfigError
from dtrain.precision.float8.cast import E4M3, quantize
from dtrain.precision.float8.linear import Float8Linear
from dtrain.precision.float8.weights import Cache
from dtrain.precision.policy import PrecisionPolicy
from tests.engines.float8_model import FLOAT8, Float8Model, batch, start, train_step
from tests.engines.helpers import held, same, state_digests
from tests.helpers import needs
from tests.helpers.host_reads import forbidden, like_a_gpu
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", autouse=True)
def no_process_group_left() -> Iterator[None]:
    """Engines of a single rank in this process leave a process group, which later tests must not find."""
    yield
    disconnect()


ENGINES = [
    (name, stage)
    for name, engine in CAPABILITIES.items()
    if engine.supports("precision", "fp8")
    for stage in engine.values("zero_stage")
]
ROWWISE = PrecisionPolicy.named("fp8", float8=Float8(recipe="rowwise"))
WORLD = 2


def float8_linears(engine: StepEngine) -> dict[str, Float8Linear]:
    return {name: module for name, module in engine.module.named_modules() if isinstance(module, Float8Linear)}


# -- one training ------------------------------------------------------------------------------------------------------


def curves(rank: int, world: int, cases: list[tuple[str, int, Any]]) -> list[list[float]]:
    found = []
    for name, stage, precision in cases:
        engine = start(name, stage, precision)
        assert list(float8_linears(engine)) == ([] if precision == "bf16" else FLOAT8)
        outcomes = [train_step(engine) for _ in range(8)]
        assert all(outcome.applied for outcome in outcomes)
        found.append([outcome.loss for outcome in outcomes])
    return found


@pytest.mark.parametrize("precision", ["fp8", ROWWISE], ids=["tensorwise", "rowwise"])
def test_all_engines_train_alike_and_near_bf16(precision: Any) -> None:
    """Two micro-batches a rank and step. FSDP2 casts to FP8 what BF16 has rounded before; the others the masters."""
    engines = ENGINES if precision == "fp8" else [("native", 0), ("ddp", 0), ("fsdp2", 3)]
    cases = [("native", 0, "bf16"), *((name, stage, precision) for name, stage in engines)]
    bf16, *found = run_ranks(WORLD, curves, cases)[0]
    assert bf16[-1] < 0.8 * bf16[0]
    by_engine = dict(zip(engines, found, strict=True))
    for engine, losses in by_engine.items():
        assert losses != bf16, f"{engine} computed in BF16"
        assert losses == pytest.approx(bf16, rel=2e-2), engine
        assert losses == pytest.approx(by_engine["native", 0], rel=1e-2 if engine[0] == "fsdp2" else 2e-3), engine


def test_the_recipes_differ() -> None:
    one, other = run_ranks(1, curves, [("ddp", 0, "fp8"), ("ddp", 0, ROWWISE)])[0]
    assert one != other


# -- when weights are cast ---------------------------------------------------------------------------------------------


def cast_master(engine: StepEngine, name: str) -> Tensor:
    """The master of a Linear cast to FP8."""
    master = dict(engine.full_state("master"))[f"{name}.weight"]
    return quantize(master, E4M3, rowwise=False).values


def train_ddp(rank: int, world: int, folder: Path) -> None:
    engine = start("ddp", 0)
    engine.save(folder)
    name, linear = next(iter(float8_linears(engine).items()))
    assert linear.quantized_weight.cache is Cache.UNTIL_WRITTEN
    weight = linear.get_parameter("weight")

    def copies() -> Tensor:
        return linear.quantized_weight.copies(weight)[0].values

    def equal(a: Tensor, b: Tensor) -> bool:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))

    at_first = copies().clone()
    assert equal(at_first, cast_master(engine, name))
    seen = []
    for index in engine.accumulate([rank, rank + world]):
        engine.backward(engine(tokens=batch(index)))
        seen.append(copies())
    assert seen[0] is seen[1], "cast once for both micro-batches"
    assert engine.step().applied
    assert not equal(copies(), at_first)
    assert equal(copies(), cast_master(engine, name)), "of the masters after the step"
    with engine.eval():
        engine(tokens=batch(0))
    # a load brings other masters, and a forward right after it must not find the old weights
    engine.load(folder)
    assert equal(copies(), at_first)
    fresh = start("ddp", 0)
    with engine.eval(), fresh.eval():
        assert torch.equal(engine(tokens=batch(9)), fresh(tokens=batch(9)))


def test_ddp_casts_a_weight_once_a_step(tmp_path: Path) -> None:
    run_ranks(WORLD, train_ddp, tmp_path)


# -- skips -------------------------------------------------------------------------------------------------------------


def overflow(rank: int, world: int, cases: list[tuple[str, int]]) -> None:
    for case in cases:
        engine = start(*case)
        train_step(engine)
        before, loss = held(engine), evaluate(engine)
        handle = None
        if rank == world - 1:
            broken = engine.module.get_submodule("blocks.1.down")
            handle = broken.register_full_backward_pre_hook(lambda _, grads: (torch.full_like(grads[0], torch.inf),))
        outcome = train_step(engine)
        if handle is not None:
            handle.remove()
        assert outcome.reason == "overflow", case
        assert outcome.culprit is not None
        assert outcome.culprit.rank == world - 1, case
        assert same(before, held(engine)), case
        assert torch.equal(evaluate(engine), loss), f"{case}: the weights that a forward finds"
        assert train_step(engine).applied, case


def evaluate(engine: StepEngine) -> Tensor:
    with engine.eval():
        loss: Tensor = engine(tokens=batch(0))
    return loss


def test_infinity_before_a_saturating_cast_is_skipped_by_every_engine() -> None:
    """E4M3 and the clamp of E5M2 would make a large number of it, and the update would be applied."""
    run_ranks(WORLD, overflow, ENGINES)


# -- no waiting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_host_reads_nothing_in_a_step(engine: tuple[str, int], recipe: str) -> None:
    """With the operations that a GPU would run."""
    needs.row_scales_on_cpu(rowwise=recipe == "rowwise")
    as_on_a_gpu = Float8(recipe, emulate=False, choice="all")  # timed, BF16 would win on a CPU
    made = start(*engine, PrecisionPolicy.named("fp8", float8=as_on_a_gpu))
    assert made.contract.float8_modules
    like_a_gpu(cast(Any, made))
    with forbidden():
        outcomes = [train_step(made, 2) for _ in range(3)]
    assert all(outcome.applied for outcome in outcomes)


# -- checkpoints -------------------------------------------------------------------------------------------------------

SETUPS = [("native", 3), ("ddp", 0), ("fsdp2", 3)]


def save_all(rank: int, world: int, folder: Path) -> list[tuple[dict[str, str], list[float]]]:
    found = []
    for precision, (name, stage) in [*product(["fp8"], SETUPS), ("bf16", SETUPS[0])]:
        engine = start(name, stage, precision)
        train_step(engine)
        engine.save(folder / f"{name}-{precision}")
        state = state_digests(engine)
        found.append((state, [train_step(engine).loss for _ in range(2)]))
    return found


def load_all(rank: int, world: int, folder: Path) -> list[tuple[dict[str, str], list[float]]]:
    """State of each engine after loading each checkpoint, and the losses that follow."""
    found = []
    engines = [start(name, stage, "fp8", seed=1) for name, stage in SETUPS]
    for engine in (*engines, start("native", 2, "bf16", seed=1)):
        for source in ("native-fp8", "ddp-fp8", "fsdp2-fp8", "native-bf16"):
            engine.load(folder / source)
            state = state_digests(engine)
            found.append((state, [train_step(engine).loss for _ in range(2)]))
    return found


def test_any_engine_loads_what_any_other_saved(tmp_path: Path) -> None:
    """And FP8 what was trained in BF16, and the other way round; on two ranks saved, on one loaded."""
    saved = run_ranks(WORLD, save_all, tmp_path)[0]
    loaded = run_ranks(1, load_all, tmp_path)[0]
    assert len(loaded) == 4 * len(saved)
    for (state, losses), (expected, others) in zip(loaded, saved * 4, strict=True):
        assert state == expected
        assert losses == pytest.approx(others, rel=2e-2)


# -- what it takes, and who does not have it ---------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp8", ROWWISE], ids=["tensorwise", "rowwise"])
def test_memory_counts_the_weights_that_ddp_caches_within_a_step(precision: Any) -> None:
    engine = start("ddp", 0, precision)
    assert engine.memory()["compute"] == 0
    engine.backward(engine(tokens=batch(0)))
    numel = sum(engine.module.get_submodule(name).get_parameter("weight").numel() for name in FLOAT8)
    copies = 1 if precision == "fp8" else 2
    # each in FP8, and in FP32 for the emulation; 92 features are padded to 96
    assert 5 * copies * numel <= engine.memory()["compute"] <= 1.1 * 5 * copies * numel
    engine.step()
    assert engine.memory()["compute"] == engine.memory_formula()["compute"] == 0


def test_deepspeed_refuses_fp8_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"engine=deepspeed cannot do precision=fp8: .*use .*engine=native"):
        dtrain.initialize(Float8Model(), engine="deepspeed", precision="fp8")
