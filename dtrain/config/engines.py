"""The engines' records: ``dtrain.Native(zero_stage=3)`` in a script, the keys of ``engine`` on the command line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dtrain.config.capabilities import check_support
from dtrain.config.fields import CheckedRecord, at_least, between, one_of, option, setting
from dtrain.errors import ConfigError

_ZERO_STAGE = "What is sharded: 0 nothing, 1 masters and moments, 2 also gradients, 3 also weights."
_SHARDING_UNITS = (
    "Name patterns of modules, each sharded as a unit; auto: each element of an outermost ModuleList or Sequential."
)
_OFFLOAD = "Memory that holds masters and moments, with native also main grads: the rank's device, or the host's."
_PATTERNS = "auto or a list of name patterns of modules, such as [blocks.*]; each module is sharded as a unit"


_NOT_ON_HOST = (
    ("master", "remainder", "the weight, which is half of each master, is on the device"),
    ("grad_dtype", "bf16", "the host sums main grads in FP32"),
)
"""Settings that exclude ``offload=cpu`` of the native engine: name, value, reason."""

_NOT_REPLICATED = (
    ("offload", "cpu", "main grads on the host cannot be summed across replicas by the device"),
    ("grad_dtype", "bf16", "sums across replicas are FP32"),
)
"""Settings that exclude ``shard_size`` of the native engine: name, value, reason."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(CheckedRecord):
    """Engine that runs the training step. `dtrain doctor engines` compares what they can do."""

    name: str = option("native")
    zero_stage: int = between(2, 0, 3, _ZERO_STAGE)
    reproducible: bool = setting(False, "Compute equal bits at any number of ranks and any stage.")
    reduce_dtype: str = one_of(
        "auto",
        "fp32",
        "bf16",
        "fp16",
        doc="Dtype of gradients during reduction; sums are FP32. auto: as they are computed, or FP32 if a rank sums "
        "its micro-batches first; engines other than native use FP32.",
    )
    max_consecutive_skips: int = at_least(50, 1, "Skipped steps in a row after which the run ends with a diagnosis.")

    def _check(self) -> None:
        check_support(
            self.name,
            format_key=self._key,
            zero_stage=self.zero_stage,
            reproducible=self.reproducible,
            reduce_dtype=self.reduce_dtype,
        )


