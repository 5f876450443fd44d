"""Checkpoints of Trainer on an engine: complete or not used, resumed with equal bits, limited, the best one loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import dtrain
from dtrain.checkpoint import verify
from dtrain.errors import ConfigError
from tests.helpers.trainers import EngineTrainer, arguments, build_model, needs_trainer, run_trainer, text_rows

pytestmark = needs_trainer


def test_resumes_with_equal_bits_and_from_the_newest_complete_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2, "max_steps": -1}
    dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1}
    rows = text_rows(24)  # four steps an epoch
    whole = run_trainer(EngineTrainer, tmp_path, model=build_model(**dropout), rows=rows, **options)
    for step in (2, 4, 6, 8):
        assert verify(tmp_path / f"checkpoint-{step}" / "dtrain").ok
    shutil.rmtree(tmp_path / "final")
    state = tmp_path / "checkpoint-8" / "trainer_state.json"
    state.write_text(state.read_text()[:100])
    next((tmp_path / "checkpoint-6" / "dtrain").glob("step-*/manifest.json")).unlink()
    resumed = run_trainer(EngineTrainer, tmp_path, model=build_model(**dropout), rows=rows, resume=True, **options)
    assert resumed.trainer._initial_global_step == 4
    incomplete = [text.split(" is not complete")[0][-1] for text in caplog.messages if "is not complete" in text]
    assert incomplete == ["8", "6"]
    assert resumed.values("loss") == whole.values("loss")
    assert resumed.values("grad_norm") == whole.values("grad_norm")
    for name, value in whole.weights.items():
        assert torch.equal(resumed.weights[name], value), name


def test_limits_and_loads_the_best_checkpoint(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_steps": 2, "save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 2}
    options |= {"save_total_limit": 2, "load_best_model_at_end": True}
    # greater is better, of a loss that falls: the first is the best
    run = run_trainer(EngineTrainer, tmp_path, greater_is_better=True, **options)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-6"]
    first, last = (load_file(tmp_path / f"checkpoint-{n}" / "model.safetensors") for n in (2, 6))
    assert not torch.equal(first["transformer.wte.weight"], last["transformer.wte.weight"])
    for name, value in first.items():
        assert torch.equal(run.weights[name], value), name


def test_weights_without_states_and_checkpoints_of_an_earlier_run(tmp_path: Path) -> None:
    announced = []

    class Watch(transformers.TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            engine = kwargs["optimizer"].driver.engine
            announced.append(
                engine._between.parts.audit.is_pending
            )  # the update has left fingerprints of what it wrote

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    run_trainer(EngineTrainer, tmp_path, save_only_model=True, **options)
    assert not (tmp_path / "checkpoint-2" / "dtrain").exists()
    with pytest.raises(ConfigError, match=r"checkpoint-4 is not a complete checkpoint .* no folder dtrain/"):
        run_trainer(EngineTrainer, tmp_path, resume=str(tmp_path / "checkpoint-4"), **options)
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        run_trainer(EngineTrainer, tmp_path, resume=True, **options)
    run = run_trainer(EngineTrainer, tmp_path, seed=1, trainer={"callbacks": [Watch()]}, **options)
    assert announced == [False, True, False, True]
    status = verify(tmp_path / "checkpoint-4" / "dtrain")
    assert status.ok
    assert len(status.checkpoints) == 1
    saved = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert torch.equal(saved["transformer.wte.weight"], run.weights["transformer.wte.weight"])


def test_plain_trainer_does_not_resume_without_the_states(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    run_trainer(EngineTrainer, tmp_path, **options)
    with pytest.raises(UnpicklingError):
        run_trainer(transformers.Trainer, tmp_path, resume=str(tmp_path / "checkpoint-2"), **options)
    assert "dtrain.integrations.trainer" in (tmp_path / "checkpoint-2" / "optimizer.pt").read_text()


def test_trainer_says_that_there_is_no_checkpoint(tmp_path: Path) -> None:
    for resume, words in ((True, "No valid checkpoint found"), (str(tmp_path / "checkpoint-9"), "find a valid")):
        with pytest.raises(ValueError, match=words):
            run_trainer(EngineTrainer, tmp_path, resume=resume)


class Remembers(nn.Module):
    """A linear model with a buffer of the rows that it has seen, which its ``load_state_dict`` resizes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("seen", torch.empty(0))

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen = state_dict["seen"].clone()
        return super().load_state_dict(state_dict, *args, **kwargs)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen = torch.cat([self.seen, x[:, 0]])
        return {"loss": nn.functional.cross_entropy(self.linear(x), labels)}


def test_a_model_that_resizes_a_buffer_when_it_loads(tmp_path: Path) -> None:
    rows = [{"x": [float(i), 0.0, 1.0], "labels": i % 2} for i in range(48)]
    args = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=4)
    seen, model = [], Remembers()
    # the third one resumes a model that has the engine of the second
    for resume, built in ((None, Remembers()), ("checkpoint-2", model), ("checkpoint-2", model)):
        trainer = EngineTrainer(built, args, train_dataset=rows)
        trainer.train(resume_from_checkpoint=None if resume is None else str(tmp_path / resume))
        seen.append(trainer.model.seen)
    assert len(seen[0]) == 24
    assert all(torch.equal(one, seen[0]) for one in seen)


@pytest.mark.parametrize(("event", "step"), [("on_step_begin", 2), ("on_pre_optimizer_step", 3), ("on_step_end", 2)])
def test_a_signal_saves_between_two_steps(event: str, step: int, tmp_path: Path) -> None:
    def signal(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and control is trainer.control:
            jit.jit_manager._enable_checkpoint()  # as a timer does after SIGTERM

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 100, "enable_jit_checkpoint": True}
    whole = run_trainer(EngineTrainer, tmp_path / "whole", **options)
    trainer = EngineTrainer(build_model(), arguments(tmp_path, **options), train_dataset=text_rows(48))
    callbacks = trainer.callback_handler.callbacks
    jit = next(one for one in callbacks if type(one).__name__ == "JITCheckpointCallback")
    callbacks.insert(0, type("Signal", (transformers.TrainerCallback,), {event: signal})())
    trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    resumed = run_trainer(EngineTrainer, tmp_path, resume=True, **options)
    assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())


def test_adapters_are_resumed_and_the_best_are_loaded(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def run(resume: bool, **options: Any) -> dict[str, torch.Tensor]:
        lora = peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
        args = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=4, learning_rate=1e-2, **options)
        options = {"eval_dataset": text_rows(5, start=900), "dtrain": {"engine": dtrain.Native(zero_stage=3)}}
        model = peft.get_peft_model(build_model(), lora)
        trainer = EngineTrainer(model, args, train_dataset=text_rows(48), **options)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(str(tmp_path / "final"))
        return load_file(tmp_path / "final" / "adapter_model.safetensors")

    whole = run(resume=False)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = run(resume=True)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    best = run(False, load_best_model_at_end=True, greater_is_better=True, eval_strategy="steps", eval_steps=2)
    first = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
    assert all(torch.equal(best[name], value) for name, value in first.items())
    assert not all(torch.equal(best[name], value) for name, value in whole.items())
