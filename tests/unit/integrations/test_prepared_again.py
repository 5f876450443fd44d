"""A model that is prepared again: its first engine ends, and the second continues with its weights."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import dtrain
from dtrain.errors import UsageError
from dtrain.integrations.accelerate import Accelerator
from tests.helpers.accelerate_loops import F, reset_accelerate
from tests.helpers.trainers import EngineTrainer, arguments, build_model, needs_trainer, text_rows

ENGINES: dict[str, dict[str, Any]] = {
    "native 0": {"zero_stage": 0},
    "native 2 bf16": {"zero_stage": 2, "mixed_precision": "bf16"},
    "native 3 bf16": {"zero_stage": 3, "mixed_precision": "bf16"},
    "native 2 fp8": {"zero_stage": 2, "mixed_precision": "fp8"},
    "native recomputed": {"blocks": dtrain.Blocks(recompute="full")},
    "ddp bf16": {"engine": "ddp", "mixed_precision": "bf16"},
    "fsdp2 bf16": {"engine": "fsdp2", "mixed_precision": "bf16"},
}


class Net(nn.Module):
    """Has a tied and a frozen parameter, running statistics, a norm, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(2)])
        self.statistics, self.base = nn.BatchNorm1d(16), nn.Linear(16, 16).requires_grad_(False)
        self.num_calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(self.statistics(self.base(x)))
        return logits


def prepare(net: nn.Module, options: dict[str, Any]) -> Any:
    reset_accelerate()
    accelerator = Accelerator(cpu=True, seed=0, **options)
    # of the parameters that the first engine has, if there is one
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    return accelerator, *accelerator.prepare(net, optimizer)


def train(accelerator: Any, model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    tokens = torch.arange(16)
    for _ in range(2):
        accelerator.backward(F.cross_entropy(model(tokens), tokens))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("name", ENGINES)
def test_the_second_engine_continues_with_the_weights_of_the_first(name: str) -> None:
    net, fresh = Net(), Net()
    first = prepare(net, ENGINES[name])
    middle = train(*first)
    engine = first[1].engine
    called: list[str] = []
    net.blocks[0].register_forward_hook(lambda *_: called.append("hook"))  # the user's own
    for second in (name, "native 2 bf16"):
        fresh = Net()
        fresh.load_state_dict(middle)
        parts = prepare(net, ENGINES[second])
        assert parts[0].unwrap_model(parts[1]) is net
        again = parts[0].get_state_dict(parts[1])
        kept = {key: value for key, value in middle.items() if "base" not in key}  # BF16 rounds frozen weights
        assert all(torch.equal(again[key], value) for key, value in kept.items())
        got, want = train(*parts), train(*prepare(fresh, ENGINES[second]))
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], value) for key, value in want.items())
        assert not torch.equal(got["head.weight"], middle["head.weight"])
        middle = got
    assert len(called) >= 4
    assert net.num_calls == 6
    for call in (lambda: first[1](torch.arange(16)), lambda: first[0].get_state_dict(first[1]), first[1].state_dict):
        with pytest.raises(UsageError, match="was prepared again, by another Trainer or accelerator"):
            call()
    for verb in (lambda: engine(torch.arange(16)), engine.master_state, lambda: engine.eval().__enter__(), engine.step):
        with pytest.raises(UsageError, match="of an engine whose model was prepared again; use the newer engine"):
            verb()


