"""The precision contract on live tensors: violations raise after set-up, in a run, and after a load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtrain
from dtrain.config.capabilities import CAPABILITIES
from dtrain.distributed.setup import make_communicator
from dtrain.engine.step import StepEngine
from dtrain.errors import ConfigError, ContractError
from dtrain.sharding.group import HeldRange
from tests.engines.helpers import STAGES, batch, start, state_digests, train_step
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

WORLD = 2


def lower_a_moment(engine: Any) -> None:
    """Replaces a moment by a BF16 copy of it, wherever this engine keeps it."""
    if engine.name == "native":
        states: Any = engine.sharded.buffers[0].states
        held = states["exp_avg"]
        states["exp_avg"] = HeldRange(held.start, held.values.bfloat16())
    elif engine.name == "deepspeed":
        state = engine._optimizer.state[engine._zero.partitions[0].master]
        state["exp_avg"] = state["exp_avg"].bfloat16()
    else:
        moments = engine._local_shards._values["exp_avg"]
        moments[0] = moments[0].bfloat16()


@contextmanager
def autocast_inside(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, ``module`` runs under an autocast of its own, as a user's forward may have it."""
    autocast = torch.autocast("cpu", dtype=dtype)

    def enter(*_: Any) -> None:
        autocast.__enter__()

    def leave(*_: Any) -> None:
        autocast.__exit__(None, None, None)

    # after a library's own hook, which may gather weights
    before = module.register_forward_pre_hook(enter)
    after = module.register_forward_hook(leave, always_call=True)
    yield
    before.remove()
    after.remove()


def violate(rank: int, world: int, folder: Path, cases: list[tuple[str, int, str]]) -> None:
    for engine, stage, precision in cases:
        try:
            _violate(engine, stage, precision, folder / f"{engine}{stage}{precision}")
        except BaseException as error:
            raise AssertionError(f"engine={engine} zero_stage={stage} precision={precision}") from error


def _violate(name: str, stage: int, precision: str, folder: Path) -> None:
    engine = start(name, stage, precision=precision)
    engine.save(folder)
    _computes_in_low_precision(engine)  # at the start
    assert train_step(engine, WORLD).applied
    engine.load(folder)
    _computes_in_low_precision(engine)
    assert train_step(engine, WORLD).applied

    lower_a_moment(engine)
    with pytest.raises(ContractError, match="bfloat16; the contract says float32"):
        engine.check_contract()

    for part in ("mix", "frozen") if engine.policy.is_reduced_precision else ():  # else PyTorch itself refuses it
        engine = start(name, stage, precision=precision)
        undisturbed = _after_two_steps(engine, folder)
        try:
            disturbed = _after_two_steps(engine, folder, part)
        except (ContractError, RuntimeError, AssertionError):  # the engine, PyTorch or DeepSpeed
            with pytest.raises(ContractError, match=f"'{part}.weight'.*float16"):
                engine.check_contract()
        else:
            assert stage == 3, f"{part}.half() went unnoticed"
            assert disturbed == undisturbed, f"{part}.half() changed the run, although weights are unsharded again"


def _computes_in_low_precision(engine: StepEngine) -> None:
    wrong = torch.float16 if engine.policy.name == "bf16" else torch.bfloat16
    with autocast_inside(engine.module.mix, wrong), pytest.raises(ContractError, match=f"'mix'.*{wrong}"):
        engine(tokens=batch(0))


def _after_two_steps(engine: StepEngine, folder: Path, halved: str | None = None) -> dict[str, str]:
    """The state after two steps from the checkpoint; between them a part of the model may be cast to FP16."""
    engine.load(folder)
    train_step(engine, WORLD)
    if halved is not None:
        engine.module.get_submodule(halved).half()
    train_step(engine, WORLD)
    return state_digests(engine)


CASES = [
    *((engine, stage, "bf16") for engine, stage in STAGES),
    ("ddp", 0, "fp32"),
    ("deepspeed", 1, "fp32"),
]


@pytest.mark.parametrize("engine", CAPABILITIES)
def test_contract_violations_raise(tmp_path: Path, engine: str) -> None:
    run_ranks(WORLD, violate, tmp_path, [case for case in CASES if case[0] == engine])


def initialize_with_a_subset(rank: int, world: int) -> list[str]:
    """Errors of each engine with a communicator of this rank only."""
    groups = [dist.new_group([other]) for other in range(world)]
    errors = []
    for engine in CAPABILITIES:
        comm = make_communicator(groups[rank], torch.device("cpu"))
        try:
            dtrain.initialize(nn.Linear(4, 4), engine=engine, precision="fp32", seed=0, comm=comm)
            errors.append("")
        except ConfigError as error:
            errors.append(str(error))
    return errors


def test_only_the_native_engine_trains_with_a_subset_of_the_ranks() -> None:
    """The libraries reduce over the whole process group, so two parts would add up each other's gradients."""
    for native, *others in run_ranks(2, initialize_with_a_subset):
        assert native == ""
        assert all(
            "trains with all ranks of the process group, 2, and got a communicator of 1" in text for text in others
        )
