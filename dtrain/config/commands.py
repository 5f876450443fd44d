"""The commands that take ``key=value``, each with the schema of its keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_type_hints

from dtrain.config.precision import PrecisionConfig
from dtrain.config.probe import ProbeConfig
from dtrain.config.schema import RunConfig
from dtrain.config.tool_schema import (
    AcceptConfig,
    BlocksSuiteConfig,
    CheckpointSuiteConfig,
    CollectivesSuiteConfig,
    DataSuiteConfig,
    EngineSuiteConfig,
    Float8SuiteConfig,
    LossHeadSuiteConfig,
    OptimizerSuiteConfig,
    ParitySuiteConfig,
    PrecisionSuiteConfig,
    TelemetrySuiteConfig,
    VoteSuiteConfig,
)

Root = TypeVar("Root")


@dataclass(frozen=True)
class Primary(Generic[Root]):
    """A command's configuration: ``conf/<name>.yaml`` builds on ``schema``, which Hydra knows as ``<name>_schema``."""

    name: str
    schema: type[Root]

    @property
    def command(self) -> str:
        return self.name.replace("-", " ", 1)

    @property
    def chooses_precision(self) -> bool:
        """Whether ``precision=NAME`` is a choice of this command."""
        return get_type_hints(self.schema).get("precision") is PrecisionConfig


TRAIN = Primary("train", RunConfig)
PARITY = Primary("parity", ParitySuiteConfig)
PROBE = Primary("probe", ProbeConfig)
ACCEPT = Primary("accept", AcceptConfig)
BENCH_ENGINE = Primary("bench-engine", EngineSuiteConfig)
BENCH_PRECISION = Primary("bench-precision", PrecisionSuiteConfig)
BENCH_OPTIMIZER = Primary("bench-optimizer", OptimizerSuiteConfig)
BENCH_LOSS_HEAD = Primary("bench-loss-head", LossHeadSuiteConfig)
BENCH_COLLECTIVES = Primary("bench-collectives", CollectivesSuiteConfig)
BENCH_CHECKPOINT = Primary("bench-checkpoint", CheckpointSuiteConfig)
BENCH_DATA = Primary("bench-data", DataSuiteConfig)
BENCH_VOTE = Primary("bench-vote", VoteSuiteConfig)
BENCH_TELEMETRY = Primary("bench-telemetry", TelemetrySuiteConfig)
BENCH_FLOAT8 = Primary("bench-float8", Float8SuiteConfig)
BENCH_BLOCKS = Primary("bench-blocks", BlocksSuiteConfig)
PRIMARIES: tuple[Primary[Any], ...] = (
    TRAIN,
    PARITY,
    PROBE,
    ACCEPT,
    BENCH_ENGINE,
    BENCH_PRECISION,
    BENCH_OPTIMIZER,
    BENCH_LOSS_HEAD,
    BENCH_COLLECTIVES,
    BENCH_CHECKPOINT,
    BENCH_DATA,
    BENCH_VOTE,
    BENCH_TELEMETRY,
    BENCH_FLOAT8,
    BENCH_BLOCKS,
)
