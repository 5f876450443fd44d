"""Trainer on an engine, one rank: the losses, norms, metrics and weights of transformers' own Trainer."""

from __future__ import annotations

import math
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

import dtrain
from dtrain.integrations.trainer import TrainerMixin
from tests.helpers.oracle import normwise_error
from tests.helpers.trainers import (
    EngineTrainer,
    Overflowing,
    Run,
    arguments,
    build_model,
    needs_trainer,
    run_trainer,
    text_rows,
)

Plain = transformers.Trainer
FILE = "model.safetensors"
EXAMPLE = Path(__file__).parents[3] / "docs/examples/trainer_clm.py"

pytestmark = needs_trainer


def assert_same(got: Run, expected: Run, *keys: str) -> None:
    for key in ("loss", "grad_norm", "learning_rate", *keys):
        assert len(expected.values(key)) > 0, key
        assert got.values(key) == pytest.approx(expected.values(key), rel=1e-5), key
    assert got.weights.keys() == expected.weights.keys()
    assert normwise_error(got.weights, expected.weights) < 1e-5


class _TwiceTheLoss(Plain):
    """Overrides the loss, and says that it is a mean over its batch."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return (2 * outputs.loss, outputs) if return_outputs else 2 * outputs.loss


class _TwiceOnEngine(TrainerMixin, _TwiceTheLoss):
    pass


def sum_over_items(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / (num_items_in_batch or 1)


CASES: dict[str, tuple[type, type, dict[str, Any], dict[str, Any]]] = {
    "no targets": (Plain, EngineTrainer, {}, {"rows": text_rows(48)}),
    "no clipping, short last step": (
        Plain, EngineTrainer, {"family": "llama"}, {"max_grad_norm": 0.0, "num_train_epochs": 1, "max_steps": -1},
    ),
    "smoothing": (Plain, EngineTrainer, {}, {"label_smoothing_factor": 0.1}),
    "loss function": (Plain, EngineTrainer, {}, {"trainer": {"compute_loss_func": sum_over_items}}),
    "mean of means": (Plain, EngineTrainer, {"accepts": False}, {"lr_scheduler_type": "cosine", "warmup_steps": 2}),
    "own": (_TwiceTheLoss, _TwiceOnEngine, {}, {"optim": "sgd", "learning_rate": 0.1}),
    "adagrad": (Plain, EngineTrainer, {}, {"optim": "adagrad"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_trains_as_plain_trainer(name: str, tmp_path: Path) -> None:
    *kinds, model, options = CASES[name]
    rows = [row for row in text_rows(40) if (row["labels"] != -100).sum() > 1]  # a mean over none is NaN
    runs = []
    for kind in kinds:
        built = build_model(model.get("family", "gpt2"))
        if "accepts" in model:
            built.accepts_loss_kwargs = model["accepts"]
        runs.append(run_trainer(kind, tmp_path / kind.__name__, model=built, **{"rows": rows, **options}))
    assert_same(runs[1], runs[0])
    assert len(runs[0].values("loss")) >= 6


def losses_and_weights(
    folder: Path, build: Callable[[], Any], rows: Any, counts_items: bool = True, **options: Any
) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Returns what transformers' trainer logs and saves, and the one on an engine."""
    found = []
    for kind in (Plain, EngineTrainer):
        torch.manual_seed(0)
        model = build()
        if kind is Plain and not counts_items:
            model.accepts_loss_kwargs = False  # else Trainer adds up the means of micro-batches
        trainer = kind(model, arguments(folder / kind.__name__, **options), train_dataset=rows)
        trainer.train()
        trainer.save_model()
        (saved,) = (folder / kind.__name__).glob("*model.safetensors")
        found.append(([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], load_file(saved)))
    return found


