"""The table of what each engine can do: it checks configurations, fills the documents, and is tested to be true.

Nothing here imports torch, so that an unsupported configuration is refused at once, before any process group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, TypeAlias

from dtrain.config.fields import written
from dtrain.errors import ConfigError, nearest

Setting: TypeAlias = Any
"""Value of one key: a name, a number, or a sequence of name patterns."""


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
        held: the same for :func:`dtrain.precision.contract.resolve`.
        accumulation: where the gradients of micro-batches are summed; the sums are FP32 in every engine.
        weighting: what a micro-batch's weight multiplies, in FP32.
        torch: the oldest PyTorch that it runs on.
        package: a package that it needs besides PyTorch.
        supported: supported values by key; a key that is absent takes every value of :data:`SETTINGS`.
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
        if _release(version("torch")) < _release(self.torch):
            return f"needs torch {self.torch} or later; this is {version('torch')}"
        return ""

    def values(self, key: str) -> tuple[Setting, ...]:
        """The supported values of ``key``; empty: any."""
        return self.supported[key].values if key in self.supported else SETTINGS[key]

    def supports(self, key: str, value: Setting) -> bool:
        """Whether the engine supports ``value`` for ``key``, all other keys aside."""
        values = self.values(key)
        return not values or value in values


SETTINGS: dict[str, tuple[Setting, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "precision": ("auto", "fp32", "tf32", "bf16", "fp16", "fp8"),
    "rules": ("fp32", "bf16", "fp16", "fp8"),
    "device_type": ("cpu", "cuda"),
    "reproducible": (False, True),
    "reduce_dtype": ("auto", "fp32", "bf16", "fp16"),
    "compile": ("auto", False, True),
    "offload": ("none", "cpu"),
    "groups": (),
    "grad_reduction": ("auto", "all_reduce", "reduce_scatter"),
    "reshard_after_forward": (True, False),
    "prefetch": (),
    "keep_gathered": (),
}
"""Every key in which engines differ, with all values that any engine supports; empty: its reader checks it."""

_NATIVE_ONLY = {
    "compile": SupportedValues(
        ("auto", False),
        "its update is torch's fused AdamW kernel; the compiled one is written for the native engine's arena",
    ),
    "grad_reduction": SupportedValues(("auto",), "only the native engine has two ways to sum at stage 1"),
    "prefetch": SupportedValues((1,), "the library decides how far ahead weights are unsharded"),
    "keep_gathered": SupportedValues(((),), "the library decides which weights stay unsharded"),
}
_NO_OFFLOAD = SupportedValues(("none",), "masters and moments lie on the rank's own device")
_FP32_REDUCTION = SupportedValues(
    ("auto", "fp32"), "its gradients are summed by the collective, and sums are always FP32"
)

CAPABILITIES: dict[str, Capabilities] = {
    "native": Capabilities(
        summary="dtrain's own sharding",
        weights="compute dtype, norms FP32, FP8 modules FP8",
        held="quantized",
        accumulation="stages 0, 1: on each rank; 2, 3: over the ranks, each micro-batch",
        supported={"offload": _NO_OFFLOAD},
    ),
    "fsdp2": Capabilities(
        summary="PyTorch's fully_shard",
        weights="compute dtype, norms FP32",
        accumulation="over the ranks, each micro-batch",
        supported=_NATIVE_ONLY
        | {
            "zero_stage": SupportedValues((2, 3), "fully_shard shards gradients and masters always"),
            "reproducible": SupportedValues(
                (False,),
                "it sums each micro-batch over the ranks first, in an order that depends on the number of ranks",
            ),
            "reduce_dtype": _FP32_REDUCTION,
            "offload": _NO_OFFLOAD,
            "reshard_after_forward": SupportedValues(
                (True,), "zero_stage decides it: 2 keeps the weights until backward, 3 frees them"
            ),
        },
    ),
    "deepspeed": Capabilities(
        summary="DeepSpeed ZeRO",
        weights="compute dtype, norms compute in FP32; stage 0: FP32, cast by autocast",
        held="compute",
        accumulation="stages 0, 1: on each rank; 2, 3: over the ranks, each micro-batch",
        weighting="the loss",
        package="deepspeed",
        supported=_NATIVE_ONLY
        | {
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
            "groups": SupportedValues(("auto",), "DeepSpeed shards flat buffers and parameters, not groups of modules"),
            "reshard_after_forward": SupportedValues((True,), "DeepSpeed frees weights at stage 3 by its own rules"),
        },
        unsupported=(
            UnsupportedCombination(
                {"precision": "fp16", "device_type": "cpu"},
                "DeepSpeed refuses FP16 on CPUs, except a few with FP16 arithmetic",
            ),
            UnsupportedCombination(
                {"zero_stage": 0, "offload": "cpu"},
                "DeepSpeed offloads only what ZeRO shards, and stage 0 shards nothing",
            ),
        ),
    ),
    "ddp": Capabilities(
        summary="PyTorch's DistributedDataParallel",
        weights="FP32, cast by autocast in each forward",
        held="fp32",
        accumulation="on each rank",
        supported=_NATIVE_ONLY
        | {
            "zero_stage": SupportedValues((0,), "every rank holds the whole model and its optimizer state"),
            "reproducible": SupportedValues(
                (False,),
                "each rank sums its own micro-batches first, so the order depends on the number of ranks",
            ),
            "reduce_dtype": _FP32_REDUCTION,
            "offload": _NO_OFFLOAD,
            "groups": SupportedValues(("auto",), "DistributedDataParallel forms its own buckets"),
            "reshard_after_forward": SupportedValues((True,), "nothing is sharded"),
        },
    ),
}
"""Engines by the name that ``engine=`` takes."""


def check(engine: str, *, format_key: Callable[[str], str] = str, **settings: Setting) -> None:
    """Checks that an engine supports some settings.

    Args:
        engine: a key of :data:`CAPABILITIES`.
        format_key: writes a key as the caller's user knows it, for messages.
        **settings: values by keys of :data:`SETTINGS`; one that is not known yet, such as ``device_type`` before a
            device is chosen, is omitted.

    Raises:
        ConfigError: an unknown engine or value; an unsupported value, with the reason and the alternatives; or a
            requirement of the engine that is not installed.
    """
    if engine not in CAPABILITIES:
        raise ConfigError(f"engine '{engine}' is not one of {', '.join(CAPABILITIES)}{nearest(engine, CAPABILITIES)}")
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    capabilities = CAPABILITIES[engine]
    for key, value in given.items():
        known = SETTINGS[key]
        if known and value not in known:
            hint = nearest(value, known) if isinstance(value, str) else ""
            raise ConfigError(f"{format_key(key)}={value} is not one of {', '.join(map(written, known))}{hint}")
        if not capabilities.supports(key, value):
            raise _unsupported(engine, {key: value}, capabilities.supported[key].reason, format_key)
    for combination in capabilities.unsupported:
        if all(key in given and given[key] == value for key, value in combination.settings.items()):
            raise _unsupported(engine, combination.settings, combination.reason, format_key)
    if missing_requirement := capabilities.missing_requirement:
        raise ConfigError(f"engine={engine} {missing_requirement}")


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
    name = format_key(key)
    uses = [f"{name}={_listed(values)}"] if values and () not in values else [f"no {name}"]
    uses += [f"engine={_listed(others)}"] if (others := supporting_engines(settings)) else []
    return ConfigError(f"engine={engine} cannot do {words}: {reason}; use {', or '.join(uses)}")


def _release(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in number.split(".")[:2])


def _listed(values: Any) -> str:
    *most, last = map(written, values)
    return f"{', '.join(most)} or {last}" if most else last


def table() -> list[tuple[str, ...]]:
    """Rows that compare the engines: a title, and a cell for each of :data:`CAPABILITIES`."""
    engines = CAPABILITIES.values()

    def yes_or_no(key: str, value: Setting) -> list[str]:
        return ["yes" if engine.supports(key, value) else "no" for engine in engines]

    return [
        ("what it is", *(engine.summary for engine in engines)),
        ("`zero_stage`", *(", ".join(map(str, engine.values("zero_stage"))) for engine in engines)),
        ("`precision` (tf32 on GPUs)", *(_precisions(engine) for engine in engines)),
        ("`precision.rules`", *(", ".join(engine.values("rules")) for engine in engines)),
        ("weights in a forward", *(engine.weights for engine in engines)),
        ("micro-batches summed in FP32", *(engine.accumulation for engine in engines)),
        ("a micro-batch's weight multiplies", *(engine.weighting for engine in engines)),
        ("`reduce_dtype`", *(_dtypes(engine.values("reduce_dtype")) for engine in engines)),
        ("`reproducible`", *yes_or_no("reproducible", True)),
        ("`groups` by name patterns", *yes_or_no("groups", ("*",))),
        ("`optim.compile`", *yes_or_no("compile", True)),
        ("`offload`", *("cpu, stages 1 to 3" if engine.supports("offload", "cpu") else "no" for engine in engines)),
        ("checkpoints", *("from any engine, any number of ranks" for _ in engines)),
        ("needs torch from", *(engine.torch for engine in engines)),
        ("needs a package", *(engine.package or "no" for engine in engines)),
    ]


def reasons() -> list[tuple[str, str, str]]:
    """Triples (engine, ``key=value``, reason) of everything that an engine does not support."""
    rows = []
    for name, capabilities in CAPABILITIES.items():
        for key, supported in capabilities.supported.items():
            refused = [value for value in SETTINGS[key] if value not in supported.values]
            rows.append((name, f"{key}={_listed(refused)}" if refused else key, supported.reason))
        for combination in capabilities.unsupported:
            words = " with ".join(f"{key}={written(value)}" for key, value in combination.settings.items())
            rows.append((name, words, combination.reason))
    return rows


def _dtypes(values: tuple[Setting, ...]) -> str:
    return ", ".join(value for value in values if value != "auto")


def _precisions(engine: Capabilities) -> str:
    excluded = [
        combination.settings["precision"]
        for combination in engine.unsupported
        if combination.settings.get("device_type") == "cpu"
    ]
    names = _dtypes(tuple(name for name in engine.values("precision") if name not in excluded))
    return f"{names}; {', '.join(excluded)} on GPUs" if excluded else names
