"""Faults of other trainers, planted into dtrain, which the fuzz must find."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dtrain.engine.adapters.native import NativeEngine
from dtrain.engine.parts.checkpoint.checkpointer import Checkpointer
from dtrain.engine.step import StepEngine
from dtrain.engine.vote.decide import _STEP_FLOATS as STEP_FLOATS
from dtrain.engine.vote.decide import Decision
from dtrain.engine.vote.tensors import VoteTensors
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.precision.float8 import matmul


@contextmanager
def _after(owner: Any, name: str, then: Callable[..., Any]) -> Iterator[None]:
    """Calls ``then(result, *args, **kwargs)`` after each call of a function, and returns what that returns."""
    real = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        return then(real(*args, **kwargs), *args, **kwargs)

    with mock.patch.object(owner, name, patched):
        yield


@contextmanager
def _weight() -> Iterator[None]:
    """Micro-batches count alike, and the loss that is reported does not show it."""
    real = NativeEngine._backward
    with mock.patch.object(
        NativeEngine, "_backward", lambda self, loss, factor: real(self, loss, Weight(torch.ones_like(factor.value)))
    ):
        yield


def _tie() -> AbstractContextManager[None]:
    """The gradient of a tied weight is that of its first place alone."""

    def untie(_: None, engine: NativeEngine, *args: Any, **kwargs: Any) -> None:
        seen = set()
        for name, parameter in engine.module.named_parameters(remove_duplicate=False):
            owner, _, own = name.rpartition(".")
            if parameter in seen:
                vars(engine.module.get_submodule(owner))[own] = parameter.detach()
            seen.add(parameter)

    return _after(NativeEngine, "__init__", untie)


def _clip() -> AbstractContextManager[None]:
    """Gradients are clipped before they are unscaled."""

    def by_scaled_norm(decided: tuple[Decision, Tensor], _: Any, rows: Tensor, **sums: Any) -> tuple[Decision, Tensor]:
        decision, packed = decided
        loss_scale, threshold, _ = rows[0, STEP_FLOATS].view(torch.float64)
        norms = decision.grad_norm, decision.grad_norm * loss_scale
        right, wrong = ((threshold / (norm + 1e-6)).clamp(max=1.0) for norm in norms)
        return replace(decision, grad_divisor=decision.grad_divisor * right / wrong), packed

    return _after(VoteTensors, "decide", by_scaled_norm)


def _skip() -> AbstractContextManager[None]:
    """The schedule goes on in a skipped step."""

    def count(_: None, engine: StepEngine, outcome: Any, decision: Any) -> None:
        engine._run.applied_steps += not outcome.applied

    return _after(StepEngine, "_on_finalized", count)


def _reshard() -> AbstractContextManager[None]:
    """Another number of ranks begins with moments of zero."""

    def lose(extra: Any, checkpointer: Checkpointer, path: Path) -> Any:
        (manifest,) = path.glob("*/manifest.json")
        if json.loads(manifest.read_text().splitlines()[1])["state"]["world_size"] != checkpointer._comm.world_size:
            states = checkpointer._states
            for kind in states.saved_dtypes:
                for shard in states.local_shards(kind) if kind not in ("master", "ema") else ():
                    shard.data.zero_()
        return extra

    return _after(Checkpointer, "load", lose)


def _float8() -> AbstractContextManager[None]:
    """The scale of one operand of an FP8 product is another one's."""
    return _after(matmul, "_emulated", lambda product, *args: product * 2)


PLANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "micro-batch weight": _weight,
    "tie": _tie,
    "clip": _clip,
    "skip": _skip,
    "reshard": _reshard,
    "FP8 scale": _float8,
}
