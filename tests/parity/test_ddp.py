"""The DDP engine: gradients are summed once a step, whatever the loss is computed from; guards and memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.errors import ContractError, UsageError
from tests.helpers.oracle import normwise_error
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, forward_backward, start

pytestmark = pytest.mark.processes


def ddp(model: str = "transformer", precision: str = "bf16", **run: Any) -> Run:
    options = {"engine": "ddp", "precision": precision}
    return Run(model, options=options, **{"accumulation": 2, "unequal_weights": True, **run})


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
    assert all(torch.equal(without[name], master) for name, master in with_graph.items())


def buckets_of_two_steps(rank: int, world: int, run: Run) -> list[list[torch.dtype]]:
    """The dtypes that the engine's check of the reduced dtype is shown in each step."""
    engine: Any = start(run)
    counts = []
    for step in range(2):
        check = engine._gradients.reduce_dtype_check = Mock()
        forward_backward(engine, run, step)
        engine.step()
        counts.append([call.args[1].dtype for call in check.record.call_args_list])
    return counts


def test_gradients_are_reduced_once_a_step_in_fp32() -> None:
    for dtypes in run_ranks(2, buckets_of_two_steps, ddp(accumulation=3))[0]:
        assert dtypes == [torch.float32], "one bucket, after the last of three micro-batches"


def test_misuse_is_named() -> None:
    x = torch.ones(2, 4)

    def begin() -> Any:
        return dtrain.initialize(nn.Linear(4, 1), engine="ddp", precision="fp32", seed=0)

    with pytest.raises(UsageError, match=r"outside engine\.backward; call engine\.backward"):
        begin()(x).sum().backward()
    engine = begin()
    engine.backward(engine(x).sum())
    engine.module.weight.requires_grad_(False)
    with pytest.raises(ContractError, match=r"'weight' was frozen after dtrain\.initialize"):
        engine.step()
    engine = begin()
    engine.module.weight.data = torch.ones(1, 4)
    engine.backward(engine(x).sum())
    with pytest.raises(ContractError, match="'weight' no longer lies where the engine updates it"):
        engine.step()


class Heads(nn.Module):
    """A trunk and two heads, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor, head: str = "left") -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        self.extra = self.right(hidden).pow(2).mean()
        output: Tensor = getattr(self, head)(hidden).pow(2).mean()
        return output


def start_small(engine: str) -> Any:
    torch.manual_seed(0)
    return dtrain.initialize(
        Heads(), optimizer=dtrain.AdamW(lr=1e-2), max_grad_norm=0.5, engine=engine, precision="fp32", seed=0
    )


def batch(rank: int, step: int, micro_batch: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank))


def l2(engine: Any) -> Tensor:
    return 1e-2 * torch.stack([p.pow(2).sum() for p in engine.module.parameters()]).sum()


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "the module itself": lambda engine, x: engine.module(x),
    "a head of each rank": lambda engine, x: engine(x, "right" if engine.rank else "left"),
    "two forwards": lambda engine, x: engine(x, "left") + engine(2 * x, "right"),
    "a loss kept on the module": lambda engine, x: engine(x) + engine.module.extra,
    "weights read outside a forward": lambda engine, x: engine(x) + l2(engine),
}


Masters = list[tuple[dict[str, Tensor], list[Tensor]]]


def masters_of_both(rank: int, world: int) -> dict[str, Masters]:
    """Masters under native and under DDP, and this rank's bits of them, for each kind of loss and for loops left."""
    found: dict[str, Masters] = {}
    for name, loss in LOSSES.items():
        found[name] = []
        for engine in (start_small("native"), start_small("ddp")):
            for step in range(3):
                for index in engine.accumulate(range(1 + step % 2)):
                    engine.backward(loss(engine, batch(rank, step, index)), weight=1.0 + index)
                assert engine.step().applied
            found[name].append(masters_and_bits(engine))
    found["loops left early"] = []
    for engine in (start_small("native"), start_small("ddp")):
        for step, stop in enumerate((0, 2, 1, 0, 2)):  # in the first step, in a later one, and whole loops between
            for index in engine.accumulate(range(3)):
                engine.backward(engine(batch(rank, step, index), "left" if index % 2 else "right"), weight=1.0 + index)
                if index == stop:
                    break
            with torch.no_grad():
                assert engine.step().applied
        found["loops left early"].append(masters_and_bits(engine))
    return found


def masters_and_bits(engine: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    # for each unused parameter that the library finds, the host would wait for the device
    assert engine.name == "native" or not engine._replicated.find_unused_parameters
    return engine.master_state(), [shard.data.clone() for shard in engine.states.local_shards("master")]


def test_a_loss_may_come_from_anywhere_and_a_loop_may_be_left() -> None:
    """DistributedDataParallel around the forward takes for unused what its output does not lead to."""
    first, second = run_ranks(2, masters_of_both)
    for name, ((native, _), (masters, held)) in first.items():
        assert normwise_error(masters, native) < 1e-5, name
        assert all(map(torch.equal, second[name][1][1], held)), f"{name}: the ranks hold other bits"


def a_step_without_sums(rank: int, world: int) -> str:
    engine = start_small("ddp")
    engine.backward(engine(batch(rank, 0, 0)))
    engine.step()
    engine._replicated.require_backward_grad_sync = False  # after the first step the reduced dtype is not checked
    engine.backward(engine(batch(rank, 1, 0)))
    with pytest.raises(ContractError) as caught:
        engine.step()
    return str(caught.value)


def test_a_step_that_was_not_summed_is_never_applied() -> None:
    for text in run_ranks(2, a_step_without_sums):
        assert "summed 0 elements of gradients over the ranks in step 1, expected 60" in text


def engines_that_are_dropped(rank: int, world: int) -> list[bool]:
    freed = []
    for _ in range(2):
        engine = start_small("ddp")
        engine.backward(engine(batch(rank, 0, 0)))
        engine.step()
        watched = weakref.ref(engine), weakref.ref(engine.module), weakref.ref(engine._replicated)
        del engine
        gc.collect()
        freed += [reference() is None for reference in watched]
    return freed


def test_an_engine_that_is_dropped_is_freed() -> None:
    assert all(map(all, run_ranks(2, engines_that_are_dropped)))


def test_memory_is_what_the_formula_says() -> None:
    engine = dtrain.initialize(nn.Linear(4, 4), engine="ddp", precision="bf16", seed=0)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.finish_gradients()  # type: ignore[attr-defined]
    formula = engine.memory_formula()
    assert formula == {"compute": 0, "main_grad": 80, "master": 80, "moments": 160, "frozen": 0}
    assert formula.items() <= engine.memory().items()
