"""The DDP engine follows the oracle, whatever the model; it sums once a step, and a dummy takes part in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.engine.voting import VotingEngine
from dtrain.errors import ContractError, ModelError, UsageError
from tests.helpers.library_runs import assert_follows_the_oracle, assert_odd_models_follow, start, train_all
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, forward_backward
from tests.helpers.zoo import ZOO


def ddp(model: str = "transformer", precision: str = "bf16", **run: Any) -> Run:
    options = {"engine": "ddp", "precision": precision}
    if precision == "fp16":
        options["loss_scale"] = 256.0  # the dynamic one skips its first steps
    return Run(model, options=options, **{"accumulation": 2, "unequal_weights": True, **run})


@pytest.mark.parametrize("world", [1, 2])
def test_follows_the_oracle(world: int) -> None:
    runs = [ddp(precision=precision, steps=10) for precision in ("fp32", "bf16", "fp16")] + [
        ddp(accumulation=1, steps=10)
    ]
    assert_follows_the_oracle(run_ranks(world, train_all, runs), runs)


def test_odd_models_follow_the_oracle() -> None:
    runs = [ddp(name, precision, steps=4) for name in sorted(ZOO) for precision in ("fp32", "bf16")]
    assert_odd_models_follow(run_ranks(2, train_all, runs), runs)


def overflow_then_recover(rank: int, world: int, run: Run) -> list[tuple[dtrain.StepOutcome, bool]]:
    """A scale so large that FP16 gradients overflow until it has backed off far enough."""
    engine = start(run, loss_scale=dtrain.LossScale(mode="dynamic", init=2.0**24))
    seen = []
    for step in range(12):
        before = state(engine)
        forward_backward(engine, run, step)  # type: ignore[arg-type]
        outcome = engine.step()
        seen.append((outcome, all(map(torch.equal, before, state(engine)))))
    return seen


def state(engine: VotingEngine) -> list[Tensor]:
    return [p.data.clone() for kind in ("master", "exp_avg", "exp_avg_sq") for p in engine.held_pieces(kind)]


def test_fp16_backs_off_until_steps_apply() -> None:
    first, second = run_ranks(2, overflow_then_recover, ddp(precision="fp16"))
    applied = [outcome.applied for outcome, _ in first]
    assert not applied[0]
    assert all(applied[applied.index(True) :])
    for number, ((outcome, kept), (other, also_kept)) in enumerate(zip(first, second, strict=True)):
        assert repr(outcome) == repr(other)
        assert kept is also_kept is not outcome.applied
        if not outcome.applied:
            assert outcome.loss_scale == 2.0 ** (24 - number)
            assert outcome.culprit is not None
            assert outcome.culprit.phase == "local gradient"


def short_rank(rank: int, world: int, run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rank 1 gives dummies, with a graph and without one, in the place of one or of both micro-batches."""
    engines = start(run), start(run)
    tokens = torch.arange(6).expand(2, 6)
    for missing in ({1}, {0}, {0, 1}):
        for dummy, engine in enumerate(engines):
            for index in engine.accumulate(range(2)):
                loss, weight = engine(tokens=(tokens + 2 * rank + index) % 13), 1.0
                if rank == 1 and index in missing:
                    loss, weight = (torch.zeros(()) if dummy else loss), 0.0
                engine.backward(loss, weight=weight)
            assert engine.step().applied
    return engines[0].master_state(), engines[1].master_state()


def test_a_dummy_without_a_graph_takes_part() -> None:
    with_graph, without = run_ranks(2, short_rank, ddp("tied", "fp32"))[0]
    for name, master in with_graph.items():
        assert torch.equal(without[name], master), name


class CountingBuckets:
    """Stands for the engine's watch on the wire."""

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype] = []

    def look(self, label: str, tensor: Tensor) -> None:
        self.dtypes.append(tensor.dtype)

    def require_seen(self) -> None:
        assert self.dtypes


def buckets_of_two_steps(rank: int, world: int, run: Run) -> list[list[torch.dtype]]:
    engine: Any = start(run)
    counts = []
    for step in range(2):
        wire = engine._wire = CountingBuckets()
        forward_backward(engine, run, step)
        engine.step()
        counts.append(wire.dtypes)
    return counts


def test_gradients_travel_once_a_step_in_fp32() -> None:
    for dtypes in run_ranks(2, buckets_of_two_steps, ddp(accumulation=3))[0]:
        assert dtypes == [torch.float32], "one bucket, after the last of three micro-batches"


def buffers_of_each_rank(rank: int, world: int, run: Run) -> dict[str, Tensor]:
    engine = start(run)
    forward_backward(engine, run, 0)  # type: ignore[arg-type]
    engine.step()
    return {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


def test_buffers_stay_those_of_the_rank() -> None:
    """As with the native engine: each rank's batch norm sees its own micro-batches."""
    run = ddp("conv_batch_norm")
    native = Run("conv_batch_norm", accumulation=2, unequal_weights=True, options={"precision": "bf16"})
    for own, other in zip(
        run_ranks(2, buffers_of_each_rank, run), run_ranks(2, buffers_of_each_rank, native), strict=True
    ):
        for name, buffer in own.items():
            torch.testing.assert_close(buffer, other[name], rtol=2e-2, atol=2e-2)
    first, second = run_ranks(2, buffers_of_each_rank, run)
    assert not torch.equal(first["features.1.running_mean"], second["features.1.running_mean"])


def test_misuse_is_named() -> None:
    x = torch.ones(2, 4)
    options: dict[str, Any] = {"engine": "ddp", "precision": "fp32", "seed": 0}
    engine = dtrain.initialize(nn.Linear(4, 1), **options)
    with pytest.raises(UsageError, match=r"outside engine\.backward; call engine\.backward"):
        engine(x).sum().backward()
    engine = dtrain.initialize(nn.Linear(4, 1), **options)
    engine.backward(engine(x).sum())
    engine.module.weight.requires_grad_(False)
    with pytest.raises(ContractError, match=r"'weight' was frozen after dtrain\.initialize"):
        engine.step()
    engine = dtrain.initialize(nn.Linear(4, 1), **options)
    engine.module.weight.data = torch.ones(1, 4)
    engine.backward(engine(x).sum())
    with pytest.raises(ContractError, match="'weight' no longer lies where the engine updates it"):
        engine.step()


class Opaque(nn.Module):
    """Returns its output in an object of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> object:
        return type("Output", (), {"value": self.linear(x)})()


def forward_of_an_opaque_output(rank: int, world: int) -> str:
    engine = dtrain.initialize(Opaque(), engine="ddp", precision="fp32", seed=0)
    with engine.eval():
        engine(torch.ones(2, 4))
    with pytest.raises(ModelError) as raised:
        engine(torch.ones(2, 4))
    return str(raised.value)


def test_an_output_without_visible_tensors_is_named() -> None:
    """DistributedDataParallel would take all parameters for unused, and fail in the backward without a cure."""
    for text in run_ranks(2, forward_of_an_opaque_output):
        assert "returns a Output, in which DistributedDataParallel finds no tensor; return tensors" in text


def test_memory_is_what_the_formula_says() -> None:
    engine = dtrain.initialize(nn.Linear(4, 4), engine="ddp", precision="bf16", seed=0)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.finish_gradients()  # type: ignore[attr-defined]
    formula = engine.memory_formula()
    assert formula == {"compute": 0, "main_grad": 80, "master": 80, "moments": 160}
    assert {kind: engine.memory()[kind] for kind in formula} == formula
