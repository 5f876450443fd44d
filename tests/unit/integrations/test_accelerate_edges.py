"""What scripts for accelerate do beside the common loop: with dtrain's Accelerator it is equal, or refused by name."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import pytest
import torch
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

from dtrain.errors import ContractError, UsageError
from dtrain.integrations.accelerate import Accelerator
from tests.helpers.accelerate_loops import F, reset_accelerate

CPU = {"cpu": True}


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    reset_accelerate()
    yield
    reset_accelerate()


def fresh(kind: type = Accelerator, **options: Any) -> Any:
    reset_accelerate()
    return kind(**CPU, **options)


# -- backwards of a step that a loop counts itself --------------------------------------------------------------------


def at_every_third(index: int) -> bool:
    return index % 3 == 0  # the first step has one backward


def after_one_alone(index: int) -> bool:
    return index == 0 or index % 4 == 3


def at_the_start_of_each_epoch(index: int) -> bool:
    return (index % 5) % 3 == 0


def growing(index: int) -> bool:
    return index in (0, 2, 5, 9)


def weight_after(kind: type, steps_at: Callable[[int], bool], **options: Any) -> torch.Tensor:
    accelerator, model = fresh(kind, **options), nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for index in range(10):
        accelerator.backward(model(torch.full((1, 2), 1.0 + index)).mean() / 3)
        if steps_at(index):
            optimizer.step()
            optimizer.zero_grad()
    weight: torch.Tensor = accelerator.get_state_dict(model)["weight"]
    return weight.detach()


@pytest.mark.parametrize("steps_at", [at_every_third, after_one_alone, at_the_start_of_each_epoch, growing])
def test_a_loop_that_counts_its_backwards_may_begin_with_one(steps_at: Callable[[int], bool]) -> None:
    want = weight_after(accelerate.Accelerator, steps_at)
    for stage in (0, 2):
        torch.testing.assert_close(weight_after(Accelerator, steps_at, zero_stage=stage), want)
    for engine in ("ddp", "fsdp2"):
        torch.testing.assert_close(weight_after(Accelerator, steps_at, engine=engine), want)


def test_no_sync_of_a_prepared_model() -> None:
    accelerator, model = fresh(), nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    with accelerator.prepare(model.eval()).no_sync():  # it has no engine yet
        pass
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(3):
        with model.no_sync():
            accelerator.backward(model(torch.ones(1, 2)).mean() / 2)
        accelerator.backward(model(torch.ones(1, 2)).mean() / 2)
        optimizer.step()
    assert accelerator.get_state_dict(model)["weight"].tolist() == [[-3.0, -3.0]]


# -- outputs ----------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["loss", "logits"])

OUTPUTS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda loss, z: {"loss": loss, "logits": z, "more": {"states": [z, z]}, "text": "kept"},
    "tuple": lambda loss, z: (loss, z),
    "named tuple": Pair,
    "output of transformers": lambda loss, z: SequenceClassifierOutput(loss=loss, logits=z, hidden_states=(z, z)),
}


class Classifier(nn.Module):
    """Returns a loss and what it was computed from."""

    def __init__(self, pack: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.linear, self.pack = nn.Linear(4, 3), pack

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = self.linear(x)
        assert logits.dtype != torch.float32
        return self.pack(F.cross_entropy(logits.float(), y), logits)


def tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [tensor for one in output for tensor in tensors(one)] if isinstance(output, (list, tuple)) else []


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_outputs_beside_a_loss_are_fp32_as_with_plain_accelerate(name: str, precision: str) -> None:
    accelerator, model = fresh(mixed_precision=precision), Classifier(OUTPUTS[name])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    args = torch.ones(2, 4), torch.zeros(2, dtype=torch.long)
    output = model(*args)
    accelerator.backward(tensors(output)[0])
    optimizer.step()
    model.eval()
    with torch.no_grad():
        evaluated = model(*args)
    for each in (output, evaluated):
        assert type(each) is type(OUTPUTS[name](torch.ones(()), torch.ones(1)))
        assert {tensor.dtype for tensor in tensors(each)} == {torch.float32}
        assert len(tensors(each)) == len(tensors(OUTPUTS[name](torch.ones(()), torch.ones(1))))


def test_a_16_bit_loss_is_still_refused() -> None:
    accelerator = fresh(mixed_precision="bf16")
    model = Classifier(lambda loss, logits: {"loss": logits.square().flatten()[0], "logits": logits})
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ContractError, match=r"the loss is torch\.bfloat16; the contract says float32"):
        accelerator.backward(model(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))["loss"])


def test_an_output_of_fp32_is_the_models_own_object() -> None:
    accelerator, model = fresh(), nn.Identity()
    output = accelerator.prepare(model)(given := {"logits": torch.ones(2)})
    assert output is given


def test_a_loop_with_one_backward_in_each_step_is_refused_a_second() -> None:
    with pytest.raises(UsageError, match="had one in each of its 3 steps so far"):
        weight_after(Accelerator, lambda index: index < 3)
