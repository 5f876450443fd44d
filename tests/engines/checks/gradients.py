"""What a user's script does to gradients and to ``requires_grad`` is done, as in plain PyTorch, or refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.hooks import RemovableHandle

import dtrain
from dtrain.errors import UsageError
from tests.engines.matrix import Trial, check
from tests.helpers.net import Net

SCALE = 4.0  # of the loss
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(16).reshape(4, 4) % 2).float()
HOOKED = ("tensor", "none", "removed", "in_place", "replaced", "output")


class Layers(nn.Module):
    """Two Linears for each way to add a hook, one hooked before ``initialize`` and one after; masked weights are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {f"{way}_{when}": nn.Linear(4, 4) for way in HOOKED for when in ("before", "after")}
        )
        with torch.no_grad():
            for layer in self.layers.values():
                layer.weight.mul_(MASK)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers.values()])


class Hooks:
    """Adds the hooks to a model, and keeps the gradients that they see."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {}

    def add(self, layer: nn.Linear, way: str, name: str) -> None:
        def keep(grad: Tensor) -> Tensor:
            self.seen.setdefault(name, []).append(grad.detach().clone())
            return grad * MASK.to(grad.dtype)

        def in_place(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.copy_(keep(parameter.grad))

        def replaced(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad = keep(parameter.grad)

        weight = dict(layer.named_parameters())["weight"]
        hooks: dict[str, Callable[[], RemovableHandle]] = {
            "tensor": lambda: weight.register_hook(keep),
            "none": lambda: weight.register_hook(lambda grad: None),
            "removed": lambda: weight.register_hook(keep),
            "in_place": lambda: weight.register_post_accumulate_grad_hook(in_place),
            "replaced": lambda: weight.register_post_accumulate_grad_hook(replaced),
            "output": lambda: layer.register_full_backward_hook(lambda module, inputs, grads: None),
        }
        handle = hooks[way]()
        if way == "removed":
            handle.remove()


def _hooked(start: Callable[[nn.Module], Any]) -> tuple[Any, Hooks]:
    torch.manual_seed(0)
    model, hooks = Layers(), Hooks()
    engine: Any = None
    for when in ("before", "after"):
        if when == "after":
            engine = start(model)
            model = engine.module
        for way in HOOKED:
            hooks.add(model.layers[f"{way}_{when}"], way, f"{way}_{when}")  # type: ignore[arg-type]
    return engine, hooks


@check(precisions=("bf16", "fp32"), ranks=(2, 1))
def hooks_of_a_user_run(trial: Trial) -> None:
    """Before and after ``initialize``, once a micro-batch, on its whole gradient, which is still scaled."""
    case = trial.case
    options = {"optimizer": dtrain.SGD(lr=0.1, momentum=0, weight_decay=0), "max_grad_norm": None, "loss_scale": SCALE}
    engine, hooks = _hooked(lambda model: trial.engine(model, **options))
    before = engine.master_state()
    for _ in range(2):
        for micro in engine.accumulate([X, X]):
            engine.backward(engine(micro).square().mean())
        assert engine.step().applied
    low = case.precision == "bf16" and not (case.engine == "ddp" or (case.engine, case.stage) == ("deepspeed", 0))
    for name, weight in engine.master_state().items():
        way = name.split(".")[1].split("_before")[0].split("_after")[0]
        if "weight" not in name:
            continue
        masks = way in ("tensor", "in_place", "replaced")
        assert bool(weight[MASK == 0].eq(0).all()) == masks, name
        assert not torch.equal(weight, before[name])
    # in these the sum over the micro-batches so far is what accumulates
    running = case.engine == "ddp" or (case.engine, case.stage) == ("deepspeed", 0)
    want = _plain_gradients(X)
    for name, grads in hooks.seen.items():
        assert len(grads) == 4, name
        assert {grad.dtype for grad in grads} == {torch.bfloat16 if low else torch.float32}
        tolerance = 3e-2 if case.precision == "bf16" else 1e-5
        torch.testing.assert_close(grads[0].float() / SCALE, want[name], rtol=tolerance, atol=tolerance)
        if case.precision == "fp32" and not name.startswith("tensor"):
            factor = MASK + 1 if running else torch.ones(())
            torch.testing.assert_close(grads[1] / SCALE, want[name] * factor, rtol=1e-5, atol=1e-5)
    assert len(hooks.seen) == 6


def _plain_gradients(x: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Layers()
    model(x).square().mean().backward()
    return {name: layer.weight.grad for name, layer in model.layers.items()}  # type: ignore[misc]


FROZEN = {  # names, whether the parameters are fetched again to release them, and whether it is an evaluation
    "for a reference": ("3", False, False),
    "and fetched again": ("3", True, False),
    "whole": ("", False, False),
    "in evaluation": ("3", True, True),
}


def _small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 1))


def _named(model: nn.Module, prefix: str) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.startswith(prefix)]


def _trainable(parameters: list[nn.Parameter], is_trained: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(is_trained)


@check(precisions=("fp32", "bf16"), ranks=(2, 1))
def a_weight_frozen_around_a_forward_without_gradients_trains(trial: Trial) -> None:
    for label, (prefix, is_fetched_again, in_eval) in FROZEN.items():
        engine = trial.engine(_small(), optimizer=dtrain.SGD(lr=0.1, momentum=0))
        before = engine.master_state()
        for _ in range(2):
            frozen = _named(engine.module, prefix)
            _trainable(frozen, False)
            with engine.eval() if in_eval else torch.no_grad():
                engine(X)
            _trainable(_named(engine.module, prefix) if is_fetched_again else frozen, True)
            engine.backward(engine(X).square().mean())
            assert engine.step().applied
        assert all(not torch.equal(weight, before[name]) for name, weight in engine.master_state().items()), label


@check(ranks=(2, 1))
def a_weight_frozen_for_a_micro_batch_has_no_gradient_in_it(trial: Trial) -> None:
    """As in plain PyTorch: its gradient is that of the other micro-batch alone, and zero if it was frozen in both."""
    sgd = dtrain.SGD(lr=0.1, momentum=0, weight_decay=0)
    for frozen_in in ((0,), (1,), (0, 1)):
        engine, plain = trial.engine(_small(), optimizer=sgd, max_grad_norm=None), _small()
        theirs, own = _named(plain, "3"), _named(engine.module, "3")
        for _ in range(2):
            for index, micro in enumerate(engine.accumulate([X, 2 * X])):
                _trainable([*theirs, *own], index not in frozen_in)
                plain(micro).square().mean().backward()
                engine.backward(engine(micro).square().mean())
                _trainable([*theirs, *own], True)
            assert engine.step().applied
            with torch.no_grad():
                for parameter in plain.parameters():
                    if parameter.grad is not None:
                        parameter -= sgd.lr * parameter.grad / 2
                    parameter.grad = None
        for name, weight in engine.master_state().items():
            torch.testing.assert_close(weight, plain.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


@check(precisions=("fp32", "bf16"), ranks=(2, 1))
def gradients_show_that_they_are_taken(trial: Trial) -> None:
    """Reads are NaN, changes are refused before anything is lost, and the step has the bits of one without them."""
    case = trial.case

    def trained(by_hand: Callable[[Any, str], None]) -> dict[str, Tensor]:
        model = Net(lambda net, x: net.used(x), used=_small(), unused=nn.Linear(2, 2))
        engine = trial.engine(model, optimizer=dtrain.AdamW(lr=0.1))
        for _ in range(2):
            for index, micro in enumerate(engine.accumulate([X, 2 * X])):
                loss = engine(micro).square().mean()
                by_hand(engine, "before a backward" if index else "before the first backward")
                engine.backward(loss)
            by_hand(engine, "before the step")
            assert engine.step().applied
            by_hand(engine, "after the step")
        return engine.master_state()

    at_first: dict[str, int] = {}

    def by_hand(engine: Any, when: str) -> None:
        named = dict(engine.module.named_parameters())
        memory = engine.memory()
        if when == "before the first backward":
            at_first.update(memory if not engine.attempted_steps else {})
            assert engine.attempted_steps or all(p.grad is None for p in named.values())
            engine.module.zero_grad()
            return
        weight = named["used.3.weight"]
        assert named["unused.weight"].grad is None
        assert (weight.grad.dtype, weight.grad.device) == (weight.dtype, weight.device)
        if (case.engine, case.stage) != ("deepspeed", 3):  # where a sharded parameter has no elements
            assert weight.grad.shape == weight.shape == (1, 4)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                assert bool(sum(p.grad.norm() for p in named.values() if p.grad is not None).isnan())
            assert len(found) <= 1
            with pytest.raises(UsageError, match=r"'used.3.weight'.grad is given to .*max_grad_norm"):
                clip_grad_norm_([weight], 1.0)
        if when == "after the step":
            torch.optim.SGD(named.values(), foreach=True).zero_grad(set_to_none=False)
            engine.module.zero_grad(set_to_none=False)
            assert memory["main_grad"] <= at_first["main_grad"], "nothing holds the gradients of the step"
            engine.module.zero_grad()
            return
        go_on = (
            engine.step if when == "before the step" else lambda: engine.backward(torch.ones((), requires_grad=True))
        )
        for changed in (None, torch.zeros_like(weight), torch.ones_like(weight)):
            weight.grad = changed
            named["used.0.bias"].grad = None
            with pytest.raises(UsageError, match=r"'used.0.bias'.grad was set to None after .*\(set so: 2\).*freeze"):
                go_on()
        with torch._C.DisableTorchFunctionSubclass():  # the elements that DeepSpeed's stage 3 has left it
            named["unused.bias"].grad = torch.ones_like(named["unused.bias"])
        with pytest.raises(UsageError, match=r"'unused.bias'.grad was set to a tensor"):
            go_on()
        assert engine.memory() == memory

    want = trained(lambda engine, when: None)
    for name, weight in trained(by_hand).items():
        assert torch.equal(weight, want[name]), name


@check(precisions=("bf16",), ranks=(2, 1))
def a_late_decision_finds_the_same_culprit(trial: Trial) -> None:
    """On a GPU the host reads the decision in the next call; only the sum of the gradients is infinite."""
    found = []
    for is_synchronous in (True, False):
        engine = trial.engine(_small())
        engine.module[3].weight.register_hook(_almost_infinite)
        engine._finalizer.is_synchronous = is_synchronous
        for micro in engine.accumulate([X, X, X]):
            engine.backward(engine(micro).square().mean())
        outcome = engine.step()
        assert not outcome.applied
        found.append(str(outcome.culprit))
    assert found[0] == found[1]
    assert "3.weight" in found[0]


def _almost_infinite(grad: Tensor) -> Tensor:
    return torch.where(torch.arange(grad.numel(), device=grad.device).view_as(grad) == 2, 3e38, grad)