@pytest.mark.parametrize("name", [*ENGINES, "fsdp2 2 bf16"])
def test_parameters_stay_themselves_with_hooks_and_attributes(name: str) -> None:
    options = ENGINES.get(name) or {**ENGINES["fsdp2 bf16"], "zero_stage": 2}
    net, tokens, calls, handles = Net(), torch.arange(16), Counter[str](), []
    before, layer = dict(net.named_parameters()), net.blocks[0][0]

    def hook(when: str) -> None:
        handles.append(layer.weight.register_hook(lambda _: calls.update([f"{when}, tensor"])))
        after = layer.weight.register_post_accumulate_grad_hook
        handles.append(after(lambda p: calls.update([f"{when}, with a gradient: {p.grad is not None}"])))

    hook("before")
    net.embed.weight.no_decay = layer.weight.no_decay = True  # type: ignore[assignment]
    parts = prepare(net, options)
    assert layer.weight.no_decay
    hook("prepared")
    train(*parts)
    hook("trained")
    with torch.no_grad():
        parts[1].eval()(tokens)
    hook("evaluated")
    net.embed.weight.scale = 0.5  # type: ignore[assignment]
    for engine in (name, "native 3 bf16", name):
        parts[1].train()
        parts = prepare(net, ENGINES.get(engine, options))
        calls.clear()
        train(*parts)
        whens = ("before", "prepared", "trained", "evaluated")
        assert calls == {f"{when}, {kind}": 2 for when in whens for kind in ("tensor", "with a gradient: True")}
        assert [(p.no_decay, p.scale) for p in (net.embed.weight, net.head.weight)] == [(True, 0.5)] * 2  # type: ignore[attr-defined]
    for handle in handles:
        handle.remove()
    calls.clear()
    state = train(*prepare(net, {"zero_stage": 0}))
    assert not calls
    now = dict(net.named_parameters())
    assert now.keys() == before.keys()
    assert vars(layer.weight) == {"no_decay": True}
    for key, parameter in before.items():
        assert parameter is now[key]
        assert torch.equal(parameter, state[key])


@pytest.mark.parametrize("name", ENGINES)
def test_a_forward_that_the_user_has_patched_after_prepare_stays(name: str) -> None:
    """The engine had patched it too, if it has a precision of its own or is recomputed."""
    net, calls = Net(), 0

    def patched(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x.clone()

    prepare(net, ENGINES[name])
    for module in (net.blocks[0], net.blocks[1][1]):
        module.forward = patched
    train(*prepare(net, ENGINES[name]))
    assert calls >= 4
    prepare(net, {"zero_stage": 0})
    patches = [key for key, module in net.named_modules() if "forward" in vars(module)]
    assert patches == ["blocks.0", "blocks.1.1"]
    assert net.blocks[0].forward is net.blocks[1][1].forward is patched


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_has_ended_is_freed(name: str) -> None:
    net = Net()
    parts = prepare(net, ENGINES[name])
    train(*parts)
    freed = [weakref.ref(one) for one in (parts[1].engine, parts[1].engine.states)]
    prepare(net, ENGINES[name])
    gc.collect()
    assert [one() for one in freed] == [None, None]


def test_a_copy_of_a_prepared_model_has_no_engine() -> None:
    parts = prepare(net := nn.Sequential(nn.Linear(4, 4)), {})
    copied = copy.deepcopy(net)
    prepare(copied, {"zero_stage": 0})
    x = torch.ones(2, 4)
    parts[0].backward(parts[1](x).mean())
    with pytest.raises(UsageError, match=re.escape("between accelerator.backward and optimizer.step()")):
        prepare(net, {})
    parts[2].step()


@needs_trainer
def test_two_trainers_train_one_model_one_after_the_other(tmp_path: Path) -> None:
    weights = []
    for kind in (transformers.Trainer, EngineTrainer):
        model, trainers = build_model(), []
        for lr in (1e-2, 1e-3):  # stages of a curriculum
            args = arguments(tmp_path, max_steps=2, learning_rate=lr, adam_epsilon=1e-4)
            trainers.append(kind(model, args, train_dataset=text_rows(24)))
            trainers[-1].train()
        trainers[-1].save_model(str(tmp_path / kind.__name__))
        weights.append(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind.__name__).state_dict())
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-4, atol=1e-6)
    with pytest.raises(UsageError, match="was prepared again, by another Trainer"):
        trainers[0].evaluate(text_rows(4))
