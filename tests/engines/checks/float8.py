"""FP8: one training under every engine that has it, weights cast when they must be, skips, no waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.config.precision import Float8
from dtrain.engine.step import StepEngine
from dtrain.precision.float8.cast import E4M3, Scaling, quantize
from dtrain.precision.float8.linear import Float8Linear
from dtrain.precision.float8.weights import Cache
from dtrain.precision.policy import PrecisionPolicy
from tests.engines import float8_model
from tests.engines.float8_model import FLOAT8, batch, train_step
from tests.engines.helpers import digest, held, same
from tests.engines.matrix import Case, Trial, check
from tests.helpers import needs
from tests.helpers.host_reads import forbidden, like_a_gpu

ENGINES = ("native", "ddp", "fsdp2")
NAMES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise")
RECIPES: dict[str, dict[str, Any]] = {recipe: {"recipe": recipe} for recipe in NAMES}
ON_CPU = {recipe: RECIPES[recipe] for recipe in NAMES[:2]}


def start(trial: Trial, precision: Any = None, **recipe: Any) -> StepEngine:
    precision = precision or PrecisionPolicy.named("fp8", float8=Float8(**{**trial.options, **recipe}))
    return float8_model.start(trial.case.engine, trial.case.stage, precision)


def evaluate(engine: StepEngine) -> Tensor:
    with engine.eval():
        return engine(tokens=batch(0))


@check(engines=ENGINES, precisions=("fp8",), variants=RECIPES)
def float8_trains_alike_and_near_bf16(trial: Trial) -> list[float]:
    """FSDP2 casts to FP8 what BF16 has rounded before; the others the masters."""

    def curve(engine: StepEngine) -> list[float]:
        return [train_step(engine).loss for _ in range(4)]

    engine = start(trial)
    assert [name for name, module in engine.module.named_modules() if isinstance(module, Float8Linear)] == FLOAT8
    losses, bf16 = (
        curve(engine),
        curve(float8_model.start("native", 0, "bf16", wide=engine.policy.float8.recipe == "blockwise")),
    )
    assert engine.applied_steps == 4
    native = curve(start(Trial(Case("native", 0), trial.rank, trial.folder, trial.options)))
    assert bf16[-1] < 0.9 * bf16[0]
    assert losses != bf16
    assert losses == pytest.approx(bf16, rel=2e-2)
    assert losses == pytest.approx(native, rel=1e-2 if engine.name == "fsdp2" else 2e-3)
    return losses


@check(engines=ENGINES, precisions=("fp8",))
def float8_skips_an_infinity_before_a_saturating_cast(trial: Trial) -> None:
    """E4M3 and the clamp of E5M2 would make a large number of it, and the update would be applied."""
    engine = start(trial)
    train_step(engine)
    before, loss = held(engine), evaluate(engine)
    broken = engine.module.get_submodule("blocks.1.down")
    handle = broken.register_full_backward_pre_hook(
        lambda _, grads: (torch.full_like(grads[0], torch.inf) if trial.rank else grads[0],)
    )
    outcome: Any = train_step(engine)
    handle.remove()
    assert (outcome.applied, outcome.reason, outcome.culprit.rank) == (False, "overflow", 1)
    assert same(before, held(engine))
    assert torch.equal(evaluate(engine), loss), "the weights that a forward finds"
    assert train_step(engine).applied


@check(engines=ENGINES, precisions=("fp8",), ranks=(1,), variants=ON_CPU)
def float8_reads_nothing_on_the_host_in_a_step(trial: Trial) -> None:
    """With the operations that a GPU would run."""
    needs.products_on_cpu(trial.case.variant)
    made: Any = start(trial, emulate=False, choice="all")  # timed, BF16 would win on a CPU
    assert made.contract.float8_modules
    like_a_gpu(made)
    with forbidden():
        outcomes = [train_step(made, 2) for _ in range(3)]
    assert all(outcome.applied for outcome in outcomes)


@check(engines=("ddp",), precisions=("fp8",))
def float8_casts_a_weight_once_a_step(trial: Trial) -> None:
    """Again after an update and after a load, for both micro-batches together."""
    engine = start(trial)
    engine.save(trial.folder)
    linear: Any = engine.module.get_submodule(FLOAT8[0])
    assert linear.quantized_weight.cache is Cache.UNTIL_WRITTEN

    def copies() -> Tensor:
        return linear.quantized_weight.copies(linear.get_parameter("weight"))[0].values

    def master() -> Tensor:
        whole = dict(engine.states.full_state("master"))[f"{FLOAT8[0]}.weight"]
        return quantize(whole, E4M3, Scaling.TENSOR).values

    at_first = digest(copies())
    assert at_first == digest(master())
    seen = []
    for index in engine.accumulate([trial.rank, trial.rank + 2]):
        engine.backward(engine(tokens=batch(index)))
        seen.append(copies())
    assert seen[0] is seen[1], "cast once for both micro-batches"
    assert engine.step().applied
    assert digest(copies()) == digest(master()) != at_first
    evaluate(engine)
    # a load brings other masters, and a forward right after it must not find the old weights
    engine.load(trial.folder)
    assert digest(copies()) == at_first
    assert torch.equal(evaluate(engine), evaluate(start(trial)))


@check(engines=("ddp",), precisions=("fp8",), ranks=(1,), variants=ON_CPU)
def float8_memory_counts_the_weights_that_are_cached_within_a_step(trial: Trial) -> None:
    engine = start(trial)
    assert engine.memory()["compute"] == 0
    engine.backward(engine(tokens=batch(0)))
    numel = sum(engine.module.get_submodule(name).get_parameter("weight").numel() for name in FLOAT8)
    copies = 1 if trial.case.variant == "tensorwise" else 2
    # each in FP8, and in FP32 for the emulation; 92 features are padded to 96
    assert 5 * copies * numel <= engine.memory()["compute"] <= 1.1 * 5 * copies * numel
    engine.step()
    assert engine.memory()["compute"] == engine.memory_formula()["compute"] == 0
