"""Which format each module of a model computes in, and why: by its class, by rules, and by what FP8 can do.

A rule is a name pattern (``fnmatch``) and a format. It covers the modules whose name matches, and all inside them; the
last rule that covers a module decides. Low formats do not reach norms, softmax and losses by a pattern, because nobody
who writes ``blocks.0.*`` means those: the rule must have the module's own name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from dtrain.errors import ConfigError, nearest
from dtrain.precision.float8.cast import E4M3
from dtrain.precision.float8.choice import Decision
from dtrain.precision.float8.matmul import ALIGNMENT

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": E4M3}
"""Of the weights of a module, by its format."""

POLICY = "policy"
"""The reason where nothing else has decided."""

OWN_FORWARD = "own_forward"
"""Attribute of a forward that was replaced to change its format: the module's own."""

_NORM_CLASS = re.compile(r"norm(?!al)", re.IGNORECASE)  # RMSNorm, BatchNorm2d, BatchNormAct2d; not NormalNoise
_SOFTMAX = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin)
_LOSS = nn.modules.loss._Loss
_PRODUCTS = (
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)


def short(dtype: torch.dtype | None) -> str:
    """The name that configurations use: ``fp32``, ``bf16``, ``fp16``, ``fp8``; ``auto`` for None."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    return "auto" if dtype is None else names.get(dtype, str(dtype).removeprefix("torch."))


def is_fp32_class(module: nn.Module) -> bool:
    """Whether the class alone keeps a module in FP32: norms (by class name), softmax and losses.

    A norm whose children have parameters is a block round a norm, such as ``PreNorm``: its children decide.
    """
    return bool(_fp32_class(module))


def _fp32_class(module: nn.Module) -> str:
    if isinstance(module, _SOFTMAX):
        return "softmax"
    if isinstance(module, _LOSS):
        return "loss"
    is_block = any(True for child in module.children() for _ in child.parameters())
    return "norm" if not is_block and _NORM_CLASS.search(type(module).__name__) else ""


def is_compiled(module: nn.Module) -> bool:
    """Whether a module runs as compiled or scripted code, which no hook and no replaced class reaches."""
    is_wrapper = type(module).__module__.startswith("torch._dynamo.")  # by name: to import it takes a second
    is_whole = is_wrapper or module._compiled_call_impl is not None or isinstance(module, torch.jit.ScriptModule)
    return is_whole or _is_compiled_function(getattr(module, "forward", None))


def _is_compiled_function(function: Any) -> bool:
    """Whether ``torch.compile`` made ``function``, or the one that it replaced: dynamo leaves attributes."""
    while function is not None:
        is_dynamo = hasattr(function, "_torchdynamo_orig_callable")
        if is_dynamo and not getattr(function, "_torchdynamo_disable", False):
            return True
        function = getattr(function, OWN_FORWARD, None)
    return False


@dataclass(frozen=True)
class Assignment:
    """The format that one module computes in.

    Attributes:
        name: of the module; the first of them, where it has several.
        module: itself.
        format: ``fp32``, ``bf16``, ``fp16`` or ``fp8``.
        reason: ``policy``, ``norm``, ``rule 'blocks.0.*'``, ``last product``, ...
        inside: the modules that it lies in, innermost first.
    """

    name: str
    module: nn.Module
    format: str
    reason: str
    inside: tuple[nn.Module, ...] = ()

    @property
    def is_forced(self) -> bool:
        """Whether a rule with its own name makes low what its class keeps in FP32, itself or what it lies in."""
        return self.format != "fp32" and any(map(is_fp32_class, (self.module, *self.inside)))

    @property
    def is_listed(self) -> bool:
        """Whether people look for it in a table: it has parameters, multiplies, or is FP32 by its class."""
        has_own = any(True for _ in self.module.parameters(recurse=False))
        return has_own or isinstance(self.module, _PRODUCTS) or is_fp32_class(self.module)


class Modules:
    """The modules of a model by name, and what lies in what.

    Attributes:
        names: all names of each module, by its id; in the order of definition.
    """

    def __init__(self, model: nn.Module) -> None:
        self._by_name = dict(model.named_modules(remove_duplicate=False))
        self.names: dict[int, list[str]] = {}
        for name, module in self._by_name.items():
            self.names.setdefault(id(module), []).append(name)
        self._owners: dict[int, list[str]] = {}
        for module in model.modules():
            for local, p in module.named_parameters(recurse=False):
                self._owners.setdefault(id(p), []).append(self._parameter_name(module, local))
        products = [module for module in model.modules() if isinstance(module, _PRODUCTS)]
        self._first, self._last = products[:1], products[-1:]

    def __iter__(self) -> Iterator[tuple[str, nn.Module]]:
        return ((names[0], self._by_name[names[0]]) for names in self.names.values())

    def _parameter_name(self, module: nn.Module, local: str) -> str:
        prefix = self.names[id(module)][0]
        return f"{prefix}.{local}" if prefix else local

    def around(self, module: nn.Module) -> tuple[nn.Module, ...]:
        """The modules that ``module`` lies in, by any of its names; innermost first."""
        names = [prefix for name in self.names[id(module)] for prefix in list(_prefixes(name))[1:]]
        return tuple({id(outer): outer for outer in map(self._by_name.__getitem__, names)}.values())

    def end(self, module: nn.Module) -> str:
        """``first product``, ``last product``, or nothing, in the order of definition."""
        if module in self._first:
            return "first product"
        return "last product" if module in self._last else ""

    def unsupported_reason(self, module: nn.Module) -> str:
        """Why the products of ``module`` cannot be FP8; empty where they can."""
        if type(module) is not nn.Linear:
            return "only a plain nn.Linear has FP8 products"
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2:
            return "its weight is not a parameter of two dimensions"
        if "forward" in module.__dict__:
            return "its forward is replaced"
        if not weight.requires_grad:
            return "its weight is frozen"
        own = self._parameter_name(module, "weight")
        tied = [other for other in self._owners[id(weight)] if other != own]
        if tied:
            return f"weight tied to '{tied[0]}'"
        closed = next((other for other in (module, *self.around(module)) if is_compiled(other)), None)
        if closed is not None:
            return f"inside the compiled module '{self.names[id(closed)][0]}'"
        if min(weight.shape) < ALIGNMENT:
            return f"too small for FP8: a dimension below {ALIGNMENT}"
        return ""


def assign(
    model: nn.Module, rules: Sequence[tuple[str, str]], default: str, decisions: Mapping[str, Decision] | None = None
) -> list[Assignment]:
    """The format of every module of ``model``, in the order of definition.

    Args:
        model: with its names and shapes; it may be on ``meta``.
        rules: pairs of pattern and format.
        default: the format of the policy; ``fp8``: FP8 for Linears, but for the first and the last product, and BF16
            for all else.
        decisions: of the products that were weighed; those without one are FP8.

    Raises:
        ConfigError: a pattern that matches no module; an ``fp8`` rule that reaches no Linear that can be FP8, or that
            names a module that cannot; a rule for a part of an ``nn.MultiheadAttention`` alone.
    """
    modules = Modules(model)
    _check_reach(modules, rules)
    assigned = [_assign(name, module, modules, rules, default, decisions or {}) for name, module in modules]
    _check_attention(assigned)
    return assigned


def _assign(
    name: str,
    module: nn.Module,
    modules: Modules,
    rules: Sequence[tuple[str, str]],
    default: str,
    decisions: Mapping[str, Decision],
) -> Assignment:
    outer = modules.around(module)
    own_names = modules.names[id(module)]
    by_class = next((other for other in (module, *outer) if is_fp32_class(other)), None)
    found: tuple[str, str] | None = None
    for pattern, wanted in rules:
        if by_class is not None and wanted != "fp32" and pattern not in (*own_names, *modules.names[id(by_class)]):
            continue
        if _covers(pattern, own_names):
            found = pattern, wanted
    wanted, reason = (found[1], f"rule '{found[0]}'") if found else (default, POLICY)
    if found is None and by_class is not None:
        inside = f"inside '{modules.names[id(by_class)][0]}', a {_fp32_class(by_class)}"
        return Assignment(name, module, "fp32", _fp32_class(module) or inside, outer)
    if wanted == "fp8":
        unsupported_reason = modules.unsupported_reason(module)
        if not unsupported_reason and found is None:
            unsupported_reason = modules.end(module)
            if not unsupported_reason and name in decisions:
                reason = decisions[name].reason
                unsupported_reason = "" if decisions[name].is_float8 else reason
        if unsupported_reason:
            wanted, reason = "bf16", unsupported_reason
    return Assignment(name, module, wanted, reason, outer)


def _check_attention(assigned: Sequence[Assignment]) -> None:
    formats = {item.module: item for item in assigned}
    for item in assigned:
        outer = formats[item.inside[0]] if item.inside else item
        if isinstance(outer.module, nn.MultiheadAttention) and item.format != outer.format:
            raise ConfigError(
                f"precision {item.reason}: '{item.name}' cannot be {item.format} by itself: the MultiheadAttention "
                f"'{outer.name}' ({outer.format}) reads its weights and never calls it; give '{outer.name}' the format"
            )


def _check_reach(modules: Modules, rules: Sequence[tuple[str, str]]) -> None:
    everything = [name for names in modules.names.values() for name in names]
    for pattern, wanted in rules:
        if not any(fnmatchcase(name, pattern) for name in everything):
            hint = nearest(pattern, filter(None, everything))
            raise ConfigError(f"precision rule '{pattern}' matches no module{hint}")
        if wanted == "fp8":
            _check_float8_reach(modules, pattern)


def _check_float8_reach(modules: Modules, pattern: str) -> None:
    obstacles = {}
    for name, module in modules:
        if not _covers(pattern, modules.names[id(module)]):
            continue
        unsupported_reason = modules.unsupported_reason(module)
        is_named = pattern in modules.names[id(module)]
        if is_named and unsupported_reason and (isinstance(module, _PRODUCTS) or is_fp32_class(module)):
            raise ConfigError(f"precision rule '{pattern}: fp8': {unsupported_reason}; give it bf16 or fp32")
        if isinstance(module, nn.Linear):
            obstacles[name] = unsupported_reason
    if all(obstacles.values()):
        first = f" ('{next(iter(obstacles))}': {next(iter(obstacles.values()))})" if obstacles else ""
        raise ConfigError(f"precision rule '{pattern}: fp8' reaches no Linear that can be FP8{first}")


def _covers(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(prefix, pattern) for name in names for prefix in _prefixes(name))


def _prefixes(name: str) -> Iterator[str]:
    """``a.b.c``, ``a.b``, ``a``, and the empty name of the model itself."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
