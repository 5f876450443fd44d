"""Trainer of transformers on the engines of dtrain, in two changed lines of a script.

::

    from dtrain.integrations.trainer import TrainerMixin

    class MyTrainer(TrainerMixin, Trainer): ...

    MyTrainer(model, args, train_dataset=data, dtrain={"engine": dtrain.Native(zero_stage=2)}).train()

``Trainer`` of this module is such a class of ``transformers.Trainer`` itself. Data, learning rates, logs,
callbacks and metrics stay those of transformers; forward, backward, clipping, update and checkpoints are the engine's.
The gradient is that of plain Trainer under DDP, however it weights its losses: ``dtrain.integrations.driver`` says
why, and ``dtrain.integrations.item_counts`` where the two differ.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from dtrain.distributed.logging import logger
from dtrain.errors import ConfigError
from dtrain.integrations.accelerate import Accelerator
from dtrain.integrations.build import end_engine_of
from dtrain.integrations.item_counts import CountedLoss, of_this_rank
from dtrain.integrations.prepared import PreparedModel
from dtrain.integrations.trainer_arguments import (
    check_arguments,
    check_model,
    check_optimizer,
    check_version,
    scheduler_text,
)
from dtrain.integrations.trainer_checkpoints import FOLDER, STATE, missing_part, newest_complete, stop_plain_trainer

_Base: Any = object  # the methods of Trainer follow it in a class's bases


class TrainerMixin(_Base):  # type: ignore[misc]
    """Makes the subclass of ``transformers.Trainer`` that follows it in a class's bases train on an engine.

    Attributes:
        dtrain: arguments of ``dtrain.integrations.accelerate.Accelerator``, such as ``engine``, ``precision``,
            ``blocks`` and ``optimizer``; set it in a subclass, or pass ``dtrain=`` to the constructor. By default the
            engine is ``native``, with the precision and the optimizer of ``TrainingArguments``. The learning rate is
            always that of ``TrainingArguments``.

    Raises:
        ConfigError: an argument of ``TrainingArguments`` that an engine cannot honor, before training; or a class in
            which the mixin does not come first.
    """

    dtrain: Mapping[str, Any] = {}
    model: Any
    _warned_step = 0
    _hidden_filter = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(TrainerMixin)]
        if any(kind.__module__ == "transformers.trainer" for kind in before):
            raise ConfigError(
                f"class {cls.__name__}: TrainerMixin must come first, or Trainer's own methods are used; write class "
                f"{cls.__name__}(TrainerMixin, ...)"
            )

    def __init__(self, *args: Any, dtrain: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        if dtrain is not None:
            self.dtrain = dtrain
        self._counted_loss = CountedLoss()
        super().__init__(*args, **kwargs)
        for callback in self.callback_handler.callbacks:
            if type(callback).__name__ == "JITCheckpointCallback":  # which saves where a signal has found it
                callback.on_pre_optimizer_step = _no_save  # gradients are in no checkpoint; it saves after the step

    # -- set-up ------------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Creates dtrain's accelerator in the place of accelerate's."""
        check_version(import_module("transformers").__version__)
        check_arguments(self.args)
        check_model(self.model)
        with _accelerator_of_dtrain():
            super().create_accelerator_and_postprocess()
        if not isinstance(self.accelerator, Accelerator):
            raise ConfigError(
                f"{type(self).__name__}.create_accelerator_and_postprocess has made an accelerator of its own; leave "
                f"that to Trainer's"
            )

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        options: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        del options["dynamo_plugin"]  # it is off, see check_arguments
        if options["mixed_precision"] == "no":
            options |= {"mixed_precision": None, "precision": "tf32" if self.args.tf32 else "fp32"}
        return options | {"seed": self.args.seed} | dict(self.dtrain)

    def _validate_args(self) -> None:
        super()._validate_args()
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            check_optimizer(self.args)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Creates the scheduler of the learning rate, whose state must fit into a checkpoint."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if self.args.save_strategy != "no" and not self.args.save_only_model:
            scheduler_text(scheduler)
        return scheduler

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        prepared = self.model_wrapped
        if not isinstance(prepared, PreparedModel):
            return super()._wrap_model(model, training, dataloader)
        if training and prepared.driver is None:  # it was only evaluated so far
            return self.model
        if model is not prepared and model is not prepared.module:  # a copy, see evaluation_loop
            return model
        # for evaluation too: the bare model's weights may be sharded, in the dtype of the replicas
        return self.accelerator.prepare_model(prepared)

    @property
    def engine(self) -> Any:
        """The ``dtrain.Engine``; None before training."""
        driver = getattr(self.model_wrapped, "driver", None)
        return None if driver is None else driver.engine

    # -- a step ------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs forward and backward of one micro-batch."""
        step, every = self.state.global_step + 1, self.state.save_steps
        if self.args.save_strategy == "steps" and (step % every == 0 or step == self.state.max_steps):
            self.engine.expect_save()
        self._hidden_filter |= self.args.logging_nan_inf_filter
        self.args.logging_nan_inf_filter = False  # it would hide the losses of skipped steps
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        return loss

    def _restore_filter(self) -> None:
        """Gives the caller's arguments the value back that they have outside of a step."""
        self.args.logging_nan_inf_filter |= self._hidden_filter
        self._hidden_filter = False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes the loss of a micro-batch as its share of the step's: see [Note: shares of a step]."""
        total = kwargs.get("num_items_in_batch")
        num_ranks = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        is_whole = self.args.gradient_accumulation_steps == 1 == num_ranks  # a micro-batch is the step
        if total is None or is_whole or self.loss_is_scaled_for_ga is not None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        total = torch.as_tensor(total, device=self.args.device)  # a subclass may count in numbers of Python
        with of_this_rank(self.args), self._counted_loss.count(total) as count:
            share = self._get_num_items_in_batch([inputs], self.args.device) / total
            found = super().compute_loss(model, inputs, *args, **{**kwargs, "num_items_in_batch": count})
            loss, *outputs = found if isinstance(found, tuple) else (found,)
            is_first = self._counted_loss.kind is None
            loss = self._counted_loss.share(loss, count, share) * num_ranks
        if is_first and self._counted_loss.kind != "divided" and self.is_world_process_zero():
            what = "ignores" if self._counted_loss.kind == "mean" else "has a term that ignores"
            logger.warning(
                f"the loss of {type(self.model).__name__} {what} num_items_in_batch, and Trainer would let it grow "
                f"with the numbers of micro-batches and ranks; here it is averaged over them, weighted by their items. "
                f"For Trainer's own factor set trainer.loss_is_scaled_for_ga = True"
            )
        return (loss, *outputs) if outputs else loss

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self._restore_filter()
        outcome, step = self.optimizer.outcome, self.engine.attempted_steps
        if outcome is not None and not outcome.applied and step > self._warned_step:
            self._warned_step, culprit = step, outcome.culprit  # for which the ranks search together
            if self.is_world_process_zero():
                logger.warning(f"step {step} was skipped: {outcome.reason}; {culprit}")
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        if self._globalstep_last_logged == self.state.global_step and not math.isfinite(tr_loss):
            tr_loss.zero_()  # transformers subtracts what it has logged, and NaN - NaN is NaN

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates or predicts in the engine's precision, on all ranks together, with rank 0's running statistics."""
        if self.engine is not None:
            self.engine.copy_buffers()
        if self.engine is None or not getattr(self.args, "predict_with_generate", False):
            return super().evaluation_loop(*args, **kwargs)
        # Seq2SeqTrainer generates with the bare model, each rank as many tokens as it needs
        with self.engine.full_model() as whole:
            bare, self.model = self.model, whole
            try:
                return super().evaluation_loop(*args, **kwargs)
            finally:
                self.model = bare

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes whole FP32 weights for ``from_pretrained``; all ranks call, and rank 0 writes."""
        import transformers

        if self.engine is None:  # nothing was trained
            super().save_model(output_dir, _internal_call)
        elif type(self)._save is not transformers.Trainer._save:  # it may read the weights from the model itself
            with self.engine.modify_weights():
                super().save_model(output_dir, _internal_call)
        else:
            folder = output_dir or self.args.output_dir
            state = self.accelerator.get_state_dict(self.model_wrapped)
            if self.args.should_save:
                self._save(folder, state_dict=state)
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:  # of an earlier run; without its state it is not complete
            (folder / STATE).unlink(missing_ok=True)
            shutil.rmtree(folder / FOLDER, ignore_errors=True)
        super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.engine.save(Path(output_dir) / FOLDER, extra={"lr_scheduler": scheduler_text(self.lr_scheduler)})
        if self.args.should_save:
            stop_plain_trainer(Path(output_dir))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # before trainer_state.json, which completes the checkpoint

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains; ``resume_from_checkpoint=True`` resumes from the newest complete checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest_checkpoint()
        elif resume_from_checkpoint and (missing := missing_part(Path(resume_from_checkpoint))):
            raise ConfigError(
                f"{resume_from_checkpoint} is not a complete checkpoint of Trainer with dtrain: {missing}; "
                f"resume_from_checkpoint=True takes the newest complete one, from_pretrained starts from its weights"
            )
        try:
            return super().train(resume_from_checkpoint or None, *args, **kwargs)
        finally:
            self._restore_filter()

    def _newest_checkpoint(self) -> str | bool:
        """Returns rank 0's newest complete checkpoint; True if there is none at all, so that Trainer says so."""
        from accelerate.utils import broadcast

        folder = Path(self.args.output_dir)
        own = newest_complete(folder) if self.is_world_process_zero() else -1
        step = int(broadcast(torch.tensor(own, device=self.args.device)))
        if step >= 0:
            return str(folder / f"checkpoint-{step}")
        if next(folder.glob("checkpoint-*"), None) is not None:
            raise ConfigError(f"resume_from_checkpoint=True, but {folder} has no complete checkpoint")
        return True

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Leaves the weights to the engine, which loads them too, once it is built.

        A model with a ``load_state_dict`` of its own loads here, because that may change the shapes of its buffers. If
        there is no such folder, Trainer says so.
        """
        has_own = type(self.model).load_state_dict is not torch.nn.Module.load_state_dict
        if has_own and self.engine is None:
            end_engine_of(self.model)
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif not Path(resume_from_checkpoint).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        extra = self.engine.load(Path(checkpoint) / FOLDER)
        self.lr_scheduler.load_state_dict(json.loads(extra["lr_scheduler"]))
        for group, lr in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = lr

    def _load_best_model(self) -> None:
        with self.engine.modify_weights():
            super()._load_best_model()


def _no_save(*args: Any, **kwargs: Any) -> None:
    """Does nothing, in the place of a callback's method."""


@contextmanager
def _accelerator_of_dtrain() -> Iterator[None]:
    module: Any = import_module("transformers.trainer")
    before = module.Accelerator
    module.Accelerator = Accelerator
    try:
        yield
    finally:
        module.Accelerator = before


@cache
def _trainer() -> Any:
    import transformers

    return type("Trainer", (TrainerMixin, transformers.Trainer), {"__module__": __name__, "__doc__": _DOC})


_DOC = "``transformers.Trainer`` on an engine; see ``TrainerMixin``."


def __getattr__(name: str) -> Any:
    if name == "Trainer":  # importing transformers takes seconds
        return _trainer()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