@dataclass(frozen=True, kw_only=True)
class Native(EngineConfig):
    """dtrain's own engine: sharded FP32 masters, gradients reduced during backward and summed in FP32, one vote."""

    sharding_units: Any = setting("auto", _SHARDING_UNITS, kind=str | list[str], what=_PATTERNS)
    reshard_after_forward: bool = setting(
        True, "At stage 3, free a group's weights after its forward; false: only after its backward."
    )
    prefetch: int = at_least(1, 0, "At stage 3, number of groups unsharded ahead of their use.")
    keep_gathered: list[str] = setting(
        [], "At stage 3, name patterns of modules or parameters that stay unsharded from forward to backward."
    )
    shard_size: int | None = at_least(
        None,
        1,
        "Number of consecutive ranks that share the states; other blocks of ranks hold replicas of them, whose "
        "gradients are summed once a step. null: all ranks.",
    )
    offload: str = one_of("none", "cpu", doc=_OFFLOAD)
    master: str = one_of(
        "full",
        "remainder",
        doc="FP32 masters in full, or as the BF16 weight and its 16-bit remainder: the same numbers in 2 bytes less. "
        "Parameters without a BF16 weight (norms, FP8) keep them in full.",
    )
    grad_dtype: str = one_of(
        "fp32",
        "bf16",
        doc="Dtype of main grads. bf16: BF16 gradients are summed in FP32, and each sum is rounded stochastically when "
        "it is stored; a single micro-batch on one rank is not rounded.",
    )

    def _check(self) -> None:
        super()._check()
        if self.offload == "cpu" and self.zero_stage == 0:
            raise ConfigError(
                f"{self._entry('offload')} with {self._entry('zero_stage')}: every rank would hold all masters and "
                f"moments in the memory of its host; set {self._key('zero_stage')}=1, 2 or 3, or remove it"
            )
        for name, value, reason in _NOT_ON_HOST:
            if self.offload == "cpu" and getattr(self, name) == value:
                raise ConfigError(f"{self._entry('offload')} with {self._entry(name)}: {reason}; remove one of the two")
        if self.offload == "cpu" and self.reproducible:
            raise ConfigError(
                f"{self._entry('offload')} with {self._key('reproducible')}=true: the gradients of all ranks would "
                f"have to cross to the host one by one to be summed in order; remove one of the two"
            )
        if self.shard_size is not None:
            self._check_shard_size()
        if self.zero_stage == 3:
            return
        stage = self._key("zero_stage")
        for name, default in (("reshard_after_forward", True), ("prefetch", 1), ("keep_gathered", [])):
            if getattr(self, name) != default:
                raise ConfigError(
                    f"{self._entry(name)} is used with {stage}=3 only, and {self._entry('zero_stage')}; "
                    f"remove it, or set {stage}=3"
                )

    def _check_shard_size(self) -> None:
        size, entry, stage = self.shard_size or 1, self._entry("shard_size"), self._key("zero_stage")
        if size == 1 or self.zero_stage == 0:
            raise ConfigError(
                f"{entry} with {self._entry('zero_stage')}: every rank would hold all states, which is {stage}=0 "
                f"without {self._key('shard_size')}; set {stage}=1, 2 or 3 and a size of 2 or more, or remove it"
            )
        for name, value, reason in _NOT_REPLICATED:
            if getattr(self, name) == value:
                raise ConfigError(f"{entry} with {self._entry(name)}: {reason}; remove one of the two")
        if self.reproducible and size & (size - 1):
            below = 1 << size.bit_length() - 1
            raise ConfigError(
                f"{entry} with {self._key('reproducible')}=true: gradients are summed along one binary tree, of which "
                f"the ranks of a replica hold a whole subtree only if their number is a power of two; set "
                f"{self._key('shard_size')}={below} or {2 * below}, or remove one of the two"
            )

    def check_ranks(self, world_size: int) -> None:
        """Raises ``ConfigError`` unless replicas of ``shard_size`` ranks make up ``world_size``."""
        size = self.shard_size
        if size is not None and world_size % size:
            divisors = [str(n) for n in range(2, world_size + 1) if world_size % n == 0]
            sizes = f"set it to {' or '.join(divisors)}, or remove it" if divisors else "remove it"
            raise ConfigError(f"{self._entry('shard_size')} does not divide the number of ranks, {world_size}; {sizes}")


@dataclass(frozen=True, kw_only=True)
class FSDP2(EngineConfig):
    """PyTorch's ``fully_shard`` with dtrain's vote; stage 2 keeps weights unsharded until a step's last backward."""

    name: str = option("fsdp2")
    sharding_units: Any = setting("auto", _SHARDING_UNITS, kind=str | list[str], what=_PATTERNS)


@dataclass(frozen=True, kw_only=True)
class DeepSpeed(EngineConfig):
    """DeepSpeed's ZeRO with dtrain's vote."""

    name: str = option("deepspeed")
    offload: str = one_of("none", "cpu", doc=_OFFLOAD)

    def _check(self) -> None:
        super()._check()
        if self.offload == "cpu" and self.zero_stage == 0:
            raise ConfigError(
                f"{self._entry('offload')} with {self._entry('zero_stage')}: DeepSpeed offloads only what ZeRO shards, "
                f"and stage 0 shards nothing; set {self._key('zero_stage')}=1, 2 or 3, or remove it"
            )


@dataclass(frozen=True, kw_only=True)
class DDP(EngineConfig):
    """PyTorch's DistributedDataParallel: FP32 weights on every rank, cast by autocast."""

    name: str = option("ddp")
    zero_stage: int = between(0, 0, 3, _ZERO_STAGE)


ENGINES: dict[str, type[EngineConfig]] = {"native": Native, "fsdp2": FSDP2, "deepspeed": DeepSpeed, "ddp": DDP}
"""Records by the name that ``engine=`` takes."""


def engines_with(setting: str) -> list[str]:
    """Returns the names of the engines whose record has a field ``setting``."""
    return [name for name, record in ENGINES.items() if setting in settings_of(record)]


def settings_of(record: type[EngineConfig]) -> list[str]:
    """Returns the names of an engine's settings."""
    return [item.name for item in fields(record) if item.name != "name"]
