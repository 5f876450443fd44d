"""What a user does to a parameter under ``fully_shard``: to its DTensor, to the unsharded one, to an old reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.errors import UsageError
from tests.helpers.net import Net
from tests.helpers.one_rank import X, build, loss_of, start


def changed(engine: Any, before: dict[str, Tensor]) -> set[str]:
    return {name for name, weight in engine.master_state().items() if not torch.equal(weight, before[name])}


def begin(model: nn.Module, stage: int, precision: str = "fp32") -> Any:
    sgd = dtrain.SGD(lr=0.1, momentum=0, weight_decay=0)
    return start(model, engine="fsdp2", zero_stage=stage, precision=precision, optimizer=sgd)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("prefix", ["2", ""])
def test_a_weight_that_was_frozen_in_the_first_forward_trains(prefix: str, stage: int, precision: str) -> None:
    engine = begin(build(), stage, precision)
    before = engine.master_state()
    frozen = [p for name, p in engine.module.named_parameters() if name.startswith(prefix)]
    for parameter in frozen:
        parameter.requires_grad_(False)
    with torch.no_grad():
        engine(X)
    for parameter in frozen:
        parameter.requires_grad_(True)
    engine.backward(loss_of(engine))
    assert engine.step().applied
    assert changed(engine, before) >= {"2.weight", "2.bias"}


def test_a_frozen_unsharded_parameter_stays_frozen_when_it_is_gathered_again() -> None:
    engine = begin(build(), 2)
    before = engine.master_state()
    with torch.no_grad():
        engine(X)
    unsharded = [p for name, p in engine.module.named_parameters() if name.startswith("2")]
    for parameter in unsharded:
        parameter.requires_grad_(False)
    for name, module in engine.module.named_children():
        if name == "2":
            module.reshard()
    engine.backward(loss_of(engine))
    for parameter in engine.module[2].parameters():
        parameter.requires_grad_(True)
    assert engine.step().applied
    assert not changed(engine, before) & {"2.weight", "2.bias"}


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("where", ["before", "old reference", "unsharded"])
def test_a_hook_sees_whole_gradients_until_it_is_removed(kind: str, where: str) -> None:
    shapes: list[torch.Size] = []

    def see(given: Tensor) -> None:
        grad = given if kind == "register_hook" else given.grad
        assert grad is not None
        assert type(grad) is Tensor
        shapes.append(grad.shape)

    model = build()
    parameter = model[2].weight
    handle = getattr(parameter, kind)(see) if where == "before" else None
    engine = begin(model, 2)
    if where != "before":
        if where == "unsharded":
            with torch.no_grad():
                engine(X)
            parameter = engine.module[2].weight
        handle = getattr(parameter, kind)(see)
    for _ in range(2):
        engine.backward(loss_of(engine))
        engine.step()
    assert shapes == [torch.Size([1, 4])] * 2
    assert handle is not None
    handle.remove()
    engine.backward(loss_of(engine))
    engine.step()
    assert len(shapes) == 2


def test_a_unit_that_only_evaluates_between_two_steps_shows_no_gradient() -> None:
    """Its unsharded parameters appear after the gradients of the others have been chosen."""

    heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    engine = begin(Net(lambda net, x, head: net.heads[head](x), heads=heads), 2)
    for micro in engine.accumulate([X, X]):
        engine.backward(engine(micro, 0).square().mean())
        with torch.no_grad():
            engine(micro, 1)
        shown = {name: p.grad is not None for name, p in engine.module.named_parameters()}
        assert shown == {"heads.0.weight": True, "heads.0.bias": True, "heads.1.weight": False, "heads.1.bias": False}
        engine.module.heads[0].bias.grad = None
        with pytest.raises(UsageError, match=r"'heads.0.bias'.grad was set to None"):
            engine.step()
    assert engine.step().applied


def test_an_engine_with_hooks_is_freed() -> None:
    import gc
    from weakref import ref

    model = build()
    model[2].weight.register_hook(lambda grad: 2 * grad)
    engine = begin(model, 2)
    engine.module[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    engine.backward(loss_of(engine))
    engine.step()
    kept = ref(engine.module[0].weight)
    del engine, model
    gc.collect()
    assert kept() is None
