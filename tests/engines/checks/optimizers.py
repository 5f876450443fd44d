"""Optimizers, the moving average, compact masters and gradients: torch's update, the same bits everywhere, skips."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import dtrain
from dtrain.config.optim import SGD, Adam, AdamW, AdamWBF16, Lion, Muon
from dtrain.engine.step import StepEngine
from dtrain.optim import flat, matrix
from dtrain.parameters.model_states import MAIN_GRAD
from dtrain.precision.remainder import RemainderPair, split
from dtrain.sharding.group import FlatBuffer
from tests.engines.helpers import Plain, batch, computed, digest, state_digests, train_step
from tests.engines.matrix import Case, Trial, check
from tests.helpers.arena import torch_optimizer
from tests.helpers.momentum import Momentum, trained_by

SLOWER: dict[str, Any] = {"*up*": {"lr_factor": 0.3, "weight_decay": 0.02}, "head.bias": {"weight_decay": 0.1}}
# in FP32, Newton-Schulz amplifies the last bit of a gradient of low rank 500 times: an exact learning rate
MUON = Muon(lr=2.0**-9, weight_decay=0.1, splits={"mix.weight": [24, 12, 12]})
NADAM = dtrain.TorchOptimizer(torch.optim.NAdam, lr=3e-3, weight_decay=0.1, groups={"blocks.*": {"betas": (0.8, 0.9)}})
ELEMENTWISE: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": AdamW(lr=3e-3, groups=SLOWER)},
    "adam": {"optimizer": Adam(lr=3e-3, weight_decay=0.01, groups=SLOWER)},
    "sgd": {"optimizer": SGD(lr=0.02, nesterov=True, weight_decay=0.01, groups=SLOWER)},
    "lion": {"optimizer": Lion(lr=1e-3, groups=SLOWER)},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **ELEMENTWISE,
    "adamw-bf16": {"optimizer": AdamWBF16(lr=3e-3, groups={**SLOWER, "blocks.1*": {"betas": (0.8, 0.9)}})},
    "muon": {"optimizer": MUON},
    "nadam": {"optimizer": NADAM},
    "momentum": {"optimizer": Momentum(lr=0.05, weight_decay=0.1, reduced=True, init=0.25)},
    "ema": {"ema_decay": 0.9},
}
"""Each with the states of its own; ``momentum`` is one that dtrain does not know."""
STATES = {name: options for name, options in OPTIMIZERS.items() if name not in ("adam", "sgd", "lion")}
"""Those whose states differ in kind."""
COMPACT: dict[str, dict[str, Any]] = {
    "remainder": {"master": "remainder"},
    "compact": {"optimizer": AdamWBF16(lr=3e-3), "master": "remainder", "grad_dtype": "bf16"},
}
"""Ways to keep states in fewer bytes, of the native engine in BF16."""


def start(trial: Trial, **options: Any) -> Any:
    with trained_by():
        return trial.start(wide=True, **options)


def lacks(case: Case) -> bool:
    """Whether the engine, or that of the source, does not have the optimizer or the compact states of the variant."""
    engines = {case.engine, *([case.source.engine] if case.source is not None else [])}
    if case.variant in COMPACT:
        return engines != {"native"} or case.precision != "bf16"
    return case.variant == "muon" and "deepspeed" in engines


def optimizers_of_torch(record: Any, parameters: Mapping[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    """The same update by torch's own classes."""
    if isinstance(record, Muon):
        matrices = {n: p for n, p in parameters.items() if p.dim() == 2 and n != "embedding.weight"}
        options: dict[str, Any] = {"lr": record.lr, "weight_decay": record.weight_decay}
        scaled = {"momentum": record.momentum, "adjust_lr_fn": "match_rms_adamw"}
        muon = torch.optim.Muon(list(matrices.values()), **scaled, **options)
        rest = {name: parameter for name, parameter in parameters.items() if name not in matrices}
        return [muon, *optimizers_of_torch(AdamW(betas=record.betas, **options), rest)]
    groups = []
    for name, parameter in parameters.items():
        decay = record.options["weight_decay"] if isinstance(record, dtrain.TorchOptimizer) else record.weight_decay
        group = {"params": [parameter], "lr": record.lr, "weight_decay": decay if parameter.dim() > 1 else 0.0}
        for pattern, changed in record.groups.items():
            if fnmatchcase(name, pattern):
                group |= {key: value for key, value in changed.items() if key != "lr_factor"}
                group["lr"] *= changed.get("lr_factor", 1.0)
        groups.append(group)
    return [record.load()(groups) if isinstance(record, dtrain.TorchOptimizer) else torch_optimizer(record, groups)]


