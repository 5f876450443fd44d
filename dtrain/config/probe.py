"""The typed schema of ``dtrain probe``; keys shared with training mean the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dtrain.config.data import DataConfig, StdlibDataConfig
from dtrain.config.fields import CheckedRecord, at_least, group, one_of, setting, similar
from dtrain.config.model import ModelConfig
from dtrain.config.optim import OptimConfig, Optimizer, OptimKeys
from dtrain.config.precision import Float8, LossScale, PrecisionConfig
from dtrain.config.schedule import Cosine, ScheduleConfig
from dtrain.config.schema import LaunchConfig, RunConfig, TrainConfig
from dtrain.errors import ConfigError

REFERENCE = "fp32"
PROBED_FORMATS = (REFERENCE, "tf32", "bf16", "fp16", "fp8")
"""Formats that a trial can train in, the reference first."""


@dataclass(frozen=True)
class ProbeBatchConfig(CheckedRecord):
    """Batch of a trial's step; small, because every step is trained once in each format, and again for the noise."""

    micro_batch_size: int = at_least(4, 1, "Sequences in one forward.")
    global_batch_size: int = at_least(8, 1, "Sequences in one step.")


@dataclass(frozen=True)
class ProbePrecisionConfig(CheckedRecord):
    """Settings of the trials; `formats` chooses their precision."""

    rules: dict[Any, str] = setting(
        {}, "Formats by module, {name pattern: format}, in every trial but those of fp32 and tf32."
    )
    loss_scale: LossScale = group(LossScale)
    float8: Float8 = group(Float8)

    def for_format(self, name: str, rules: dict[str, str]) -> PrecisionConfig:
        """Returns the settings of a trial in the format ``name`` with ``rules``, without those that it does not use."""
        uses_fp16 = name == "fp16" or "fp16" in rules.values()
        uses_fp8 = name == "fp8" or "fp8" in rules.values()
        return PrecisionConfig(
            name,
            rules,
            loss_scale=self.loss_scale if uses_fp16 else LossScale(),
            float8=self.float8 if uses_fp8 else Float8(),
        )


@dataclass(frozen=True)
class ProbeLaunchConfig(CheckedRecord):
    """Device and threads. The probe is one process."""

    device: str = one_of("auto", "cpu", "cuda", doc="Device; auto: a GPU if there is one.")
    threads_per_rank: int | None = at_least(None, 1, "PyTorch threads; null: the cores of this host.")


@dataclass(frozen=True)
class ProbeConfig(CheckedRecord):
    """Keys of ``dtrain probe``."""

    formats: list[str] | None = setting(
        None, "Some of fp32, tf32, bf16, fp16, fp8; fp32 is always trained. null: all that this machine can try."
    )
    steps: int = at_least(20, 8, "Steps of each trial; the mean loss of the last quarter is compared.")
    seeds: int = at_least(3, 2, "Other seeds that FP32 is trained with, to measure its noise.")
    run_dir: str | None = setting(None, "Directory of the report; null: `runs/probe-<date>_<time>`.", is_path=True)
    seed: int = at_least(0, 0, "Seed of weights, sample order and dropout.")
    train: ProbeBatchConfig = group(ProbeBatchConfig)
    precision: ProbePrecisionConfig = group(ProbePrecisionConfig)
    model: ModelConfig = group(ModelConfig)
    data: DataConfig = group(StdlibDataConfig, DataConfig)
    optim: OptimKeys = group(OptimConfig, Optimizer)
    schedule: ScheduleConfig = group(Cosine, ScheduleConfig)
    launch: ProbeLaunchConfig = group(ProbeLaunchConfig)

    def _check(self) -> None:
        if self.run_dir == "":
            raise ConfigError("run_dir is empty; name a folder, or leave it null for runs/probe-<date>_<time>")
        if self.formats == []:
            raise ConfigError("formats is empty; list some, or leave it null for all that this machine can try")
        for name in self.formats or []:
            if name not in PROBED_FORMATS:
                known = ", ".join(PROBED_FORMATS)
                raise ConfigError(f"formats has '{name}'; expected some of {known}{similar(name, PROBED_FORMATS)}")
            if (self.formats or []).count(name) > 1:
                raise ConfigError(f"formats has '{name}' twice; list each once")

    def training(self, name: str, rules: dict[str, str] | None = None) -> RunConfig:
        """Returns the training run of a trial in the format ``name``; its blocks are not compiled.

        Args:
            name: one of ``PROBED_FORMATS``.
            rules: instead of ``precision.rules``.

        Raises:
            ConfigError: a rule that the format excludes.
        """
        if rules is None:
            rules = {} if name in (REFERENCE, "tf32") else self.precision.rules
        return RunConfig(
            seed=self.seed,
            train=TrainConfig(
                steps=self.steps,
                micro_batch_size=self.train.micro_batch_size,
                global_batch_size=self.train.global_batch_size,
            ),
            precision=self.precision.for_format(name, rules),
            model=replace(self.model, compile="none"),  # compiled code runs without the hooks that look into modules
            data=self.data,
            optim=self.optim,
            schedule=self.schedule,
            launch=LaunchConfig(device=self.launch.device, threads_per_rank=self.launch.threads_per_rank),
        )
