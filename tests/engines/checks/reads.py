"""What code outside an engine reads of its weights between calls: right values, or an error; no placeholder."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from dtrain.engine.adapters.deepspeed import config as deepspeed_config
from dtrain.errors import UsageError
from dtrain.parameters.model_states import MASTER
from tests.engines.helpers import batch, build, state_digests, train_step
from tests.engines.matrix import Trial, check

SAID = r"is read outside a forward of the engine, .* engine.master_state\(\)|a copy of OddModel, .* engine.full_model"


def saved(value: Any) -> Any:
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[nn.Module, str, nn.Parameter], Tensor]] = {
    "attribute": lambda model, name, _: model.get_parameter(name).detach(),
    "parameters": lambda model, name, _: dict(model.named_parameters())[name] * 1,
    "data": lambda _, __, kept: kept.data,
    "copy": lambda _, __, kept: copy.deepcopy(kept),
    "shallow copy": lambda _, __, kept: copy.copy(kept),
    "array": lambda _, __, kept: torch.tensor(kept.detach().float().numpy()),
    "numbers": lambda _, __, kept: torch.tensor(kept.tolist(), dtype=kept.dtype),
    "list of tensors": lambda _, __, kept: torch._foreach_add([kept.detach(), kept], 0)[1],
    "vector": lambda _, __, kept: nn.utils.parameters_to_vector([kept]).view(kept.shape),
    "average": lambda _, __, kept: torch.zeros_like(kept).lerp_(kept.detach(), 1.0),
    "pickle": lambda _, __, kept: saved(kept),
    "state_dict": lambda model, name, _: saved(model.state_dict())[name],
    "safetensors": lambda _, __, kept: load(save({"it": kept.detach()}))["it"],
    "model": lambda model, name, _: copy.deepcopy(model).get_parameter(name),
}
TORCH = {"fsdp2": "DTensor|tensor subclass|sharded tensor", "deepspeed": "pickle .*ProcessGroup"}
NAMES = ("scale", "embedding.weight", "mix.weight", "blocks.0.norm.weight", "blocks.1.down.bias", "unused.weight")


def whole(engine: Any) -> dict[str, Tensor]:
    """The masters, on every rank."""
    with engine.states.reads:
        return {name: values.clone() for name, values in engine.states.full_state(MASTER)}


def reads(engine: Any, kept: Mapping[str, nn.Parameter]) -> dict[tuple[str, str], Any]:
    """What each way to each weight gives: values, or the text of the error."""
    found: dict[tuple[str, str], Any] = {}
    for name in NAMES:
        for way, read in WAYS.items():
            try:
                found[name, way] = read(engine.module, name, kept[name]).detach()
            except UsageError as error:
                found[name, way] = str(error)
            except (RuntimeError, TypeError) as error:  # torch's own, of a DTensor and of DeepSpeed's parameters
                if not re.search(TORCH.get(engine.name, "none"), str(error)):
                    raise
                found[name, way] = "torch's own"
    return found


@check(precisions=("bf16", "fp32"), ranks=(2, 1))
def weights_between_forwards_are_right_or_an_error(trial: Trial) -> None:
    """At the start, after a step, after an evaluation and between forward and backward; shapes can always be asked."""
    with mock.patch.object(deepspeed_config, "PERSISTENT", 0):  # else its small weights stay whole
        engine = trial.start()
    kept = dict(engine.module.named_parameters())
    reference = dict(build().named_parameters())
    own = engine.contract.parameter_dtype
    dtypes = {name: torch.float32 if hasattr(p, "device_mesh") else own(name) for name, p in kept.items()}
    held_elsewhere = trial.case.stage == 3 and not (trial.case.engine == "native" and trial.ranks == 1)

    def holds() -> None:
        masters = whole(engine)
        for name, p in kept.items():
            for one in (p, engine.module.get_parameter(name)):
                assert (one.shape, one.numel(), one.dim()) == (reference[name].shape, reference[name].numel(), p.ndim)
                assert (one.dtype, one.device, one.is_contiguous()) == (dtypes[name], torch.device("cpu"), True)
                assert torch.zeros_like(one).shape == reference[name].shape
        for (name, way), values in reads(engine, kept).items():
            if isinstance(values, str):
                assert re.search(SAID, values) or values == "torch's own", (name, way, values)
                assert held_elsewhere or trial.case.engine == "fsdp2" or way == "pickle", (name, way, values)
                continue
            values = values.full_tensor() if hasattr(values, "full_tensor") else values
            assert torch.equal(values.float(), masters[name].to(dtypes[name]).float()), (name, way)

    holds()
    train_step(engine, trial.ranks)
    holds()
    with engine.eval():
        engine(tokens=batch(0))
    if trial.case.engine != "fsdp2":  # whose parameters stand elsewhere then
        holds()
    assert train_step(engine, trial.ranks).applied


@check(precisions=("bf16", "fp32"), ranks=(2, 1))
def shown_masters_are_what_every_way_reads(trial: Trial) -> None:
    """As in plain PyTorch; a forward of the model is that of the engine, and training has the bits of another run."""
    with mock.patch.object(deepspeed_config, "PERSISTENT", 0):
        engine, alone = trial.start(), trial.start()
    engine.guard_reads(shows_masters=True)
    kept = dict(engine.module.named_parameters())
    for index in range(2):
        masters = whole(engine)
        for (name, way), values in reads(engine, kept).items():
            if isinstance(values, str):
                assert (way, trial.case.engine) in {("model", "fsdp2"), ("pickle", "deepspeed")}, (name, way, values)
                continue
            assert values.dtype == torch.float32, (name, way)
            assert torch.equal(values, masters[name]), (name, way)
        assert engine.module.to("cpu") is engine.module
        with engine.eval():
            want = engine(tokens=batch(index))
            assert torch.equal(engine.module(tokens=batch(index)), want)
        assert train_step(engine, trial.ranks).loss == train_step(alone, trial.ranks).loss
    assert state_digests(engine) == state_digests(alone)


@check(engines=("native", "ddp", "deepspeed"), stages=(0, 2), precisions=("bf16",), ranks=(2,))
def writes_to_shown_masters_are_taken_over(trial: Trial) -> None:
    """In place, and through ``data``; also by an operation on FP32 numbers."""
    engine = trial.start()
    engine.guard_reads(shows_masters=True)
    train_step(engine, trial.ranks)
    mix = engine.module.mix
    before = whole(engine)
    with torch.no_grad():
        mix.weight.lerp_(torch.ones(mix.weight.shape), 0.5)
        mix.bias.data.fill_(0.25)
        assert torch.equal(mix.weight, before["mix.weight"].lerp(torch.ones(()), 0.5))
    after = whole(engine) if engine.master_state() is not None else {}
    torch.testing.assert_close(after["mix.weight"], before["mix.weight"].lerp(torch.ones(()), 0.5), rtol=0.01, atol=0)
    assert after["mix.bias"].eq(0.25).all()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {"mix.weight", "mix.bias"}
    assert train_step(engine, trial.ranks).applied


@check(stages=(3,), precisions=("bf16",), ranks=(2,))
def writes_to_shown_masters_that_lie_elsewhere_are_refused(trial: Trial) -> None:
    engine = trial.start()
    engine.guard_reads(shows_masters=True)
    before = state_digests(engine)
    with torch.no_grad():
        engine.module.mix.weight.fill_(0.25)
    with pytest.raises(UsageError, match=r"'mix.weight' was written to .* engine.modify_weights"):
        train_step(engine, trial.ranks)
    assert state_digests(engine) == before
    assert train_step(engine, trial.ranks).applied