@check(
    ranks=(2, 1),
    variants={**ELEMENTWISE, "nadam": {"optimizer": NADAM}, "muon": {"optimizer": replace(MUON, splits={})}},
    unless=lacks,
)
def follows_torch(trial: Trial) -> None:
    engine = start(trial, max_grad_norm=None, schedule=dtrain.Constant())
    plain = Plain(partial(optimizers_of_torch, trial.options["optimizer"]), wide=True)
    for _ in range(4):
        assert train_step(engine, 2).applied
        plain.step(2)
    masters = engine.master_state()
    for name, want in plain.masters().items() if trial.rank == 0 else ():
        # Newton-Schulz amplifies the last bits of gradients of such low rank; an update moves a weight by 4e-4
        close = torch.isclose(masters[name], want, rtol=0, atol=1e-4 if trial.case.variant == "muon" else 1e-6)
        assert close.all(), name


@check(
    engines=("native",),
    precisions=("bf16", "fp8"),
    ranks=(2, 3, 1),
    variants={**OPTIMIZERS, **COMPACT},
    equals=lambda case: Case("native", 0, case.precision, 1, case.variant),
    unless=lacks,
)
def has_the_same_bits_at_every_stage_and_world_size(trial: Trial) -> dict[str, str]:
    engine = start(trial, reproducible=True)
    before = state_digests(engine, buffers=False)
    outcomes = [train_step(engine, 6) for _ in range(3)]
    assert all(outcome.applied for outcome in outcomes)
    after = state_digests(engine, buffers=False)
    same = {name for name in before if before[name] == after[name]}
    assert all(".unused" in name or ":unused" in name for name in same), same
    return {**after, "outcomes": repr([(outcome.loss, outcome.grad_norm) for outcome in outcomes])}


@contextmanager
def cast_as_pairs_round() -> Iterator[None]:
    """Context in which full masters are cast into BF16 replicas as pairs round ([Note: ties])."""

    def cast(replica: Tensor, master: Tensor) -> None:
        if replica.dtype == torch.bfloat16:
            replica.view(torch.int16).copy_(split(master)[0])
        else:
            replica.copy_(master)

    def store(slices: Any, group: Any) -> None:
        for part, master in zip(slices, group.masters, strict=True):
            if isinstance(part.master, RemainderPair):
                part.master.write(master)
            elif part.replica is not None:
                cast(part.replica, master)

    def cast_master(buffer: Any) -> None:
        if buffer._cast_target is not None:
            cast(buffer._cast_target, buffer.master)

    with (
        mock.patch.object(flat, "store", store),
        mock.patch.object(matrix, "store", store),
        mock.patch.object(FlatBuffer, "cast_master", cast_master),
    ):
        yield


@check(
    engines=("native",),
    precisions=("bf16",),
    ranks=(2, 1),
    variants={name: OPTIMIZERS[name] for name in ("adamw", "adamw-bf16", "sgd", "muon", "ema")},
)
def masters_of_weight_and_remainder_train_as_full_ones(trial: Trial) -> None:
    found = []
    for master in ("full", "remainder"):
        with cast_as_pairs_round():
            engine = start(trial, master=master)
            pairs = [isinstance(buffer.master, RemainderPair) for buffer in engine.sharded.buffers]
            assert any(pairs) == (master == "remainder")
            losses = [train_step(engine, 2).loss for _ in range(3)]
            assert len(set(losses)) == 3
            found.append({**state_digests(engine), "losses": repr(losses), "output": digest(computed(engine))})
    assert found[0] == found[1]


