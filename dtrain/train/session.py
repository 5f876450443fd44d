"""A training: the engine, the data, and the one body of a training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from dtrain.cli.resolve import compose
from dtrain.config.schema import RunConfig
from dtrain.data import Dataset, load_dataset, validation_batches
from dtrain.data.growing import GrowingBatches
from dtrain.data.loader import Batch
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.distributed.startup.setup import choose_device, connect
from dtrain.engine.interface import Engine
from dtrain.engine.outcome import StepOutcome
from dtrain.errors import UsageError
from dtrain.models import build_model, vocabulary
from dtrain.tasks import num_targets
from dtrain.train.setup import (
    check_inputs,
    check_launcher,
    check_patterns,
    check_precision,
    check_same,
    check_tokenizer,
    make_engine,
    make_loader,
    set_threads,
)
from dtrain.train.validation import to_device, validate

MicroBatch = Mapping[str, Tensor]
"""Keyword arguments of the model; ``targets`` are among them."""


class StepWatch:
    """Contexts around the parts of a step. Each one does nothing unless a subclass replaces it."""

    @property
    def sees_passes(self) -> bool:
        """Whether a forward or a backward has a context, so that it cannot be replayed from a graph."""
        own = type(self)
        return own.forward is not StepWatch.forward or own.backward is not StepWatch.backward

    def forward(self, micro: MicroBatch) -> AbstractContextManager[object]:
        """Returns the context of the forward of a micro-batch."""
        return nullcontext()

    def backward(self, micro: MicroBatch, output: Any, weight: float) -> AbstractContextManager[object]:
        """Returns the context of the backward; ``output`` is the model's, and counts ``weight`` in the mean."""
        return nullcontext()

    def update(self) -> AbstractContextManager[object]:
        """Returns the context of ``engine.step``: reduction, vote and update."""
        return nullcontext()


_UNWATCHED = StepWatch()


class Session:
    """A training of ``dtrain train`` that the caller drives step by step.

    Args:
        engine: trains the model of ``config``.
        config: of the run.
        dataset: of the run; a session without it has no ``loader``, and takes the caller's batches.
        weigh: returns the weight of a micro-batch; None: ``micro_batch_weight``.

    Examples:
        >>> keys = ["data=friedman", "model=mlp", "precision=fp32", "train.steps=2", "schedule.total_steps=2"]
        >>> session = dtrain.Session.open(overrides=keys)
        >>> session.step().applied, sorted(session.validate())
        (True, ['loss', 'r2', 'rmse'])
    """

    def __init__(
        self,
        engine: Engine,
        config: RunConfig,
        dataset: Dataset | None = None,
        *,
        weigh: Callable[[MicroBatch], float] | None = None,
    ) -> None:
        self.engine = engine
        self.config = config
        self._dataset = dataset
        self._num_targets = config.train.micro_batch_size * config.targets_per_sample
        self._weigh = weigh or self._weight
        self._graphed = engine.graphed_step(lambda micro: engine(**micro)) if config.engine.graph else None

    @classmethod
    def open(
        cls,
        config: RunConfig | None = None,
        comm: Communicator | None = None,
        *,
        overrides: Sequence[str] = (),
        model: nn.Module | None = None,
        dataset: Dataset | None = None,
        contract: Mapping[str, Any] | None = None,
    ) -> Session:
        """Loads the data, builds the model and the engine, and checks that they fit together.

        Args:
            config: resolved and checked; None: that of ``dtrain train`` with ``overrides``.
            comm: of the ranks, each of which calls this; None: of the process group, or of the launcher's environment.
            overrides: keys as on the command line, such as ``["model=tiny", "precision=bf16"]``.
            model: instead of the one that ``config`` names.
            dataset: instead of the one that ``config`` names.
            contract: precision contract of an earlier part of the run, whose decisions stay.

        Raises:
            ConfigError: an override is wrong; the ranks differ in ``config`` or data; or data, model, device and keys
                do not fit together.
        """
        if config is None:
            config = compose(overrides)
        if comm is None:
            comm = _connect(config)
        if dataset is None:
            dataset = open_data(config, comm)
        config = with_model_facts(config, dataset)
        if model is None:
            model = make_model(config, dataset)
        else:
            check_model_fits(config, model, dataset)
        return cls(make_engine(config, model, comm, contract), config, dataset)

    @property
    def dataset(self) -> Dataset:
        """The data for training and validation."""
        assert self._dataset is not None
        return self._dataset

    @cached_property
    def loader(self) -> GrowingBatches:
        """This rank's batches from the engine's data cursor on; made at the first use, which is after a load."""
        return make_loader(self.config, self.dataset, self.engine)

    def step(
        self,
        batch: Batch | None = None,
        around: AbstractContextManager[object] | None = None,
        *,
        watch: StepWatch = _UNWATCHED,
    ) -> StepOutcome:
        """Trains one step.

        Args:
            batch: this rank's micro-batches; None: the next of ``loader``, after which a save resumes.
            around: context of the step.
            watch: contexts of its parts.

        Returns:
            What ``Engine.step`` returns.

        Raises:
            NonFiniteError: too many steps in a row were skipped.
            UsageError: from this step on ``config`` computes in another precision, which needs another engine.
            CheckpointError: an earlier asynchronous save failed; ``engine.step()`` then completes the step, and with
                ``engine.graph`` the same call does.
        """
        engine, cursor = self.engine, None
        if self.config.at(step := engine.attempted_steps) is not self.config:
            raise UsageError(
                f"after step {step} this run computes in {self.config.precision.float8.finish_in} "
                f"(precision.float8.finish_in): save, open a Session with precision=bf16 alone, and load"
            )
        if batch is None:
            batch = next(self.loader)
            cursor = self.loader.cursor
        with around or nullcontext():
            if self._graphed is not None and not watch.sees_passes:
                with watch.update():
                    outcome = self._graphed(batch, list(map(self._weigh, batch)))
            else:
                outcome = self._launch(batch, watch)
        if cursor is not None:
            engine.data_cursor = cursor
        return outcome

    def _launch(self, batch: Batch, watch: StepWatch) -> StepOutcome:
        engine = self.engine
        for micro in engine.accumulate(batch):
            weight = self._weigh(micro)
            with watch.forward(micro):
                output = engine(**to_device(micro, engine.device))
            with watch.backward(micro, output, weight):
                engine.backward(output, weight=weight)
            del output  # else its tensors stay until the next forward
        with watch.update():
            return engine.step()

    def _weight(self, micro: MicroBatch) -> float:
        return micro_batch_weight(micro, self._num_targets)

    def validate(self) -> dict[str, float]:
        """Returns loss and metrics of the validation data; see ``dtrain.train.validation.validate``."""
        return validate(self.engine, self.dataset.task, self.validation_batches())

    def validation_batches(self) -> Iterator[tuple[dict[str, Tensor], bool]]:
        """Returns this rank's micro-batches of the validation data, and whether each one counts."""
        train, engine = self.config.train, self.engine
        num = train.eval_batches or None
        return validation_batches(self.dataset.validation, train.micro_batch_size, num, engine.rank, engine.world_size)


