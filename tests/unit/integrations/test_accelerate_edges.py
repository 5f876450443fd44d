"""What scripts for accelerate do beside the common loop: with dtrain's Accelerator it is equal, or refused by name."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers.modeling_outputs import SequenceClassifierOutput

from dtrain.errors import ConfigError, ContractError, UsageError
from dtrain.integrations.accelerate import Accelerator
from tests.helpers.accelerate_loops import F, reset_accelerate

CPU = {"cpu": True}


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


# -- hooks, launchers, and what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16", "zero_stage": 3}, {"engine": "fsdp2"}])
def test_hooks_of_save_state_and_load_state_get_the_users_module(options: dict[str, Any], tmp_path: Path) -> None:
    accelerator, net, seen = fresh(**options), nn.Linear(2, 1), []
    frozen = accelerator.prepare(nn.Linear(3, 3).requires_grad_(False))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def on_save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        seen.append([(isinstance(one, nn.Linear), len(weights[n])) for n, one in enumerate(models)])
        models[1].saved_to = folder
        assert models[1] is net
        assert {value.dtype for value in weights[1].values()} == {torch.float32}
        seen.append(weights[1]["weight"].tolist())

    def on_load(models: list[nn.Module], folder: str) -> None:
        assert models[0] is frozen.module
        models.pop(0)
        assert models[0].weight.shape == (1, 2)
        models[0].load_state_dict(nn.Linear(2, 1).state_dict())  # the engine's checkpoint is loaded after it
        seen.append(models[0].saved_to)

    accelerator.register_save_state_pre_hook(on_save)
    accelerator.register_load_state_pre_hook(on_load)
    accelerator.backward(model(torch.ones(1, 2)).mean())
    optimizer.step()
    accelerator.save_state(str(tmp_path))
    frozen.module.weight.data.zero_()
    accelerator.load_state(str(tmp_path))
    weights = accelerator.get_state_dict(model)["weight"].tolist()
    assert seen == [[(True, 2), (True, 2)], weights, str(tmp_path)]
    assert not frozen.module.weight.any()  # a hook that removes a model has loaded it


SCRIPT = """
from accelerate import debug_launcher

def train():
    import torch
    from dtrain.integrations.accelerate import Accelerator
    accelerator, model = Accelerator(), torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(1, 2)).mean())
    optimizer.step()
    print(accelerator.num_processes, model.engine.applied_steps)

debug_launcher(train, num_processes=1)
"""


@pytest.mark.processes
def test_debug_launcher_with_one_process() -> None:
    # in a process of its own: the launcher forks, which the threads of other tests do not survive
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["1", "1"], done.stderr


class ScheduleFree(torch.optim.SGD):
    def train(self) -> None: ...

    def eval(self) -> None: ...


def test_optimizers_that_exchange_weights_are_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"the ScheduleFree has methods train\(\) and eval\(\), which exchange"):
        fresh().prepare(model, ScheduleFree(model.parameters(), lr=0.1))


def test_models_that_accelerate_cannot_place_are_refused() -> None:
    model = nn.Linear(2, 1)
    model.is_loaded_in_8bit, model.hf_device_map = True, {"0": "disk", "1": "cpu"}  # type: ignore[assignment]
    for kind in (accelerate.Accelerator, Accelerator):
        accelerator = fresh(kind)
        with pytest.raises(ValueError, match="8-bit or 4-bit precision with CPU or disk offload"):
            accelerator.prepare_model(model)
        assert not [one for one in accelerator._models if one is not model]


def test_a_prepared_loader_can_be_pickled() -> None:
    accelerator = fresh()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8.0)), 2, shuffle=True))
    kept = pickle.loads(pickle.dumps(loader))
    assert sorted(x for (batch,) in kept for x in batch.tolist()) == list(range(8))
    pickle.dumps(accelerator)
