"""Arguments of Trainer: each is kept, refused by name before training, or without effect."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from transformers.trainer_utils import SaveStrategy

import dtrain
from dtrain.errors import ConfigError
from dtrain.integrations import trainer as module
from dtrain.integrations.trainer import TrainerMixin
from dtrain.integrations.trainer_arguments import check_version
from tests.helpers.trainers import EngineTrainer, arguments, build_model, needs_trainer, run_trainer, text_rows

pytestmark = needs_trainer


def test_settings_of_a_class_and_of_a_call(tmp_path: Path) -> None:
    class Sharded(EngineTrainer):
        dtrain: ClassVar = {"engine": dtrain.Native(zero_stage=3), "precision": "bf16"}

    call = {"engine": dtrain.Native(zero_stage=1), "ema_decay": 0.9}
    own, other = (run_trainer(Sharded, tmp_path, max_steps=1, trainer=more) for more in ({}, {"dtrain": call}))
    assert own.trainer.engine.options.zero_stage == 3
    assert own.trainer.engine.policy.compute_dtype == torch.bfloat16
    assert other.trainer.engine.options.zero_stage == 1
    assert other.trainer.engine.ema_decay == 0.9
    assert own.trainer.args.logging_nan_inf_filter
    assert issubclass(module.Trainer, transformers.Trainer)
    with pytest.raises(ConfigError, match=r"class Swapped\(TrainerMixin, \.\.\.\)"):
        type("Swapped", (transformers.Trainer, TrainerMixin), {})
    with pytest.raises(ConfigError, match=r"needs transformers 5\.23 or newer, and 5\.9\.0 is installed"):
        check_version("5.9.0")


def test_an_optimizer_of_dtrain_follows_the_schedule_of_trainer(tmp_path: Path) -> None:
    muon = dtrain.Muon(weight_decay=0.0, adamw=["*wpe*"])
    run = run_trainer(EngineTrainer, tmp_path, lr_scheduler_type="constant", trainer={"dtrain": {"optimizer": muon}})
    engine = dtrain.initialize(build_model(), optimizer=muon, precision="fp32", seed=42)
    batches = list(EngineTrainer(build_model(), run.trainer.args, train_dataset=text_rows(48)).get_train_dataloader())
    for step in range(6):
        micro_batches = batches[3 * step : 3 * step + 3]
        count = sum(int((batch["labels"] != -100).sum()) for batch in micro_batches)
        for batch in engine.accumulate(micro_batches):
            engine.backward(engine(**batch, num_items_in_batch=count).loss * len(micro_batches))
        assert run.values("loss")[step] == pytest.approx(engine.step(lr=1e-3).loss, rel=1e-5)
    assert run.trainer.engine.memory()["matrices"] == engine.memory()["matrices"] > 0


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("deepspeed", "ds.json", "dtrain={'engine': 'deepspeed'}"),
        ("fsdp", "full_shard", "dtrain={'engine': 'fsdp2'}"),
        ("parallelism_config", object(), "data-parallel"),
        ("torch_compile", True, "Blocks\\(compile='blocks'\\)"),
        ("auto_find_batch_size", True, "per_device_train_batch_size"),
        ("bf16_full_eval", True, "precision of training"),
        ("optim", "adafactor", "adamw_torch"),
        ("activation_checkpointing_kwargs", {"use_reentrant": True}, "'use_reentrant': False"),
        ("_n_gpu", 2, "torchrun --standalone --nproc_per_node=2"),
    ],
)
def test_refuses_by_name(argument: str, value: Any, words: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, activation_checkpointing=argument.startswith("activation"))
    setattr(args, argument, value)
    with pytest.raises(ConfigError, match=words) as error:
        EngineTrainer(build_model(), args)
    assert argument.lstrip("_").replace("n_gpu", "GPUs") in str(error.value)


def test_refuses_models_and_ranks_that_it_cannot_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(tmp_path)
    for name, value, words in (
        ("hf_device_map", {"a": 0, "b": 1}, "device_map"),
        ("is_quantized", True, "quantized"),
        ("_tp_size", 2, "sharded"),
    ):
        model = build_model()
        setattr(model, name, value)
        with pytest.raises(ConfigError, match=words):
            EngineTrainer(model, args)
    with monkeypatch.context() as patch:
        patch.setattr(transformers.TrainingArguments, "world_size", 2)
        signalled = arguments(tmp_path, enable_jit_checkpoint=True)
        with pytest.raises(ConfigError, match=r"enable_jit_checkpoint=True.*on 2 ranks"):
            EngineTrainer(build_model(), signalled)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"has started 2 ranks, but TrainingArguments counts 1.*use_cpu=True"):
        EngineTrainer(build_model(), args)


# every argument was looked at; a new one of transformers must be put into one of these lists
REFUSED = """
auto_find_batch_size bf16_full_eval deepspeed enable_jit_checkpoint fp16_full_eval fsdp parallelism_config
save_on_each_node torch_compile torch_compile_backend torch_compile_mode
"""
WITHOUT_EFFECT = """
ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph fsdp_config local_rank
logging_nan_inf_filter
"""
KEPT = """
accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon
average_tokens_across_devices batch_eval_metrics bf16 data_seed dataloader_drop_last dataloader_in_order
dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
dataloader_prefetch_factor ddp_backend ddp_timeout debug disable_tqdm do_eval do_predict do_train
eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object
fp16 full_determinism gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs greater_is_better
hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip include_for_metrics
include_num_input_tokens_seen label_names label_smoothing_factor learning_rate length_column_name liger_kernel_config
load_best_model_at_end log_level log_level_replica log_on_each_node logging_first_step logging_steps logging_strategy
lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps metric_for_best_model neftune_noise_alpha num_train_epochs
optim optim_args optim_target_modules output_dir per_device_eval_batch_size per_device_train_batch_size
prediction_loss_only project push_to_hub remove_unused_columns report_to restore_callback_states_from_checkpoint
resume_from_checkpoint run_name save_only_model save_steps save_strategy save_total_limit seed skip_memory_metrics tf32
torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy use_cache
use_cpu use_liger_kernel warmup_steps weight_decay
"""


def test_every_argument_is_kept_refused_or_has_no_effect() -> None:
    listed = [name for names in (REFUSED, WITHOUT_EFFECT, KEPT) for name in names.split()]
    assert len(listed) == len(set(listed))
    assert {field.name for field in fields(transformers.TrainingArguments)} <= set(listed)


def test_a_scheduler_whose_state_no_checkpoint_holds(tmp_path: Path) -> None:
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])  # whose milestones are keys of a dict
    args = arguments(tmp_path, save_strategy="steps")
    trainer = EngineTrainer(model, args, train_dataset=text_rows(48), optimizers=(optimizer, scheduler))
    with pytest.raises(ConfigError, match="state of MultiStepLR"):
        trainer.train()
    assert trainer.state.global_step == 0
    args.save_strategy = SaveStrategy.NO
    EngineTrainer(build_model(), args, train_dataset=text_rows(48)).train()