def _connect(config: RunConfig) -> Communicator:
    launch = config.launch
    check_launcher(launch)
    device = choose_device(launch.device, LaunchEnv.read().local_rank)
    check_precision(config, device)
    comm = connect(device, timeout_s=launch.timeout_s, shared_memory=launch.shared_memory)
    set_threads(config, comm)
    return comm


def open_data(config: RunConfig, comm: Communicator) -> Dataset:
    """Loads the data, and checks that all ranks have the same one, which fits the tokenizer of the model.

    Raises:
        ConfigError: see ``Session.open``.
    """
    # each mark says that this rank is at work, and no hang
    dataset = load_dataset(config.data, config.model.max_seq_len, comm.schedule.progress.advance)
    check_same(comm, config, dataset)
    check_tokenizer(config.model, dataset)
    return dataset


def with_model_facts(config: RunConfig, dataset: Dataset) -> RunConfig:
    """Returns ``config`` with what its model depends on beside it, so that an export needs no more."""
    # stored configs name the vocabulary, because the weights of a checkpoint show only its padded size
    vocab_size = vocabulary(config.model, dataset.task) if config.data.is_language else None
    # and an absolute path, because an export may run in another directory
    path = config.model.path and os.path.abspath(config.model.path)
    return replace(config, model=replace(config.model, vocab_size=vocab_size, path=path))


def make_model(config: RunConfig, dataset: Dataset) -> nn.Module:
    """Builds the model, on the CPU; raises as ``check_model_fits``."""
    model = build_model(config.model, dataset.task, config.seed)
    check_model_fits(config, model, dataset)
    return model


def check_model_fits(config: RunConfig, model: nn.Module, dataset: Dataset) -> None:
    """Raises ConfigError if ``model`` does not fit the patterns of names in ``config``, or the data."""
    check_patterns(config, model)
    check_inputs(model, dataset)


def micro_batch_weight(micro: MicroBatch, num_targets_of_all: int) -> float:
    """Returns a weight in proportion to the targets that count, so that the global loss is the mean over them.

    Divided by the targets of a micro-batch, the same number on all ranks and in all steps: if every target counts,
    weights are exactly 1, and no gradient need be multiplied.
    """
    return num_targets(micro["targets"]) / num_targets_of_all