def test_classifies_images_with_running_statistics(tmp_path: Path) -> None:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=3)
    pixels = torch.randn(48, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    rows = [{"pixel_values": one, "labels": torch.tensor(n % 3)} for n, one in enumerate(pixels)]
    (expected_losses, expected), (losses, weights) = losses_and_weights(
        tmp_path, lambda: transformers.ResNetForImageClassification(config), rows, counts_items=False, max_steps=3
    )
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    statistics = {name for name in expected if "running" in name}
    assert statistics
    assert weights.keys() == expected.keys()
    assert normwise_error({n: weights[n] for n in statistics}, {n: expected[n] for n in statistics}) < 1e-5


def test_adapters_with_recomputed_activations(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def build() -> Any:
        lora = {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"], "fan_in_fan_out": True}
        model = peft.get_peft_model(build_model(), peft.LoraConfig(task_type="CAUSAL_LM", **lora))
        model.enable_input_require_grads()
        return model

    (expected_losses, expected), (losses, adapters) = losses_and_weights(
        tmp_path, build, text_rows(48), learning_rate=1e-2, activation_checkpointing=True
    )
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert adapters.keys() == expected.keys()
    assert any(value.any() for name, value in adapters.items() if "lora_B" in name)
    assert normwise_error(adapters, expected) < 1e-4


@pytest.mark.parametrize(("kind", "reason"), [("gradient", "overflow"), ("loss", "nonfinite_loss")])
def test_a_skipped_step_leaves_the_scheduler_where_it_was(
    kind: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Overflowing, "kind", kind)
    run = run_trainer(Overflowing, tmp_path)
    assert run.values("learning_rate") == pytest.approx([1e-3 * (1 - n / 6) for n in (0, 1, 2, 2, 3, 4)])
    assert run.trainer.lr_scheduler.last_epoch == run.trainer.engine.applied_steps == 5
    assert run.trainer.state.global_step == run.trainer.engine.attempted_steps == 6
    losses = run.values("loss")
    assert [math.isfinite(loss) for loss in losses] == [n != 2 or kind == "gradient" for n in range(6)]
    assert all(bool(value.isfinite().all()) for value in run.weights.values())
    warnings = [message for message in caplog.messages if "skipped" in message]
    assert len(warnings) == 1
    assert f"step 3 was skipped: {reason}" in warnings[0]
    assert "rank 0, micro-batch 2" in warnings[0]


def test_bf16_alone_trains_and_saves_fp32_masters(tmp_path: Path) -> None:
    run = run_trainer(EngineTrainer, tmp_path, bf16=True)
    engine = run.trainer.engine
    assert engine.policy.compute_dtype == torch.bfloat16
    assert run.trainer.model.lm_head.weight.dtype == torch.float32, "as it is read; it computes in BF16"
    masters = engine.master_state()
    assert torch.equal(run.trainer.model.lm_head.weight, masters["transformer.wte.weight"])
    for name, value in run.weights.items():  # from_pretrained takes the dtype that config.json states
        assert value.dtype == torch.float32, name
        assert torch.equal(value, masters.get(name, masters["transformer.wte.weight"])), name
    assert "lm_head.weight" not in load_file(tmp_path / "final" / FILE)
    losses = run.values("loss")
    assert losses == pytest.approx(run_trainer(Plain, tmp_path / "plain", bf16=True).values("loss"), rel=2e-2)


class _OwnSave(EngineTrainer):
    """Writes the weights of the model itself, as trainers of other libraries do."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self.model.save_pretrained(output_dir)


def test_a_trainer_that_writes_the_weights_itself(tmp_path: Path) -> None:
    options = {"max_steps": 1, "trainer": {"dtrain": {"engine": dtrain.Native(zero_stage=3)}}}
    run = run_trainer(_OwnSave, tmp_path, bf16=True, **options)
    masters = run.trainer.engine.master_state()
    assert {value.dtype for value in run.weights.values()} == {torch.float32}
    assert all(torch.equal(run.weights[name], value) for name, value in masters.items())


def top_1(prediction: Any) -> dict[str, float]:
    labels = prediction.label_ids[:, 1:]
    hits = (prediction.predictions[:, :-1].argmax(-1) == labels)[labels != -100]
    return {"top_1": float(hits.mean())}


def test_evaluates_and_predicts_as_plain_trainer(tmp_path: Path) -> None:
    # an evaluation before training changes nothing
    options = {"trainer": {"compute_metrics": top_1}, "eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True}
    plain, ours = (run_trainer(kind, tmp_path / kind.__name__, **dict(options)) for kind in (Plain, EngineTrainer))
    assert_same(ours, plain, "eval_loss", "eval_top_1")
    assert len(ours.values("eval_loss")) == 3
    got, expected = (run.trainer.predict(text_rows(5, start=300)) for run in (ours, plain))
    assert got.predictions == pytest.approx(expected.predictions, abs=1e-4)
    assert got.metrics["test_top_1"] == expected.metrics["test_top_1"]
    fresh = [kind(build_model(), arguments(tmp_path), eval_dataset=text_rows(7)) for kind in (Plain, EngineTrainer)]
    assert fresh[1].evaluate()["eval_loss"] == pytest.approx(fresh[0].evaluate()["eval_loss"], rel=1e-6)


def test_trains_twice_the_same_model_or_one_for_each_training(tmp_path: Path) -> None:
    for options, starts_again in (
        ({"model_init": lambda: build_model(resid_pdrop=0.1)}, True),
        ({"model": build_model()}, False),
    ):
        trainer = EngineTrainer(args=arguments(tmp_path, max_steps=2), train_dataset=text_rows(48), **options)
        masters = []
        for _ in range(2):
            trainer.train()
            masters.append(trainer.engine.master_state())
        assert all(torch.equal(value, masters[1][name]) for name, value in masters[0].items()) is starts_again
        assert trainer.engine.attempted_steps == (2 if starts_again else 4)


def test_generates_with_whole_weights(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 128}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"][:5]} for row in text_rows(48)]
    predictions = []
    for kind in (transformers.Seq2SeqTrainer, type("Ours", (TrainerMixin, transformers.Seq2SeqTrainer), {})):
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration(config)
        args = arguments(tmp_path, kind=transformers.Seq2SeqTrainingArguments, predict_with_generate=True, max_steps=3)
        options = {} if kind is transformers.Seq2SeqTrainer else {"dtrain": {"engine": dtrain.Native(zero_stage=3)}}
        trainer = kind(model, args, train_dataset=rows, **options)
        trainer.train()
        predictions.append(trainer.predict(rows[:5], max_new_tokens=6))
    expected, got = predictions
    assert (got.predictions == expected.predictions).all()
    assert got.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-5)


@pytest.mark.exhaustive
def test_the_example_trains_saves_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    text = tmp_path / "text"
    text.write_bytes(bytes(range(97, 123)) * 60)
    options = {"output_dir": tmp_path / "out", "text_file": text, "max_steps": 40, "save_steps": 30, "zero_stage": 2}
    options |= {"learning_rate": 1e-2, "per_device_train_batch_size": 4, "report_to": "none"}
    given = [str(item) for key, value in options.items() for item in (f"--{key}", value)]
    metrics = main([*given, "--use_cpu", "--bf16"])
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))
    assert metrics["perplexity"] < 5  # 26 letters in a fixed order
    assert metrics["eval_top_1"] > 0.8
    assert (tmp_path / "out" / "model.safetensors").exists()
    shutil.rmtree(tmp_path / "out" / "checkpoint-40")
    again = main([*given, "--use_cpu", "--bf16", "--resume", "True"])
    assert again["eval_loss"] == metrics["eval_loss"]
    assert capsys.readouterr().out.count("it writes: b'import ") == 2
