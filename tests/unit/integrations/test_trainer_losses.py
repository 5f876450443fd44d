"""The losses of Trainer's micro-batches add up to the mean over the items of a step, however it is cut."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from dtrain.integrations.trainer import TrainerMixin
from tests.helpers.trainers import EngineTrainer, arguments, build_model, needs_trainer, run_trainer, text_rows

pytestmark = needs_trainer

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def bert(kind: str) -> Any:
    return getattr(transformers, kind)(transformers.BertConfig(**BERT, **NO_DROPOUT, num_labels=3))


def t5() -> Any:
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 128}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    )


def sentences(labels: Callable[[int, torch.Tensor], Any]) -> list[dict[str, Any]]:
    inputs = [torch.tensor([2 + i, 3 + i % 5, 4, 1]) for i in range(8)]
    return [{"input_ids": ids, "labels": labels(i, ids)} for i, ids in enumerate(inputs)]


def texts() -> list[dict[str, Any]]:
    rows = text_rows(8)
    for row in rows:
        row["labels"][0] = -100  # no model predicts it, and Trainer counts it for some
    return rows


def some_of(i: int, ids: torch.Tensor) -> torch.Tensor:
    """Labels of tokens, of which rows have different numbers."""
    return torch.where(torch.arange(4) <= i % 4, ids % 3, -100)


class MeanOfOutput(transformers.Trainer):
    """Overrides the loss without a look at the number of items."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class MeanOfOutputOnEngine(TrainerMixin, MeanOfOutput):
    pass


def mean_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def sum_by_number(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch.item()


# model, rows, trainer, its arguments, and whether the model or its loss divides by the number of items
CASES: dict[str, tuple[Callable[[], Any], list[dict[str, Any]], type, dict[str, Any], bool]] = {
    "classes": (
        lambda: bert("BertForSequenceClassification"), sentences(lambda i, _: i % 3), EngineTrainer, {}, False,
    ),
    "classes of tokens": (lambda: bert("BertForTokenClassification"), sentences(some_of), EngineTrainer, {}, False),
    "sequences": (t5, sentences(some_of), EngineTrainer, {}, False),
    "own loss of a trainer": (build_model, texts(), MeanOfOutputOnEngine, {}, False),
    "loss function": (build_model, texts(), EngineTrainer, {"compute_loss_func": mean_loss}, False),
    "causal": (build_model, texts(), EngineTrainer, {}, True),
    "causal with a router": (
        lambda: build_model("mixtral", router_aux_loss_coef=1.0), texts(), EngineTrainer, {}, False,
    ),
    "divided by a number of Python": (build_model, texts(), EngineTrainer, {"compute_loss_func": sum_by_number}, True),
}  # fmt: skip


def expected(model: nn.Module, rows: list[dict[str, Any]], accumulation: int) -> tuple[float, float]:
    """Returns the loss of one step over all rows, and its gradient's norm."""
    total, items = torch.zeros(()), 0
    for chunk in range(accumulation):
        some = rows[chunk * 8 // accumulation : (chunk + 1) * 8 // accumulation]
        batch = {key: torch.stack([torch.as_tensor(row[key]) for row in some]) for key in some[0]}
        own = int((batch["labels"] != -100).sum())
        total, items = total + own * model(**batch).loss, items + own
    (total / items).backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    return float(total.detach() / items), float(norm)


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_mean_over_its_items_at_any_accumulation(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, rows, kind, options, divides = CASES[name]
    monkeypatch.setattr(logging.getLogger("dtrain"), "propagate", True)
    for accumulation in (1, 4):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(build())
        caplog.clear()
        args = arguments(
            tmp_path, max_steps=2, per_device_train_batch_size=8 // accumulation, max_grad_norm=1e9, learning_rate=0.0,
            gradient_accumulation_steps=accumulation, train_sampling_strategy="sequential",
        )  # fmt: skip
        trainer = kind(models[0], args, train_dataset=rows, **options)
        trainer.train()
        logs = trainer.state.log_history[0]
        assert (float(logs["loss"]), float(logs["grad_norm"])) == pytest.approx(
            expected(models[1], rows, accumulation), rel=1e-4
        )
        warnings = [one for one in caplog.messages if "num_items_in_batch, and Trainer would let it grow" in one]
        assert len(warnings) == (0 if divides or accumulation == 1 else 1)


def test_trainers_own_factor_is_an_option(tmp_path: Path) -> None:
    losses = []
    for kind in (transformers.Trainer, EngineTrainer, EngineTrainer):
        torch.manual_seed(0)
        build, rows, *_ = CASES["classes"]
        args = arguments(tmp_path, max_steps=1, gradient_accumulation_steps=4, train_sampling_strategy="sequential")
        trainer = kind(build(), args, train_dataset=rows)
        if len(losses) == 1:
            trainer.loss_is_scaled_for_ga = True
        trainer.train()
        losses.append(float(trainer.state.log_history[0]["loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0] / 4, rel=1e-5)


def test_the_callers_arguments_are_left_untouched(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    before, seen = args.to_dict(), []

    class Look(transformers.TrainerCallback):
        def on_save(self, args: Any, *_: Any, **__: Any) -> None:
            seen.append(args.to_dict() == before)

    trainer = EngineTrainer(build_model(), args, train_dataset=text_rows(48), callbacks=[Look()])
    assert args.to_dict() == before
    trainer.train()
    assert trainer.args is args
    assert args.to_dict() == before
    assert seen == [True, True]
    saved = torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert saved.logging_nan_inf_filter


def test_arguments_are_left_untouched_by_a_step_that_fails(tmp_path: Path) -> None:
    class Failing(MeanOfOutputOnEngine):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            super().compute_loss(model, inputs, return_outputs, **kwargs)
            raise RuntimeError("no memory")

    args = arguments(tmp_path)
    before = args.to_dict()
    with pytest.raises(RuntimeError, match="no memory"):
        Failing(build_model(), args, train_dataset=text_rows(48)).train()
    assert args.to_dict() == before


class CountsInPython(EngineTrainer):
    """Counts the items of a step as a number of Python."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, count = super().get_batch_samples(*args, **kwargs)
        return batches, int(count)


def test_a_count_that_is_a_number_of_python(tmp_path: Path) -> None:
    want, got = (run_trainer(kind, tmp_path, rows=texts() * 6) for kind in (EngineTrainer, CountsInPython))
    assert got.values("loss") == want.values("loss")
