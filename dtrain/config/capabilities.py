"""What each engine can do, as data: one table checks a configuration, fills the documents, and is tested to be true.

Nothing here imports torch, so that a configuration is refused at once, before any process group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, TypeAlias

from dtrain.errors import ConfigError, nearest

Setting: TypeAlias = Any
"""The value of one key: a word, a number, or a sequence of name patterns."""


@dataclass(frozen=True)
class Limit:
    """The values of one key that an engine takes, where it does not take all.

    Attributes:
        values: what it takes.
        reason: why nothing else, as a clause that follows a colon.
    """

    values: tuple[Setting, ...]
    reason: str


@dataclass(frozen=True)
class Exclusion:
    """Values that an engine takes one by one but not together.

    Attributes:
        settings: by key; the first is the one to change.
        reason: as in :class:`Limit`.
    """

    settings: Mapping[str, Setting]
    reason: str


@dataclass(frozen=True)
class Capabilities:
    """One engine.

    Attributes:
        summary: what it is, in a few words.
        weights: the dtype of the weights that a forward reads.
        held: the same as :meth:`dtrain.precision.policy.PrecisionPolicy.resolve` takes it.
        accumulation: where the gradients of micro-batches are summed; the sums are FP32 in every engine.
        weighting: what a micro-batch's weight multiplies, in FP32.
        torch: the oldest PyTorch that it runs on.
        package: what it needs beside it.
        limits: by key; a key that is not named takes every value of :data:`SETTINGS`.
        exclusions: combinations that it does not take.
    """

    summary: str
    weights: str
    accumulation: str
    held: str = "policy"
    weighting: str = "gradients"
    torch: str = "2.11"
    package: str | None = None
    limits: Mapping[str, Limit] = field(default_factory=dict)
    exclusions: tuple[Exclusion, ...] = ()

    @property
    def casts_each_time(self) -> bool:
        """Whether FP8 products cast their weight in each forward and backward, and not once a step."""
        return self.held == "policy"

    @property
    def missing_requirement(self) -> str:
        """What is missing here that it needs; empty where nothing is."""
        if self.package is not None and find_spec(self.package) is None:
            return f"needs the package {self.package}, which is not installed: pip install {self.package}"
        if _release(version("torch")) < _release(self.torch):
            return f"needs torch {self.torch} or later; this is {version('torch')}"
        return ""

    @property
    def is_installed(self) -> bool:
        """Whether all that it needs is here."""
        return not self.missing_requirement

    def values(self, key: str) -> tuple[Setting, ...]:
        """What it takes for ``key``; empty: anything."""
        return self.limits[key].values if key in self.limits else SETTINGS[key]

    def takes(self, key: str, value: Setting) -> bool:
        """Whether it takes ``value`` for ``key``, all else aside."""
        values = self.values(key)
        return not values or value in values


SETTINGS: dict[str, tuple[Setting, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "precision": ("auto", "fp32", "tf32", "bf16", "fp16", "fp8"),
    "rules": ("fp32", "bf16", "fp16", "fp8"),
    "weight_scale": ("current", "delayed"),
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
"""Every key that engines differ in, with all values that any of them takes; empty: checked by its reader."""

_NATIVE_ONLY = {
    "weight_scale": Limit(
        ("current",), "only the native engine casts weights to FP8 in its update, where a scale known before helps"
    ),
    "compile": Limit(
        ("auto", False),
        "its update is torch's fused AdamW kernel; the compiled one is written for the native engine's arena",
    ),
    "grad_reduction": Limit(("auto",), "only the native engine has two ways to sum at stage 1"),
    "prefetch": Limit((1,), "the library below decides how far ahead weights are gathered"),
    "keep_gathered": Limit(((),), "the library below decides which weights stay gathered"),
}
_NO_OFFLOAD = Limit(("none",), "masters and moments lie on the rank's own device")
_FP32_WIRE = Limit(("auto", "fp32"), "its gradients are summed on the way, and sums are FP32 always")

CAPABILITIES: dict[str, Capabilities] = {
    "native": Capabilities(
        summary="dtrain's own sharding",
        weights="compute dtype, norms FP32, FP8 modules FP8",
        held="quantized",
        accumulation="stages 0, 1: on each rank; 2, 3: over the ranks, each micro-batch",
        limits={"offload": _NO_OFFLOAD},
    ),
    "fsdp2": Capabilities(
        summary="PyTorch's fully_shard",
        weights="compute dtype, norms FP32",
        accumulation="over the ranks, each micro-batch",
        torch="2.13",
        limits=_NATIVE_ONLY
        | {
            "zero_stage": Limit((2, 3), "fully_shard shards gradients and masters always"),
            "reproducible": Limit(
                (False,),
                "it adds up each micro-batch over the ranks first, an order that follows the number of ranks",
            ),
            "reduce_dtype": _FP32_WIRE,
            "offload": _NO_OFFLOAD,
            "reshard_after_forward": Limit(
                (True,), "zero_stage says it: 2 keeps the weights until backward, 3 frees them"
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
        limits=_NATIVE_ONLY
        | {
            "precision": Limit(
                ("auto", "fp32", "tf32", "bf16", "fp16"), "ZeRO holds all weights in one dtype, without scales"
            ),
            "rules": Limit(("fp32",), "ZeRO holds all weights in one dtype; a module can only compute on FP32 copies"),
            "reproducible": Limit((False,), "DeepSpeed adds up buckets in an order that follows the number of ranks"),
            "reduce_dtype": _FP32_WIRE,
            "groups": Limit(("auto",), "DeepSpeed shards flat buffers and parameters, not groups of modules"),
            "reshard_after_forward": Limit((True,), "DeepSpeed's stage 3 frees weights by its own rules"),
        },
        exclusions=(
            Exclusion(
                {"precision": "fp16", "device_type": "cpu"},
                "DeepSpeed refuses FP16 on CPUs, but for a few with FP16 arithmetic",
            ),
            Exclusion(
                {"zero_stage": 0, "offload": "cpu"}, "DeepSpeed offloads what ZeRO shards, and stage 0 shards nothing"
            ),
        ),
    ),
    "ddp": Capabilities(
        summary="PyTorch's DistributedDataParallel",
        weights="FP32, cast by autocast in each forward",
        held="fp32",
        accumulation="on each rank",
        limits=_NATIVE_ONLY
        | {
            "zero_stage": Limit((0,), "every rank holds the whole model and its optimizer state"),
            "reproducible": Limit(
                (False,), "each rank adds up its own micro-batches first, an order that follows the number of ranks"
            ),
            "reduce_dtype": _FP32_WIRE,
            "offload": _NO_OFFLOAD,
            "groups": Limit(("auto",), "DistributedDataParallel makes buckets of its own"),
            "reshard_after_forward": Limit((True,), "nothing is sharded"),
        },
    ),
}
"""By the name that ``engine=`` takes."""


def check(engine: str, *, format_key: Callable[[str], str] = str, **settings: Setting) -> None:
    """Refuses what an engine cannot do.

    Args:
        engine: a key of :data:`CAPABILITIES`.
        format_key: how whoever asks writes a key, for messages.
        **settings: by keys of :data:`SETTINGS`; one that is not known yet, such as ``device_type`` on the command line
            of a machine that has not been looked at, is left out.

    Raises:
        ConfigError: an unknown engine or value; the reason why this engine does not take this value, and what to use
            instead; or what it needs and is not installed.
    """
    if engine not in CAPABILITIES:
        raise ConfigError(f"engine '{engine}' is not one of {', '.join(CAPABILITIES)}{nearest(engine, CAPABILITIES)}")
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    capabilities = CAPABILITIES[engine]
    for key, value in given.items():
        known = SETTINGS[key]
        if known and value not in known:
            hint = nearest(value, known) if isinstance(value, str) else ""
            raise ConfigError(f"{format_key(key)}={value} is not one of {', '.join(map(_word, known))}{hint}")
        if not capabilities.takes(key, value):
            raise _unsupported(engine, {key: value}, capabilities.limits[key].reason, format_key)
    for exclusion in capabilities.exclusions:
        if all(key in given and given[key] == value for key, value in exclusion.settings.items()):
            raise _unsupported(engine, exclusion.settings, exclusion.reason, format_key)
    if missing_requirement := capabilities.missing_requirement:
        raise ConfigError(f"engine={engine} {missing_requirement}")


def supporting_engines(settings: Mapping[str, Setting]) -> list[str]:
    """The engines that take these values together."""
    return [
        name
        for name, capabilities in CAPABILITIES.items()
        if all(capabilities.takes(key, value) for key, value in settings.items())
        and not any(exclusion.settings.items() <= settings.items() for exclusion in capabilities.exclusions)
    ]


def _unsupported(
    engine: str, settings: Mapping[str, Setting], reason: str, format_key: Callable[[str], str]
) -> ConfigError:
    key, value = next(iter(settings.items()))
    values = [other for other in CAPABILITIES[engine].values(key) if other != value]
    words = " with ".join(f"{format_key(name)}={_word(setting)}" for name, setting in settings.items())
    name = format_key(key)
    uses = [f"{name}={_listed(values)}"] if values and () not in values else [f"no {name}"]
    uses += [f"engine={_listed(others)}"] if (others := supporting_engines(settings)) else []
    return ConfigError(f"engine={engine} cannot do {words}: {reason}; use {', or '.join(uses)}")


def _release(number: str) -> tuple[int, ...]:
    """Major and minor number of a version."""
    return tuple(int(part) for part in number.split(".")[:2])


def _word(value: Setting) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _listed(values: Any) -> str:
    *most, last = map(_word, values)
    return f"{', '.join(most)} or {last}" if most else last


@dataclass(frozen=True)
class Row:
    """A line of the table: what is compared, and each engine's word in the order of :data:`CAPABILITIES`."""

    title: str
    cells: tuple[str, ...]


