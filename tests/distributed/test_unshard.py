"""Stage 3: groups that are unsharded and resharded give the bits of stage 2, in the memory that was promised."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.errors import ConfigError, ModelError, UsageError
from dtrain.sharding.group import ParameterGroup
from tests.helpers.ranks import run_ranks
from tests.helpers.unshard_models import DIM, MODELS, Block, Stack, batch, build

pytestmark = pytest.mark.processes


def start(model: nn.Module, **options: Any) -> Any:
    return dtrain.initialize(model, seed=5, max_grad_norm=0.1, **{"precision": "fp32", "zero_stage": 3, **options})


def train(engine: Any, steps: int = 2) -> list[float]:
    """Two micro-batches a step on each rank, and an evaluation between the steps."""
    losses = []
    for step in range(steps):
        for index in engine.accumulate([engine.rank, engine.world_size + engine.rank]):
            engine.backward(engine(batch(step, index)))
        losses.append(engine.step().loss)
        with engine.eval():
            losses.append(float(engine(batch(step, 9))))
    return losses


VARIANTS: list[dict[str, Any]] = [
    {"prefetch": prefetch, "reshard_after_forward": reshard}
    for prefetch, reshard in itertools.product((1, 0, 3), (True, False))
]


def compare_with_stage_2(rank: int, world: int, precision: str, variants: dict[str, list[int]]) -> None:
    """``variants`` has numbers of options by model."""
    common = {"precision": precision, "reproducible": True}
    for name, numbers in variants.items():
        reference = start(build(name), zero_stage=2, **common)
        want = (train(reference), reference.master_state())
        for variant in [VARIANTS[number] for number in numbers]:
            engine = start(build(name), **common, **variant)
            losses, masters = train(engine), engine.master_state()
            assert losses == want[0], (name, variant)
            assert not [key for key in masters if not torch.equal(masters[key], want[1][key])], (name, variant)
            assert not engine.memory()["unsharded"], (name, variant)
            peak = engine.sharded.scheduler.peak
            assert peak <= 1 + variant["prefetch"] or not variant["reshard_after_forward"], name


@pytest.mark.parametrize(
    ("precision", "variants"),
    [
        ("fp32", {name: [0, 1, 2, 3, 4, 5] if name == "plain" else [0] for name in MODELS}),
        *(
            pytest.param(precision, {name: [0, 2, 5] for name in MODELS}, marks=pytest.mark.exhaustive)
            for precision in ("fp32", "bf16")
        ),
    ],
    ids=["fp32", "fp32-all", "bf16-all"],
)
def test_the_bits_of_stage_2_for_every_model_and_option(precision: str, variants: dict[str, list[int]]) -> None:
    run_ranks(2, compare_with_stage_2, precision, variants)


EVENT_OPTIONS: list[dict[str, Any]] = [{}, {"prefetch": 0}, {"reshard_after_forward": False}]


def all_unshard_events(rank: int, world: int) -> list[tuple[list[str], int, int]]:
    """Returns when groups are unsharded, ready and resharded in one step: the second, whose order is known."""
    found = []
    for options in EVENT_OPTIONS:
        with pytest.MonkeyPatch.context() as patch:
            found.append(unshard_events(rank, options, patch))
    return found


def unshard_events(rank: int, options: dict[str, Any], patch: pytest.MonkeyPatch) -> tuple[list[str], int, int]:
    engine = start(build("plain"), **options)
    train(engine, 1)
    events: list[str] = []

    def logged(event: str, what: str, changed: Callable[[ParameterGroup], bool]) -> None:
        real = getattr(ParameterGroup, what)

        def call(group: ParameterGroup) -> None:
            before = changed(group)
            real(group)
            if group.name and changed(group) != before:
                events.append(f"{event} {group.name[-1]}")

        patch.setattr(ParameterGroup, what, call)

    logged("start", "start_unshard", lambda group: group.is_unsharding)
    logged("finish", "unshard", lambda group: group.is_ready)
    logged("reshard", "reshard", lambda group: group.is_unsharding)
    loss = engine(batch(0, rank))
    held = engine.memory()["unsharded"]
    engine.backward(loss)
    engine.step()
    return events, held, engine.sharded.scheduler.peak


def test_the_next_group_is_unsharded_while_one_computes() -> None:
    (events, held, peak), unprefetched, kept = run_ranks(2, all_unshard_events)[0]
    forward, backward = events[: events.index("finish 4") + 1], events[events.index("finish 4") + 1 :]
    assert forward[:3] == ["start 0", "start 1", "finish 0"]
    for here, following in itertools.pairwise("0123"):
        steps = (f"start {following}", f"reshard {here}", f"finish {following}")
        assert [*steps] == sorted(steps, key=forward.index)
    # the last two groups of forward stay, and are the first of backward
    assert not {"reshard 3", "reshard 4"} & set(forward)
    assert not {"start 3", "start 4"} & set(backward)
    for here, following in itertools.pairwise("3210"):
        steps = (f"start {following}", f"reshard {here}", f"finish {following}")
        assert [*steps] == sorted(steps, key=backward.index)
    assert backward.index("reshard 4") < backward.index("finish 2"), "2 takes the room of 4"
    assert peak == 2
    block = sum(p.numel() for p in Block().parameters())
    assert 0 < held - 2 * 4 * block < held, "between forward and backward: the root and the last two groups"
    there = 0
    assert unprefetched[2] == 1
    for event in unprefetched[0]:
        there += {"start": 1, "finish": 0, "reshard": -1}[event.split()[0]]
        assert there <= 1, "without prefetch one group is unsharded"
    assert sorted(event for event in kept[0] if event.startswith("start")) == [f"start {i}" for i in range(5)]
    assert [event for event in kept[0] if event.startswith("reshard")] == [f"reshard {i}" for i in "43210"]


class Peeks(Stack):
    """The root reads a parameter of a block, at some point of its forward."""

    def __init__(self) -> None:
        super().__init__(Block(), Block(), Block())  # the last two stay unsharded at the end of a forward
        self.peek: Callable[[Peeks], Tensor] = lambda model: torch.zeros(())

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(x) + self.peek(self)


class Returns(Block):
    """Returns its own parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down.bias


