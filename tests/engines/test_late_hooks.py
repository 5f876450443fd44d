"""Hooks that users add after ``initialize`` write Inf on rank 1: no message blames a rank that did nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.engine.outcome import Culprit
from tests.engines.helpers import STAGES, batch, start
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

WORLD, GUILTY = 2, 1
KINDS = ("module", "parameter", "accumulated")  # under fsdp2 a parameter is a DTensor between forwards
NAME = "blocks.0.up.weight"  # its first element lies in rank 0's shard


def _infinite(grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad.view(-1)[0] = torch.inf
    return grad


def _write(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.view(-1)[0] = torch.inf


def _culprits(rank: int, world: int, cases: list[tuple[str, int]]) -> list[tuple[str, int, str, Culprit | None]]:
    found = []
    for name, stage in cases:
        for kind in KINDS[: 1 if name == "fsdp2" else None]:
            engine = start(name, stage)
            parameter: Any = dict(engine.module.named_parameters())[NAME]
            module = engine.module.get_submodule(NAME.rpartition(".")[0])
            for number in engine.accumulate(range(2)):
                if number == 1 and rank == GUILTY:
                    if kind == "module":
                        module.register_full_backward_pre_hook(lambda _, grads: (_infinite(grads[0]),))
                    elif kind == "parameter":
                        parameter.register_hook(_infinite)
                    else:
                        parameter.register_post_accumulate_grad_hook(_write)
                engine.backward(engine(tokens=batch(world * number + rank)))
            found.append((name, stage, kind, engine.step().culprit))
    return found


def _check(cases: list[tuple[str, int]]) -> None:
    first, second = run_ranks(WORLD, _culprits, cases)
    assert first == second, "all ranks say the same"
    for name, stage, kind, culprit in first:
        case = f"{name} {stage} {kind}: {culprit}"
        if kind == "accumulated" and name != "ddp":
            # the engine or its library may have taken the gradient before the hook
            assert culprit is None or culprit.rank == GUILTY or "owner of the shard" in str(culprit), case
            continue
        assert culprit is not None, case
        if kind == "accumulated":  # the hook runs after the engine's, right before the sum over the ranks
            assert (culprit.phase, culprit.tensor, culprit.rank) == ("reduced gradient", NAME, 0), case
            assert "; owner of the shard: rank 0" in str(culprit), case
            assert "on rank" not in str(culprit), case
            continue
        assert (culprit.phase, culprit.rank, culprit.micro_batch) == ("local gradient", GUILTY, 1), case
        if kind == "parameter":
            assert (culprit.tensor, culprit.start, culprit.stop) == (NAME, 0, 1), case
        assert f"on rank {GUILTY}, micro-batch 1" in str(culprit), case


def test_engines_of_torch() -> None:
    _check([(name, stage) for name, stage in STAGES if name != "deepspeed"])


@pytest.mark.deepspeed
def test_deepspeed() -> None:
    _check([("deepspeed", stage) for stage in range(4)])
