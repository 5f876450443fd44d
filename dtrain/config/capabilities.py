"""The table of what each engine can do, which is tested to be true.

What only one engine has is a field of its record (``dtrain.config.engines``), which has what the field excludes.

Nothing here imports torch, so that an unsupported configuration is refused at once, before any process group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any, TypeAlias

from dtrain.config.fields import written
from dtrain.errors import ConfigError, nearest

Setting: TypeAlias = Any
"""Value of one key: a name, a number, or true or false."""
_version = cache(metadata.version)  # it parses a file, which takes as long as the start of a small engine


@dataclass(frozen=True)
class SupportedValues:
    """The values of one key that an engine supports, if not all.

    Attributes:
        reason: why the engine supports no other, as a clause that follows a colon.
    """

    values: tuple[Setting, ...]
    reason: str


@dataclass(frozen=True)
class UnsupportedCombination:
    """Values that an engine supports one by one but not together.

    Attributes:
        settings: the values by key; the message proposes to change the first.
    """

    settings: Mapping[str, Setting]
    reason: str


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of one engine.

    Attributes:
        summary: a description in a few words.
        weights: dtype of the weights that a forward reads, for people.
        held: the same for ``dtrain.precision.contract.resolve``.
        accumulation: where the gradients of micro-batches are summed; the sums are FP32 in every engine.
        weighting: what a micro-batch's weight multiplies; in FP32 unless it says another dtype.
        torch: the oldest PyTorch that it runs on.
        package: a package that it needs besides PyTorch.
        supported: supported values by key; a key that is absent takes every value of ``SETTINGS``.
    """

    summary: str
    weights: str
    accumulation: str
    held: str = "policy"
    weighting: str = "gradients"
    torch: str = "2.11"
    package: str | None = None
    supported: Mapping[str, SupportedValues] = field(default_factory=dict)
    unsupported: tuple[UnsupportedCombination, ...] = ()

    @property
    def casts_each_time(self) -> bool:
        """Whether FP8 products cast their weight in each forward and backward instead of once per step."""
        return self.held == "policy"

    @property
    def missing_requirement(self) -> str:
        """The requirement that this machine lacks, as a clause; empty if there is none."""
        if self.package is not None and find_spec(self.package) is None:
            return f"needs the package {self.package}, which is not installed: pip install {self.package}"
        if _release(_version("torch")) < _release(self.torch):
            return f"needs torch {self.torch} or later; this is {_version('torch')}"
        return ""

    def values(self, key: str) -> tuple[Setting, ...]:
        """The supported values of ``key``."""
        return self.supported[key].values if key in self.supported else SETTINGS[key]

    def supports(self, key: str, value: Setting) -> bool:
        """Whether the engine supports ``value`` for ``key``, all other keys aside."""
        return value in self.values(key)


