"""The commands that take ``key=value``, each with the schema of its keys; a suite of ``dtrain bench`` is one row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from dtrain.config.fields import group
from dtrain.config.precision import PrecisionConfig
from dtrain.config.probe import ProbeConfig
from dtrain.config.schema import RunConfig
from dtrain.config.tool_schema import (
    AcceptConfig,
    BenchSuite,
    BlocksBenchConfig,
    CheckpointBenchConfig,
    CollectivesBenchConfig,
    DataBenchConfig,
    EngineBenchConfig,
    Float8BenchConfig,
    Float8Suite,
    HostBenchConfig,
    LossHeadBenchConfig,
    MemoryBenchConfig,
    ModelSuite,
    OptimizerBenchConfig,
    ParitySuiteConfig,
    PrecisionBenchConfig,
    ProductsBenchConfig,
    ProfileBenchConfig,
    ProfileSuite,
    StepBenchConfig,
    TelemetryBenchConfig,
    TrainingSuite,
    VoteBenchConfig,
)

Root = TypeVar("Root")


@dataclass(frozen=True)
class Primary(Generic[Root]):
    """A command's configuration, which builds on ``schema``; Hydra knows that as ``<name>_schema``.

    Attributes:
        defaults: options of groups, and values of other keys; None: ``conf/<name>.yaml`` has them.
    """

    name: str
    schema: type[Root]
    defaults: Mapping[str, Any] | None = None

    @property
    def command(self) -> str:
        return self.name.replace("-", " ", 1)

    @property
    def chooses_precision(self) -> bool:
        """Whether ``precision=NAME`` is a choice of this command."""
        return get_type_hints(self.schema).get("precision") is PrecisionConfig


_TRAINING = {"model": "gpt-11m", "data": "stdlib", "optim": "adamw", "optim.lr": 3e-4}
"""Defaults of a suite that trains; there is no warm-up of the learning rate."""

_TINY = {"model": "tiny", "model.vocab_size": 4096}
"""Defaults of a suite without data."""


@dataclass(frozen=True)
class Suite:
    """A suite of ``dtrain bench``: all that there is of it beside the function that measures.

    Attributes:
        name: of the command, ``dtrain bench NAME``.
        measures: what its tables say, for the usage and for docs/trust/benchmarks.md.
        keys: the type of its configuration, with the record of ``bench`` in brackets.
        run: ``module:function`` below ``dtrain.measure.bench``. The module brings torch, so it is imported only when it
            runs. The function takes the configuration and the command line; it yields the results, or first parts of
            them that grow, each of which replaces the one before in the file.
        defaults: as in ``Primary``.
    """

    name: str
    measures: str
    keys: Any
    run: str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def primary(self) -> Primary[Any]:
        kind, (bench,) = get_origin(self.keys), get_args(self.keys)
        name = bench.__name__.replace("Bench", "Suite")
        plain = {"__orig_bases__": ()}  # OmegaConf takes a generic record for a dict
        schema = make_dataclass(name, [("bench", bench, group(bench))], bases=(kind,), namespace=plain, frozen=True)
        return Primary(f"bench-{self.name}", schema, self.defaults)


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "engine",
            "step time, memory and start of dtrain's engines against plain PyTorch, DDP, FSDP2, DeepSpeed, ...",
            TrainingSuite[EngineBenchConfig],
            "training.suites:run_engine_suite",
            _TRAINING,
        ),
        Suite(
            "precision",
            "speed and memory of mixed precision against FP32",
            TrainingSuite[PrecisionBenchConfig],
            "training.suites:run_precision_suite",
            _TRAINING,
        ),
        Suite(
            "float8",
            "FP8 against BF16 at several widths, and each of its products",
            Float8Suite[Float8BenchConfig],
            "training.float8:run_float8_suite",
            {**_TRAINING, "model": "tiny", "model.num_layers": 2},
        ),
        Suite(
            "step",
            "training steps on one device: speed, MFU and memory of dtrain's settings and of other libraries",
            Float8Suite[StepBenchConfig],
            "training.suites:run_step_suite",
            _TRAINING,
        ),
        Suite(
            "optimizer",
            "the optimizer phase against torch's sequence of passes and the memory's bandwidth",
            BenchSuite[OptimizerBenchConfig],
            "operations.optimizer:run_optimizer_suite",
        ),
        Suite(
            "loss-head",
            "output layer and loss by chunks of tokens, against full logits and torch's own function",
            BenchSuite[LossHeadBenchConfig],
            "operations.loss_head:run_loss_head_suite",
        ),
        Suite(
            "products",
            "rates of matrix products by format and shape, of attention, and of copies",
            ModelSuite[ProductsBenchConfig],
            "operations.products:run_products_suite",
            _TINY,
        ),
        Suite(
            "memory",
            "model states of the native engine by precision and stage, against the formula",
            ModelSuite[MemoryBenchConfig],
            "training.memory:run_memory_suite",
            _TINY,
        ),
        Suite(
            "profile",
            "a training step by class of kernel; launches and waits of its optimizer phase",
            ProfileSuite[ProfileBenchConfig],
            "training.profile:run_profile_suite",
            {**_TINY, "optim": "adamw"},
        ),
        Suite(
            "host",
            "host time of a step by part, beside a plain loop",
            ModelSuite[HostBenchConfig],
            "training.host:run_host_suite",
            {
                "model": "tiny",
                "model.num_layers": 24,
                "model.hidden_dim": 32,
                "model.num_heads": 1,
                "model.max_seq_len": 4,
                "model.vocab_size": 64,
            },
        ),
        Suite(
            "collectives",
            "each collective of a step, through sockets and through shared memory",
            BenchSuite[CollectivesBenchConfig],
            "operations.collectives:run_collectives_suite",
        ),
        Suite(
            "checkpoint",
            "stall of training during a save and time until it is complete, against torch's",
            BenchSuite[CheckpointBenchConfig],
            "operations.checkpoint:run_checkpoint_suite",
        ),
        Suite(
            "data",
            "tokenizing, reading token shards, and packing documents against padding them",
            ModelSuite[DataBenchConfig],
            "operations.data:run_data_suite",
            {"model": "tiny", "model.max_seq_len": 1024},
        ),
        Suite(
            "vote",
            "cost of the vote and of loss scaling in a step",
            TrainingSuite[VoteBenchConfig],
            "training.suites:run_vote_suite",
            _TRAINING,
        ),
        Suite(
            "telemetry",
            "cost of a sampled step, in which every gradient and update is measured",
            TrainingSuite[TelemetryBenchConfig],
            "training.suites:run_telemetry_suite",
            {**_TRAINING, "model": "tiny"},
        ),
        Suite(
            "blocks",
            "step time and activations of recomputed and compiled blocks",
            TrainingSuite[BlocksBenchConfig],
            "training.suites:run_blocks_suite",
            _TRAINING,
        ),
    )
}
"""The suites of ``dtrain bench`` by name, in the order of its usage."""

TRAIN = Primary("train", RunConfig)
PARITY = Primary("parity", ParitySuiteConfig)
PROBE = Primary("probe", ProbeConfig)
ACCEPT = Primary("accept", AcceptConfig)
PRIMARIES: tuple[Primary[Any], ...] = (TRAIN, PARITY, PROBE, ACCEPT, *(suite.primary for suite in SUITES.values()))
