"""Shadow steps: the gap is that of two engines, and nothing of the training changes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.checkpoint import open_newest
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.engine.step import StepEngine
from dtrain.parameters.model_states import MAIN_GRAD
from dtrain.precision.float8.cast import E4M3, dequantize, quantize
from dtrain.precision.float8.options import Recipe
from tests.engines import float8_model
from tests.engines.checks.float8 import ENGINES, RECIPES
from tests.engines.float8_model import FLOAT8, batch, train_step
from tests.engines.helpers import fingerprints, state_digests
from tests.engines.matrix import Trial, check
from tests.helpers.checkpoints import ALONE


def start(trial: Trial, every: int, **options: Any) -> Any:
    options = {**trial.options, **options}
    float8 = dtrain.Float8(recipe=options.pop("recipe", "tensorwise"), shadow_every=every)
    policy = dtrain.PrecisionPolicy.named("fp8", float8=float8)
    engine = float8_model.start(trial.case.engine, trial.case.stage, policy, **options)
    engine.module.register_buffer("calls", torch.zeros(()))

    def count(module: Any, _: Any) -> None:
        module.calls.add_(torch.rand(()))

    engine.module.register_forward_pre_hook(count)
    return engine


@check(
    engines=ENGINES,
    precisions=("fp8",),
    ranks=(2, 1),
    variants={
        **RECIPES,
        "recomputed": {"blocks": dtrain.Blocks(recompute="full", offload_activations=True)},
        "audited": {"audit": dtrain.Audit(every=1, replay_every=1)},
    },
)
def shadow_steps_leave_no_trace(trial: Trial) -> list[Any]:
    plain, shadowed = (start(trial, every) for every in (0, 2))
    gaps, random = [], []
    for _ in range(4):
        outcomes = []
        for engine in (plain, shadowed):
            torch.manual_seed(engine.attempted_steps)
            outcomes.append(train_step(engine, 2 * trial.ranks))
            random.append(torch.rand(()).item())
        assert outcomes[0] == outcomes[1]
        gaps.append(shadowed.float8_gap)
    assert plain.float8_gap is None
    assert [gap and gap.step for gap in gaps] == [None, 2, 2, 4]
    assert random[0::2] == random[1::2], "the caller's generator"
    assert state_digests(plain) == state_digests(shadowed), "weights, states and buffers"
    assert plain.loss_scale == shadowed.loss_scale
    states = []
    for engine, name in ((plain, "plain"), (shadowed, "shadowed")):
        engine.save(trial.folder / name)
        states.append(open_newest(trial.folder / name, ALONE).state)
    assert {key for key in states[0] if states[0][key] != states[1][key]} == {"run_id"}
    assert fingerprints(trial.folder / "plain") == fingerprints(trial.folder / "shadowed")
    shadowed.load(trial.folder / "plain")
    for gap in (gaps[1], gaps[3]):
        assert 0.99 < gap.cosine < 1
        assert gap.norm_ratio == pytest.approx(1, abs=0.05)
        assert 0 < abs(gap.loss) < 0.01
    return [asdict(gaps[3]), train_step(shadowed, 2 * trial.ranks).loss]


def without_dropout(engine: StepEngine) -> StepEngine:
    for block in engine.module.get_submodule("blocks").children():
        block.get_submodule("dropout").p = 0.0  # type: ignore[assignment]
    return engine


def alone(precision: Any, index: int, weights: dict[str, Tensor], wide: bool) -> tuple[float, Tensor]:
    """Loss and gradient of a micro-batch in an engine of this process, whose masters are ``weights``."""
    comm = SingleRank(torch.device("cpu"))
    engine = float8_model.start("native", 0, precision, wide=wide, comm=comm, max_grad_norm=None)
    with engine.modify_weights(), torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            parameter.copy_(weights[name])
    loss = without_dropout(engine)(tokens=batch(index))
    engine.backward(loss)
    engine.step()
    gradients = dict(engine.states.full_state(MAIN_GRAD))
    return loss.item(), torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


@check(engines=ENGINES, precisions=("fp8",), ranks=(2, 1), variants=RECIPES)
def the_gap_is_that_of_two_engines(trial: Trial) -> Any:
    """One computes in FP8, the other in BF16 with the weights that FP8 copies represent; micro-batches are weighted."""
    policy = dtrain.PrecisionPolicy.named("fp8", float8=dtrain.Float8(shadow_every=1, **trial.options))
    engine = without_dropout(float8_model.start(trial.case.engine, trial.case.stage, policy))
    masters = {name: value.clone() for name, value in engine.states.full_state("master")}
    for index in engine.accumulate([trial.rank, trial.rank + 2]):
        engine.backward(engine(tokens=batch(index)), weight=1 + 2 * index)
    engine.step()
    represented, wide = dict(masters), policy.float8.recipe == "blockwise"
    for name in (f"{module}.weight" for module in FLOAT8):
        weight = masters[name].bfloat16() if engine.name == "fsdp2" else masters[name]
        represented[name] = dequantize(quantize(weight, E4M3, Recipe(policy.float8.recipe).weight_scaling))
    sums = torch.zeros(2, dtype=torch.float64)
    products = torch.zeros(3, dtype=torch.float64)
    for index in range(trial.ranks):
        own = masters if engine.name != "fsdp2" else {name: value.bfloat16().float() for name, value in masters.items()}
        float8, bf16 = alone(policy, index, own, wide), alone("bf16", index, represented, wide)
        weight = 1 + 2 * index
        sums += weight * torch.tensor([float8[0], bf16[0]])
        products += weight**2 * torch.stack([float8[1] @ bf16[1], float8[1].square().sum(), bf16[1].square().sum()])
    gap, is_exact = engine.float8_gap, engine.name != "ddp"  # which casts FP32 weights where they are used
    dot, first, second = products.tolist()
    unit = 1e-7 if wide else 0  # of an FP32 loss: products of other sizes may sum in another order
    expected = ((sums[0] - sums[1]) / sums[1]).item()
    assert gap.loss == pytest.approx(expected, rel=1e-5, abs=unit if is_exact else 1e-3)
    assert 1 - gap.cosine == pytest.approx(1 - dot / math.sqrt(first * second), rel=1e-4 if is_exact else 0.1)
    assert gap.norm_ratio == pytest.approx(math.sqrt(first / second), rel=1e-6 if is_exact else 1e-2)
    return json.dumps(asdict(gap))