def refuses(error: type[Exception], call: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(error) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


def reading_is_an_error_with_the_fix(rank: int, world: int) -> None:
    """All ranks do each of these, so they stay together."""
    x = batch(0, 0)
    peeks = Peeks()
    engine = start(peeks)
    engine(x)
    peeks.peek = lambda model: model.blocks[1].up.weight.sum()  # type: ignore[union-attr,operator]
    said = "'blocks.1.up.weight' is read outside the forward of 'blocks.1'"
    refuses(ModelError, lambda: engine(x), said, "keep_gathered=['blocks.1.up.weight']")
    peeks.peek = lambda model: model.blocks[1].down(torch.zeros(2 * DIM))  # type: ignore[operator]
    refuses(ModelError, lambda: engine(x), "'blocks.1.down.weight' is read outside the forward of 'blocks.1'")
    raw = dict(peeks.named_parameters())["blocks.0.up.weight"]
    peeks.peek = lambda model: raw.sum()
    assert engine(x).isnan(), "no number that could be taken for one"
    refuses(UsageError, raw.isnan, "'blocks.0.up.weight' is read outside a forward of the engine")
    assert raw.shape == (2 * DIM, DIM)
    said = "'blocks.0.up.bias' is read outside a forward of the engine"
    refuses(UsageError, lambda: peeks.blocks[0].up.bias.sum(), said, "engine.master_state()")
    refuses(UsageError, lambda: peeks.blocks[0](x), "'blocks.0' is called outside a forward of the engine")
    refuses(UsageError, peeks.state_dict, "is read outside a forward of the engine", "engine.master_state()")
    said = "a dummy loss without a graph with engine=native at zero_stage=3"
    refuses(UsageError, lambda: engine.backward(torch.zeros(()), weight=0), said)
    assert repr(peeks) == repr(Peeks())
    said = "'blocks.0' returns its parameter 'blocks.0.down.bias'"
    refuses(ModelError, lambda: start(Stack(Returns()))(x), said)
    said = "keep_gathered pattern 'block.1' matches no parameter"
    refuses(ConfigError, lambda: start(Peeks(), keep_gathered=["block.1"]), said)
    fixed = Peeks()
    fixed.peek = lambda model: model.blocks[1].up.weight.sum()  # type: ignore[union-attr,operator]
    engine = start(fixed, keep_gathered=["blocks.1.up"])
    train(engine)
    assert [group.name for group in engine.sharded.groups] == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert len(engine.sharded.groups[0].parameters) == 4 + 2


def aliases_and_copies(rank: int, world: int) -> None:
    engine = start(build("plain"))
    seen: list[Tensor] = []
    block = engine.module.blocks[0]  # type: ignore[index]
    block.register_forward_pre_hook(lambda module, args: seen.append(module.up.weight.detach()))
    before = engine.master_state()
    engine.backward(engine(batch(0, rank)))
    engine.step()
    with engine.states.reads:
        copied = copy.deepcopy(engine.module)
    copied.load_state_dict({name: torch.ones_like(p) for name, p in copied.named_parameters()})
    x = torch.ones(1, 5, DIM)
    with torch.inference_mode():
        value = float(engine.module(x))
    changed = torch.exp(torch.ones(2, requires_grad=True))
    with torch.enable_grad():
        graph = engine.module.register_forward_pre_hook(lambda module, args: (args[0] * changed.square().sum(),))
        loss = engine(x)
        changed.add_(1)
        graph.remove()
    outputs = [weakref.ref(engine(batch(0, rank))) for _ in range(3)]
    gc.collect()
    assert all(output() is None for output in outputs), "a forward without backward leaves nothing behind"
    assert rank != 0 or torch.equal(seen[0], before["blocks.0.up.weight"]), "an alias keeps the values it had"
    assert copied(x).isfinite(), "a copy is a model of its own"
    assert not any(p.isnan().any() for p in copied.parameters())
    assert engine.memory()["unsharded"] > 0, "no hook of the engine is in the copy"
    assert value == value, "inference_mode has weights"
    refuses(RuntimeError, lambda: engine.backward(loss), "modified in place")


@pytest.mark.parametrize("check", [reading_is_an_error_with_the_fix, aliases_and_copies])
def test_sharded_parameters(check: Callable[..., None]) -> None:
    run_ranks(2, check)