def table() -> list[Row]:
    """What people compare the engines by, for a terminal and for the README."""
    engines = CAPABILITIES.values()

    def row(title: str, *cells: str) -> Row:
        return Row(title, cells)

    def yes(title: str, key: str, value: Setting) -> Row:
        return row(title, *("yes" if engine.takes(key, value) else "no" for engine in engines))

    return [
        row("what it is", *(engine.summary for engine in engines)),
        row("`zero_stage`", *(", ".join(map(str, engine.values("zero_stage"))) for engine in engines)),
        row("`precision` (tf32 on GPUs)", *(_precisions(engine) for engine in engines)),
        row("`precision.rules`", *(", ".join(engine.values("rules")) for engine in engines)),
        row("weights in a forward", *(engine.weights for engine in engines)),
        row("gradients summed, in FP32", *(engine.accumulation for engine in engines)),
        row("a micro-batch's weight multiplies", *(engine.weighting for engine in engines)),
        row("`reduce_dtype` on the wire", *(_dtypes(engine.values("reduce_dtype")) for engine in engines)),
        yes("`reproducible`", "reproducible", True),
        yes("`groups` by name patterns", "groups", ("*",)),
        yes("`optim.compile`", "compile", True),
        row("`offload`", *("cpu, stages 1 to 3" if engine.takes("offload", "cpu") else "no" for engine in engines)),
        row("checkpoints", *("of any engine, any number of ranks" for _ in engines)),
        row("needs torch from", *(engine.torch for engine in engines)),
        row("needs a package", *(engine.package or "no" for engine in engines)),
    ]


def reasons() -> list[tuple[str, str, str]]:
    """(engine, ``key=value``, reason) of everything that some engine does and another does not."""
    rows = []
    for name, capabilities in CAPABILITIES.items():
        for key, limit in capabilities.limits.items():
            refused = [value for value in SETTINGS[key] if value not in limit.values]
            rows.append((name, f"{key}={_listed(refused)}" if refused else key, limit.reason))
        for exclusion in capabilities.exclusions:
            words = " with ".join(f"{key}={_word(value)}" for key, value in exclusion.settings.items())
            rows.append((name, words, exclusion.reason))
    return rows


def _dtypes(values: tuple[Setting, ...]) -> str:
    return ", ".join(value for value in values if value != "auto")


def _precisions(engine: Capabilities) -> str:
    excluded = [
        exclusion.settings["precision"]
        for exclusion in engine.exclusions
        if exclusion.settings.get("device_type") == "cpu"
    ]
    names = _dtypes(tuple(name for name in engine.values("precision") if name not in excluded))
    return f"{names}; {', '.join(excluded)} on GPUs" if excluded else names
