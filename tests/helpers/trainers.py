"""Runs of transformers' Trainer, and of the same class on an engine, over one synthetic text."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import TrainingArguments

from dtrain.integrations.trainer import TrainerMixin
from dtrain.integrations.trainer_arguments import OLDEST
from tests.helpers.hf_models import hf_config
from tests.helpers.launch import rank_variables

needs_trainer = pytest.mark.skipif(
    tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST, reason="transformers is too old"
)

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

Row = dict[str, Tensor]

LENGTH = 17


class EngineTrainer(TrainerMixin, transformers.Trainer):
    """The two changed lines."""


def text_rows(count: int, start: int = 0) -> list[Row]:
    """Returns rows of ASCII text with very different numbers of targets; every 16th has none."""
    text = " ".join(f"{n} squared is {n * n};" for n in range(start, start + 4 * count))
    rows = []
    for index in range(count):
        tokens = torch.tensor(list(text.encode()[index * LENGTH : (index + 1) * LENGTH]))
        labels = tokens.clone()
        labels[: (5 * index) % 16 + (index % 16 == 15) * LENGTH] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def build_model(family: str = "gpt2", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = hf_config(family, **changes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def arguments(folder: Path, kind: type[TrainingArguments] = TrainingArguments, **changes: Any) -> TrainingArguments:
    """Returns arguments for two rows a micro-batch, and three micro-batches a step."""
    settings = {
        "output_dir": str(folder), "use_cpu": True, "max_steps": 6, "learning_rate": 1e-3, "weight_decay": 0.1,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "logging_steps": 1, "save_strategy": "no",
        "report_to": [], "disable_tqdm": True,
    }  # fmt: skip
    return kind(**(settings | changes))


@dataclass
class Run:
    """What a run has logged, and on rank 0 the weights that it has saved at its end."""

    trainer: Any
    logs: list[dict[str, float]]
    weights: dict[str, Tensor]

    def values(self, key: str) -> list[float]:
        return [entry[key] for entry in self.logs if key in entry]


def run_trainer(
    kind: type[Any], folder: Path, *, model: Any = None, resume: Any = None, rows: Any = None, **options: Any
) -> Run:
    """Trains with ``kind``; ``options`` are those of the arguments, or under ``trainer`` those of the trainer."""
    more: Mapping[str, Any] = options.pop("trainer", {})
    model = build_model() if model is None else model
    args = arguments(folder, **options)
    trainer = kind(model, args, train_dataset=rows or text_rows(48), eval_dataset=text_rows(7, start=900), **more)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "final"))
    is_writer = trainer.is_world_process_zero()
    return Run(trainer, trainer.state.log_history, saved_weights(folder / "final") if is_writer else {})


def saved_weights(folder: Path) -> dict[str, Tensor]:
    """Returns the weights of a folder of ``save_pretrained``, in the dtype in which transformers loads them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return {name: value.detach() for name, value in model.state_dict().items()}


def be_rank(rank: int, world: int) -> None:
    """Sets the variables of a launcher, which transformers reads, for a rank of ``run_ranks``."""
    if world > 1:
        assert dist.is_initialized()
        os.environ |= rank_variables(rank, world) | {"MASTER_ADDR": "127.0.0.1"}


class KilledInSave(EngineTrainer):
    """Is killed while it saves a checkpoint, after the engine's part."""

    at_step = 6

    def _save_rng_state(self, output_dir: str) -> None:
        if self.state.global_step == self.at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)


class _Infinite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.inf


class Overflowing(EngineTrainer):
    """Meets a gradient or a loss that is infinite, in the last micro-batch of a step."""

    kind, at_step, on_rank = "gradient", 2, 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if self.state.global_step != self.at_step or self.args.process_index != self.on_rank:
            return loss
        if not self.accelerator.sync_gradients or not self.model.training:
            return loss
        return _Infinite.apply(loss) if self.kind == "gradient" else loss * torch.inf
