"""A run that is not started: its real model and engine on fake tensors, as one rank of any number."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dtrain.config.model import HF_FACTORY
from dtrain.config.schema import RunConfig
from dtrain.data import Dataset, load_dataset
from dtrain.data.growing import cut_rows
from dtrain.engine.adapters.native import NativeEngine
from dtrain.engine.interface import Engine
from dtrain.engine.outcome import StepOutcome
from dtrain.errors import ConfigError
from dtrain.models import build_model
from dtrain.planning.devices import Device
from dtrain.planning.record.fake_step import fake_engine
from dtrain.planning.record.ranks import HOST, NCCL, SOCKETS, Transfer, planned_ranks
from dtrain.planning.record.recorder import RecordedStep, RecordedStorage, StepRecorder
from dtrain.tasks import Language, Task
from dtrain.train.session import Session, micro_batch_weight
from dtrain.train.setup import executable, make_engine, torch_settings_restored

_NUM_TREE_MICRO_BATCHES = 8
"""Micro-batches of a planned step in which partial sums stay (``reproducible``); two show all else."""


def build_without_values(config: RunConfig, task: Task | int) -> nn.Module:
    """Returns the model of ``config`` without weights, or with weights if its code needs values."""
    if config.model.factory == HF_FACTORY:
        task = 1  # it has a vocabulary of its own, whatever the data's
    try:
        with torch.device("meta"):
            return build_model(config.model, task, config.seed)
    except (RuntimeError, NotImplementedError):
        return build_model(config.model, task, config.seed)


@dataclass(frozen=True)
class PlannedRun:
    """A run on a device that need not be here.

    Attributes:
        config: what ``dtrain train`` takes, with one size of all batches.
        batch: a micro-batch of a rank; only shapes and dtypes count, and how many targets do.
    """

    config: RunConfig
    device: Device
    num_ranks: int
    batch: Mapping[str, Tensor]
    task: Task

    @staticmethod
    def of(config: RunConfig, device: Device, num_ranks: int, dataset: Dataset | None = None) -> PlannedRun:
        """Returns the plan of ``config``; without ``dataset`` its data is opened, or guessed from the model.

        A batch that grows is planned at its largest.

        Raises:
            ConfigError: the data cannot be opened, and the vocabulary is not known without it.
        """
        config = config.at_largest_batch()
        train, model = config.train, config.model
        seq_len = train.seq_len or config.targets_per_sample
        try:
            dataset = dataset or load_dataset(config.data, model.max_seq_len)
        except ConfigError:
            unknown = model.vocab_size is None and model.factory != HF_FACTORY
            if unknown or not config.data.is_language:
                raise
            rows = train.micro_batch_size * model.max_seq_len // seq_len
            batch = dict.fromkeys(("tokens", "targets"), torch.zeros(rows, seq_len, dtype=torch.int64))
            return PlannedRun(config, device, num_ranks, batch, Language(model.vocab_size or 1))
        ids = dataset.train.order(config.seed, np.arange(train.micro_batch_size, dtype=np.int64))
        batch = cut_rows(dataset.train.batch(ids), seq_len) if train.seq_len else dataset.train.batch(ids)
        return PlannedRun(config, device, num_ranks, batch, dataset.task)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a rank in a step."""
        train = self.config.train
        return max(1, int(train.global_batch_size // (train.micro_batch_size * self.num_ranks)))

    @property
    def num_recorded(self) -> int:
        """Micro-batches of a recorded step: as many as show the memory of all."""
        return min(self.num_micro_batches, _NUM_TREE_MICRO_BATCHES if self.config.engine.reproducible else 2)

    def with_micro_batch_size(self, size: int, *, keeps_global: bool = False) -> PlannedRun:
        """Returns the run with micro-batches of ``size`` samples: as many of them, or for the same global batch."""
        train = self.config.train
        whole = train.global_batch_size
        if not keeps_global:
            whole = size * (whole // train.micro_batch_size)
        config = replace(self.config, train=replace(train, micro_batch_size=size, global_batch_size=whole))
        rows = {name: size * len(tensor) // train.micro_batch_size for name, tensor in self.batch.items()}
        batch = {name: tensor[:1].expand(rows[name], *tensor.shape[1:]) for name, tensor in self.batch.items()}
        return replace(self, config=config, batch=batch)

    @property
    def transport(self) -> str:
        """How the ranks of the run would communicate."""
        return NCCL if self.device.type == "cuda" else HOST if self.config.launch.shared_memory else SOCKETS

    @property
    def compiles_blocks(self) -> bool:
        """Whether the run compiles blocks, or decides by a measurement; a plan takes them as they are."""
        mode = self.config.model.compile
        return mode == "blocks" or (mode == "auto" and self.device.type == "cuda")

    @contextmanager
    def engine(self, recorder: StepRecorder | None = None) -> Iterator[tuple[NativeEngine, Callable[..., StepOutcome]]]:
        """Yields the engine of rank 0, and a function that takes a step of some micro-batches with a StepWatch.

        Inside, tensors are fake, the device is a CPU, and ``recorder`` records what happens. The configuration is
        changed in what does not change memory or products.
        """
        recorder = recorder or StepRecorder()
        config = executable(self.config, self.device.type, self.device.capability)
        comm = planned_ranks(self.num_ranks, self.transport, torch.device("cpu"), recorder)
        model = build_without_values(config, self.task)
        # fake targets have no values to count
        weight = micro_batch_weight(self.batch, config.train.micro_batch_size * config.targets_per_sample)
        gc.freeze()  # then the collector looks at new objects only: a plan makes many, next to torch's even more
        with ExitStack() as stack:
            stack.callback(gc.unfreeze)
            stack.enter_context(torch_settings_restored())
            engine = stack.enter_context(fake_engine(model, partial(make_engine, config), comm, recorder))
            assert isinstance(engine, NativeEngine)
            session = Session(engine, config, weigh=lambda _: weight)
            batch = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in self.batch.items()}

            def step(num_micro_batches: int = 1, **watch: Any) -> StepOutcome:
                return session.step([batch] * num_micro_batches, **watch)

            yield engine, step

    def record(self, *, for_time: bool = False, num_steps: int = 2) -> RecordedSteps:
        """Returns recorded steps of the run on fake tensors.

        The first of ``num_steps`` allocates the buffers that stay, and the engine learns the order of the groups in it.
        Calls are kept only if ``for_time``. Then one more step is recorded, with one more micro-batch, if the run has
        more micro-batches than the recorded steps.

        Raises:
            DtrainError: ``dtrain train`` would refuse the run.
        """
        counts = [self.num_recorded] * num_steps
        if for_time and self.num_recorded < self.num_micro_batches:
            counts.append(self.num_recorded + 1)
        recorder = StepRecorder(keeps_calls=for_time)
        with self.engine(recorder) as (engine, step):
            startup = [recorded.transfer for recorded in recorder.transfers]
            steps = recorder.record_steps(engine, step, counts)
            exchange = engine.sharded.reducer.exchange
            return RecordedSteps(
                run=self,
                steps=steps,
                storages=recorder.storages,
                startup=startup,
                memory=split_memory(engine),
                saved=saved_bytes(engine),
                sends={send.label: send.dtype.itemsize for send in getattr(exchange, "sends", ())},
                elements={
                    layout.name: (sum(slot.stop - slot.start for slot in layout.slots), layout.numel)
                    for layout in engine.sharded.layouts
                },
                shard_ranks=engine.states.mesh.shard.world_size,
            )


@dataclass(frozen=True)
class RecordedSteps:
    """Recorded steps of a planned run, and what its engine holds.

    Attributes:
        startup: transfers while the engine is built.
        memory: bytes of ``engine.memory()`` on the device, and in the memory of the host beside it.
        saved: bytes of the rank's part of a checkpoint, and of the whole.
        sends: bytes of an element of the gradients that are sent unreduced, by label.
        elements: of each flat buffer: those of parameters, and all.
        shard_ranks: ranks that share the states.
    """

    run: PlannedRun
    steps: Sequence[RecordedStep]
    storages: Sequence[RecordedStorage]
    startup: Sequence[Transfer]
    memory: tuple[dict[str, int], dict[str, int]]
    saved: tuple[int, int]
    sends: Mapping[str, int]
    elements: Mapping[str, tuple[int, int]]
    shard_ranks: int

    @property
    def num_more(self) -> int:
        """Micro-batches that a step of the run has beyond those of the last recorded step."""
        return self.run.num_micro_batches - self.steps[-1].num_micro_batches


def split_memory(engine: Engine) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the bytes of ``engine.memory()`` on the rank's device, and those in the memory of the host beside it."""
    memory = engine.memory()
    host = {kind: memory.pop(kind) for kind in engine.host_kinds}
    return memory, host


def saved_bytes(engine: NativeEngine) -> tuple[int, int]:
    """Returns the bytes that rank 0 saves, and those of all ranks, if these have as many for each parameter."""
    own = {kind: list(engine.states.owned_shards(kind)) for kind in engine.states.saved_dtypes}
    nbytes = sum(shard.nbytes for shards in own.values() for shard in shards)
    elements = max(sum(shard.data.numel() for shard in shards) for shards in own.values())
    whole = sum(slot.spec.numel for layout in engine.sharded.layouts for slot in layout.slots)
    return nbytes, round(nbytes * whole / max(elements, 1))