@check(precisions=("fp32", "bf16"), ranks=(2, 1), variants={**STATES, **COMPACT}, unless=lacks)
def keeps_every_bit_of_all_states_in_skipped_steps(trial: Trial) -> None:
    engine = start(trial)
    assert train_step(engine, 2).applied
    before = state_digests(engine, buffers=False), digest(computed(engine))
    for factor in (math.inf, math.nan) * 2:
        for index in engine.accumulate([trial.rank]):
            engine.backward(engine(tokens=batch(index)) * (factor if trial.rank == 0 else 1.0))
        assert not engine.step().applied
    assert (state_digests(engine, buffers=False), digest(computed(engine))) == before
    assert train_step(engine, 2).applied
    assert state_digests(engine, buffers=False) != before[0]


@check(engines=("native",), precisions=("bf16",), ranks=(2, 1))
def bf16_gradients_are_those_of_fp32_up_to_one_rounding_an_addition(trial: Trial) -> None:
    """And exact if nothing is added."""
    found: dict[tuple[str, int], dict[str, Tensor]] = {}
    for grad_dtype, micro_batches in product(("fp32", "bf16"), (trial.ranks, 4)):
        engine = trial.start(grad_dtype=grad_dtype)
        dtypes = {buffer.gradient.main_grad.dtype for buffer in engine.sharded.buffers}
        assert dtypes == {torch.float32, *([torch.bfloat16] if grad_dtype == "bf16" else [])}
        train_step(engine, trial.ranks)
        for index in engine.accumulate(range(trial.rank, micro_batches, trial.ranks)):
            engine.backward(engine(tokens=batch(index)), weight=1.0 + index)
        engine.finish_gradients()
        found[grad_dtype, micro_batches] = {
            name: tensor.float() for name, tensor in engine.states.full_state(MAIN_GRAD)
        }
    full, low = found["fp32", 4], found["bf16", 4]
    for name, want in full.items():
        assert torch.linalg.vector_norm(low[name] - want) <= 4 * 2**-8 * torch.linalg.vector_norm(want), name
    assert any(not torch.equal(low[name], full[name]) for name in full)
    if trial.ranks == 1:
        assert all(torch.equal(found["bf16", 1][name], want) for name, want in found["fp32", 1].items())


DECAY = 0.9


def averages_of(engine: StepEngine, kind: str = "ema") -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.states.full_state(kind)}


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@check(precisions=("bf16", "fp32"), ranks=(2, 1))
def moving_average_follows_applied_steps_and_is_swapped_in(trial: Trial) -> None:
    engine = trial.start(ema_decay=DECAY)
    expected = averages_of(engine, "master")
    assert equal(averages_of(engine), expected)
    for step in range(4):
        for index in engine.accumulate([trial.rank]):
            engine.backward(engine(tokens=batch(index)) * (math.inf if step == 3 else 1.0))
        if engine.step().applied:
            masters = dict(engine.states.full_state("master"))
            expected = {name: old + (1 - DECAY) * (masters[name] - old) for name, old in expected.items()}
    assert equal(averages_of(engine), expected)
    before, loss = averages_of(engine, "master"), computed(engine)
    with engine.ema():
        assert equal(averages_of(engine, "master"), expected)
        assert not torch.equal(computed(engine), loss)
    assert equal(averages_of(engine, "master"), before)
    assert equal(averages_of(engine), expected)
    assert torch.equal(computed(engine), loss)
    assert train_step(engine, 2).applied
    memory, formula = engine.memory(), engine.memory_formula()
    held = 3 * sum(shard.data.nbytes for shard in engine.states.local_shards("ema"))
    assert held <= memory["moments"] <= 3 * memory["master"]  # without the padding of the last shards
    assert abs(formula["moments"] - 3 * formula["master"]) <= 12  # each is rounded up to whole bytes