SETTINGS: dict[str, tuple[Setting, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "precision": ("auto", "fp32", "tf32", "bf16", "fp16", "fp8"),
    "rules": ("fp32", "bf16", "fp16", "fp8"),
    "device_type": ("cpu", "cuda"),
    "reproducible": (False, True),
    "reduce_dtype": ("auto", "fp32", "bf16", "fp16"),
    "compile": ("auto", False, True),
    "optimizer": ("adamw", "adamw-bf16", "adam", "sgd", "lion", "muon", "torch"),
    "replay_every": (0, "above 0"),
    "compile_blocks": ("none", "blocks", "auto"),
}
"""Every key of several engines in which they differ, with all values that any engine supports."""

_FUSED_UPDATE = SupportedValues(
    ("auto", False),
    "it updates lists of tensors; the compiled update is written for the native engine's arena",
)
_FP32_REDUCTION = SupportedValues(
    ("auto", "fp32"), "its gradients are summed by the collective, and sums are always FP32"
)

CAPABILITIES: dict[str, Capabilities] = {
    "native": Capabilities(
        summary="dtrain's own sharding",
        weights="compute dtype, norms FP32, FP8 modules FP8",
        held="quantized",
        accumulation="stages 0, 1: on each rank; 2, 3: over the ranks, each micro-batch",
    ),
    "fsdp2": Capabilities(
        summary="PyTorch's fully_shard",
        weights="compute dtype, norms FP32",
        accumulation="over the ranks, each micro-batch",
        supported={
            "compile": _FUSED_UPDATE,
            "zero_stage": SupportedValues((2, 3), "fully_shard shards gradients and masters always"),
            "reproducible": SupportedValues(
                (False,),
                "it sums each micro-batch over the ranks first, in an order that depends on the number of ranks",
            ),
            "reduce_dtype": _FP32_REDUCTION,
        },
    ),
    "deepspeed": Capabilities(
        summary="DeepSpeed ZeRO",
        weights="compute dtype, norms compute in FP32; stage 0: FP32, cast by autocast",
        held="compute",
        accumulation="stages 0, 1: on each rank; 2, 3: over the ranks, each micro-batch",
        weighting="gradients, in the weights' dtype",
        package="deepspeed",
        supported={
            "compile": _FUSED_UPDATE,
            "precision": SupportedValues(
                ("auto", "fp32", "tf32", "bf16", "fp16"), "ZeRO holds all weights in one dtype, without scales"
            ),
            "rules": SupportedValues(
                ("fp32",), "ZeRO holds all weights in one dtype; a module can only compute on FP32 copies"
            ),
            "reproducible": SupportedValues(
                (False,), "DeepSpeed sums buckets in an order that depends on the number of ranks"
            ),
            "reduce_dtype": _FP32_REDUCTION,
            "optimizer": SupportedValues(
                ("adamw", "adamw-bf16", "adam", "sgd", "lion", "torch"),
                "DeepSpeed updates one partition after the other, so no whole matrix is at hand",
            ),
            "replay_every": SupportedValues(
                (0,), "DeepSpeed would reduce the gradients of a backward that is only compared"
            ),
        },
        unsupported=(
            UnsupportedCombination(
                {"precision": "fp16", "device_type": "cpu"},
                "DeepSpeed refuses FP16 on CPUs, except a few with FP16 arithmetic",
            ),
            *(
                UnsupportedCombination(
                    {"compile_blocks": mode, "zero_stage": 3},
                    "DeepSpeed gathers the weights in hooks of the modules inside a block, which would be compiled too",
                )
                for mode in ("blocks", "auto")
            ),
        ),
    ),
    "ddp": Capabilities(
        summary="PyTorch's DistributedDataParallel",
        weights="FP32, cast by autocast in each forward",
        held="fp32",
        accumulation="on each rank",
        supported={
            "compile": _FUSED_UPDATE,
            "zero_stage": SupportedValues((0,), "every rank holds the whole model and its optimizer state"),
            "reproducible": SupportedValues(
                (False,),
                "each rank sums its own micro-batches first, so the order depends on the number of ranks",
            ),
            "reduce_dtype": _FP32_REDUCTION,
        },
    ),
}
"""Engines by the name that ``engine=`` takes."""


def check(engine: str, *, format_key: Callable[[str], str] = str, **settings: Setting) -> None:
    """Checks that an engine supports some settings, and that this machine has what it needs.

    Raises:
        ConfigError: as ``check_support``; or a requirement of the engine is not installed.
    """
    check_support(engine, format_key=format_key, **settings)
    if missing_requirement := CAPABILITIES[engine].missing_requirement:
        raise ConfigError(f"engine={engine} {missing_requirement}")


def check_support(engine: str, *, format_key: Callable[[str], str] = str, **settings: Setting) -> None:
    """Checks that an engine supports some settings.

    Args:
        engine: a key of ``CAPABILITIES``.
        format_key: writes a key as the caller's user knows it, for messages.
        **settings: values by keys of ``SETTINGS``; one that is not known yet, such as ``device_type`` before a
            device is chosen, is omitted.

    Raises:
        ConfigError: an unknown engine or value; or an unsupported value, with the reason and the alternatives.
    """
    if engine not in CAPABILITIES:
        raise ConfigError(f"engine '{engine}' is not one of {', '.join(CAPABILITIES)}{nearest(engine, CAPABILITIES)}")
    capabilities = CAPABILITIES[engine]
    for key, value in settings.items():
        if value not in SETTINGS[key]:
            hint = nearest(value, SETTINGS[key]) if isinstance(value, str) else ""
            raise ConfigError(f"{format_key(key)}={value} is not one of {', '.join(map(written, SETTINGS[key]))}{hint}")
        if not capabilities.supports(key, value):
            raise _unsupported(engine, {key: value}, capabilities.supported[key].reason, format_key)
    for combination in capabilities.unsupported:
        if combination.settings.items() <= settings.items():
            raise _unsupported(engine, combination.settings, combination.reason, format_key)


def supporting_engines(settings: Mapping[str, Setting]) -> list[str]:
    """Names of the engines that support these values together."""
    return [
        name
        for name, capabilities in CAPABILITIES.items()
        if all(capabilities.supports(key, value) for key, value in settings.items())
        and not any(combination.settings.items() <= settings.items() for combination in capabilities.unsupported)
    ]


def _unsupported(
    engine: str, settings: Mapping[str, Setting], reason: str, format_key: Callable[[str], str]
) -> ConfigError:
    key, value = next(iter(settings.items()))
    values = [other for other in CAPABILITIES[engine].values(key) if other != value]
    words = " with ".join(f"{format_key(name)}={written(setting)}" for name, setting in settings.items())
    uses = [f"{format_key(key)}={listed(values)}"]
    uses += [f"engine={listed(others)}"] if (others := supporting_engines(settings)) else []
    return ConfigError(f"engine={engine} cannot do {words}: {reason}; use {', or '.join(uses)}")


def _release(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in number.split(".")[:2])


def listed(values: Any) -> str:
    """The values in words: ``fp32, bf16 or fp16``."""
    *most, last = map(written, values)
    return f"{', '.join(most)} or {last}" if most else last
