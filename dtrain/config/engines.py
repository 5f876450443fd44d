"""The engines' records: ``dtrain.Native(zero_stage=3)`` in a script, the keys of ``engine`` on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from dtrain.config.capabilities import check_support
from dtrain.config.fields import CheckedRecord, at_least, between, one_of, option, setting, written
from dtrain.errors import ConfigError

_ZERO_STAGE = "What is sharded: 0 nothing, 1 masters and moments, 2 also gradients, 3 also weights."
_SHARDING_UNITS = (
    "Name patterns of modules, each sharded as a unit; auto: each element of an outermost ModuleList or Sequential."
)
_OFFLOAD = "Memory that holds masters and moments, with native also main grads: the rank's device, or the host's."
_PATTERNS = "auto or a list of name patterns of modules, such as [blocks.*]; each module is sharded as a unit"


@dataclass(frozen=True)
class Exclusion:
    """Two settings that exclude each other, each as ``key=value``, or as ``key`` for any value but null.

    Attributes:
        reason: a clause that follows a colon; ``{0}`` and ``{1}`` stand for the keys, as in ``remedy``.
        condition: what else must be so, such as of the model.
    """

    setting: str
    other: str
    reason: str
    remedy: str = "remove one of the two"
    condition: str | None = None

    def check(self, values: Mapping[str, Any], format_key: Callable[[str], str]) -> None:
        """Raises ``ConfigError`` if ``values`` has both settings under the condition."""
        if all(_has(values, text) for text in (self.setting, self.other, self.condition) if text):
            keys = [text.partition("=")[0] for text in (self.setting, self.other)]
            words = " with ".join(f"{format_key(key)}={written(values[key])}" for key in keys)
            reason, remedy = (text.format(*map(format_key, keys)) for text in (self.reason, self.remedy))
            raise ConfigError(f"{words}: {reason}; {remedy}")


def _has(values: Mapping[str, Any], setting: str) -> bool:
    key, equals, value = setting.partition("=")
    return values.get(key) is not None and (not equals or written(values[key]) == value)


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

    exclusions: ClassVar[tuple[Exclusion, ...]] = ()
    uses_default_process_group: ClassVar[bool] = True  # as the libraries below all engines but native do

    def _check(self) -> None:
        check_support(
            self.name,
            format_key=self._key,
            zero_stage=self.zero_stage,
            reproducible=self.reproducible,
            reduce_dtype=self.reduce_dtype,
        )
        self.check_exclusions(self._key)

    def check_exclusions(self, format_key: Callable[[str], str] = str, **others: Any) -> None:
        """Raises ``ConfigError`` for an exclusion among its settings, those of other records, and facts of the model.

        What is not known yet is left out of ``others``; ``format_key`` writes a key as the caller's user knows it.
        """
        values = {name: getattr(self, name) for name in settings_of(type(self))} | others
        for exclusion in self.exclusions:
            exclusion.check(values, format_key)

    def check_ranks(self, world_size: int) -> None:
        """Raises ``ConfigError`` unless the engine can train on ``world_size`` ranks."""

    def as_native(self) -> Native:
        """Returns the record of the native engine that shards the same states."""
        return Native(zero_stage=self.zero_stage)

    @property
    def units_have_hooks(self) -> bool:
        """Whether hooks on the modules of ``sharding_units`` unshard their weights."""
        return self.zero_stage == 3

    # settings of some engines, with the values that the others have in effect

    @property
    def sharding_units(self) -> Any:
        return []

    @property
    def shard_size(self) -> int | None:
        return None

    @property
    def offload(self) -> str:
        return "none"

    @property
    def master(self) -> str:
        return "full"

    @property
    def graph(self) -> bool:
        return False

    @property
    def grad_dtype(self) -> str:
        return "fp32"


_SHARD = "set {1}=1, 2 or 3, or remove it"
_FP8_SCALES = "scales of FP8 weights are measured from masters on the device"
_NOT_SHARED = (
    "every rank would hold all states, which is {1}=0 without {0}",
    "set {1}=1, 2 or 3 and a size of 2 or more, or remove it",
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
    graph: bool = setting(
        False, "On a GPU, capture whole steps as CUDA graphs and replay them, with the vote and the skip inside."
    )

    uses_default_process_group = False
    exclusions = (
        Exclusion("graph=true", "offload=cpu", "a step on the host cannot be captured"),
        Exclusion("graph=true", "grad_dtype=bf16", "the host chooses the random bits of each step's rounded sums"),
        Exclusion("graph=true", "optimizer=torch", "torch's class updates by numbers of the host"),
        Exclusion("graph=true", "optimizer=adamw-bf16", "the host chooses the random bits of each step's rounding"),
        Exclusion(
            *("offload=cpu", "zero_stage=0"),
            "every rank would hold all masters and moments in the memory of its host",
            _SHARD,
        ),
        Exclusion("offload=cpu", "master=remainder", "the weight, which is half of each master, is on the device"),
        Exclusion("offload=cpu", "grad_dtype=bf16", "the host sums main grads in FP32"),
        Exclusion(
            *("offload=cpu", "reproducible=true"),
            "the gradients of all ranks would have to cross to the host one by one to be summed in order",
        ),
        Exclusion("offload=cpu", "precision=fp8", _FP8_SCALES),
        Exclusion("offload=cpu", "rules=fp8", _FP8_SCALES),
        Exclusion("offload=cpu", "optimizer=muon", "whole matrices are exchanged and transformed on the device"),
        Exclusion("shard_size=1", "zero_stage", *_NOT_SHARED),
        Exclusion("shard_size", "zero_stage=0", *_NOT_SHARED),
        Exclusion("shard_size", "offload=cpu", "main grads on the host cannot be summed across replicas by the device"),
        Exclusion("shard_size", "grad_dtype=bf16", "sums across replicas are FP32"),
        Exclusion(
            *("grad_dtype=bf16", "precision"),
            "no trained parameter has BF16 gradients, and others would be rounded",
            "use {1}=bf16, or {0}=fp32",
            condition="has_bf16_gradients=false",
        ),
        Exclusion(
            *("master=remainder", "precision"),
            "no trained parameter has a BF16 weight, so none can be a half of its FP32 master",
            "use {1}=bf16, or {0}=full",
            condition="has_bf16_weights=false",
        ),
        Exclusion(
            *("master=remainder", "optimizer=torch"),
            "torch's class updates parameters in memory, which these masters have not",
            "use one of dtrain's optimizers, or {0}=full",
        ),
    )

    def _check(self) -> None:
        super()._check()
        size = self.shard_size
        if self.reproducible and size is not None and size & (size - 1):
            below = 1 << size.bit_length() - 1
            raise ConfigError(
                f"{self._entry('shard_size')} with {self._key('reproducible')}=true: gradients are summed along one "
                f"binary tree, of which the ranks of a replica hold a whole subtree only if their number is a power of "
                f"two; set {self._key('shard_size')}={below} or {2 * below}, or remove one of the two"
            )
        if self.zero_stage == 3:
            return
        stage = self._key("zero_stage")
        for name, default in (("reshard_after_forward", True), ("prefetch", 1), ("keep_gathered", [])):
            if getattr(self, name) != default:
                raise ConfigError(
                    f"{self._entry(name)} is used with {stage}=3 only, and {self._entry('zero_stage')}; "
                    f"remove it, or set {stage}=3"
                )

    def as_native(self) -> Native:
        return self

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

    units_have_hooks = True


@dataclass(frozen=True, kw_only=True)
class DeepSpeed(EngineConfig):
    """DeepSpeed's ZeRO (Rajbhandari et al., 2020) with dtrain's vote."""

    name: str = option("deepspeed")
    offload: str = one_of("none", "cpu", doc=_OFFLOAD)

    exclusions = (
        Exclusion(
            *("offload=cpu", "zero_stage=0"),
            "DeepSpeed offloads only what ZeRO shards, and stage 0 shards nothing",
            _SHARD,
        ),
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
