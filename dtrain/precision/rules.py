"""Assigns a format to each module of a model, from its class, the rules, and what FP8 supports.

A rule is a name pattern (``fnmatch``) and a format. It covers the modules whose name matches, and all modules inside
them. The last rule that covers a module decides. A pattern does not put norms, softmax and losses into reduced
precision, because ``blocks.0.*`` is rarely meant to include them: that takes a rule with the module's own name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from dtrain.errors import ConfigError, nearest
from dtrain.precision.fake import is_plain
from dtrain.precision.float8.cast import E4M3
from dtrain.precision.float8.choice import Float8Decision
from dtrain.precision.float8.matmul import ALIGNMENT
from dtrain.precision.policy import TRAINABLE_DTYPES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": E4M3}
"""Dtype of a module's weights, by its format."""

POLICY = "policy"
"""Reason of an assignment that follows from the policy alone."""

OWN_FORWARD = "own_forward"
"""Attribute of a replaced forward that stores the module's own forward."""

COMPILED_FORWARD = "compiled_forward"
"""Attribute of a replaced forward that runs compiled code in training; hooks of its module run outside of that."""

_NORM_CLASS = re.compile(r"norm(?!al)", re.IGNORECASE)  # RMSNorm, BatchNorm2d, BatchNormAct2d; not NormalNoise
_ROUTER_CLASS = re.compile(r"Router$")  # of a mixture of experts, as transformers names them: MixtralTopKRouter
_SOFTMAX = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin)
_LOSS = nn.modules.loss._Loss
_ADAPTERS = "adapter_layer_names"  # attribute of the classes of peft's layers
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


def format_name(dtype: torch.dtype | None) -> str:
    """Returns the name that configurations use (``fp32``, ``bf16``, ``fp16``, ``fp8``); ``auto`` for None."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    return "auto" if dtype is None else names.get(dtype, str(dtype).removeprefix("torch."))


def rules_override(rules: Mapping[str, str]) -> str:
    """Returns rules, formats by pattern, as a key of ``dtrain train``; ``shlex.quote`` makes it a word for a shell."""
    return f"precision.rules={{{', '.join(f'{json.dumps(pattern)}: {name}' for pattern, name in rules.items())}}}"


def fp32_class(module: nn.Module) -> str:
    """Returns ``norm``, ``router``, ``softmax`` or ``loss`` if the class alone keeps ``module`` in FP32, else ``""``.

    A class with ``norm`` in its name whose children have parameters is a block that contains a norm, such as
    ``PreNorm``, and is not FP32 itself. A router is FP32 with all in it: rounded logits would choose other experts.
    """
    if isinstance(module, _SOFTMAX):
        return "softmax"
    if isinstance(module, _LOSS):
        return "loss"
    if _ROUTER_CLASS.search(type(module).__name__):
        return "router"
    is_block = any(True for child in module.children() for _ in child.parameters())
    return "norm" if not is_block and _NORM_CLASS.search(type(module).__name__) else ""


def is_compiled(module: nn.Module) -> bool:
    """Whether a module runs as compiled or scripted code, which ignores a replaced class and hooks on what is inside.

    Hooks on the module itself are ignored too, or compiled, unless ``has_compiled_forward``.
    """
    is_wrapper = type(module).__module__.startswith("torch._dynamo.")  # by name: the import takes a second
    is_whole = is_wrapper or module._compiled_call_impl is not None or isinstance(module, torch.jit.ScriptModule)
    return is_whole or has_compiled_forward(module)


def has_compiled_forward(module: nn.Module) -> bool:
    """Whether the forward of a module is compiled, so that hooks on the module itself run as ever."""
    return _is_compiled_function(getattr(module, "forward", None))


def modules_without_hooks(model: nn.Module) -> set[int]:
    """Returns the ids of the modules in compiled code, on which hooks do not run."""
    compiled = [module for module in model.modules() if is_compiled(module)]
    inside = {id(part) for module in compiled for part in list(module.modules())[1:]}
    return inside | {id(module) for module in compiled if not has_compiled_forward(module)}


def _is_compiled_function(function: Any) -> bool:
    """Whether ``torch.compile`` made ``function`` or one that it replaced; dynamo sets attributes on them."""
    while function is not None:
        is_dynamo = hasattr(function, "_torchdynamo_orig_callable")
        if (is_dynamo and not getattr(function, "_torchdynamo_disable", False)) or hasattr(function, COMPILED_FORWARD):
            return True
        function = getattr(function, OWN_FORWARD, None)
    return False


@dataclass(frozen=True)
class FormatAssignment:
    """The format of one module.

    Attributes:
        name: first name of the module, which has several if it is shared.
        format: ``fp32``, ``bf16``, ``fp16`` or ``fp8``.
        reason: ``policy``, ``norm``, ``rule 'blocks.0.*'``, ``last product``, ...
        ancestors: the modules that contain it, innermost first.
    """

    name: str
    module: nn.Module
    format: str
    reason: str
    ancestors: tuple[nn.Module, ...] = ()

    @property
    def overrides_fp32_class(self) -> bool:
        """Whether a rule puts a module into reduced precision that is FP32 by its class or an ancestor's class."""
        return self.format != "fp32" and any(map(fp32_class, (self.module, *self.ancestors)))

    @property
    def is_listed(self) -> bool:
        """Whether tables list it: it has parameters, multiplies, or is FP32 by its class."""
        has_own = any(True for _ in self.module.parameters(recurse=False))
        return has_own or isinstance(self.module, _PRODUCTS) or bool(fp32_class(self.module))


class ModuleTree:
    """The modules of a model by name, with their ancestors.

    Attributes:
        names: all names of each module by its id, in the order of definition.
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
        products = [m for m in model.modules() if isinstance(m, _PRODUCTS) and not self.is_adapter(m)]
        self._first, self._last = products[:1], products[-1:]

    def __iter__(self) -> Iterator[tuple[str, nn.Module]]:
        return ((names[0], self._by_name[names[0]]) for names in self.names.values())

    def _parameter_name(self, module: nn.Module, local: str) -> str:
        prefix = self.names[id(module)][0]
        return f"{prefix}.{local}" if prefix else local

    def ancestors(self, module: nn.Module) -> tuple[nn.Module, ...]:
        """Returns the modules that contain ``module`` under any of its names, innermost first."""
        names = [prefix for name in self.names[id(module)] for prefix in list(_prefixes(name))[1:]]
        return tuple({id(outer): outer for outer in map(self._by_name.__getitem__, names)}.values())

    def is_adapter(self, module: nn.Module) -> bool:
        """Whether ``module`` is inside a layer of ``peft``, beside the layer that this one wraps."""
        parent, *others = (*self.ancestors(module), None)
        is_inside = any(hasattr(type(other), _ADAPTERS) for other in others)
        return is_inside and not hasattr(type(parent), _ADAPTERS)

    def first_or_last(self, module: nn.Module) -> str:
        if module in self._first:
            return "first product"
        return "last product" if module in self._last else ""

    def unsupported_reason(self, module: nn.Module) -> str:
        """Returns why ``module`` cannot be FP8, or an empty string if it can."""
        if type(module) is not nn.Linear:
            return "only a plain nn.Linear has FP8 products"
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2:
            return "its weight is not a parameter of two dimensions"
        if "forward" in module.__dict__:
            return "its forward is replaced"
        if weight.dtype not in TRAINABLE_DTYPES:
            return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
        if not weight.requires_grad and not is_plain(weight):
            return f"its frozen weight is a {type(weight).__name__}"
        own = self._parameter_name(module, "weight")
        tied = [other for other in self._owners[id(weight)] if other != own]
        if tied:
            return f"weight tied to '{tied[0]}'"
        compiled = next((other for other in (module, *self.ancestors(module)) if is_compiled(other)), None)
        if compiled is not None:
            return f"inside the compiled module '{self.names[id(compiled)][0]}'"
        if min(weight.shape) < ALIGNMENT:
            return f"too small for FP8: a dimension below {ALIGNMENT}"
        return ""


def assign(
    model: nn.Module,
    rules: Sequence[tuple[str, str]],
    default: str,
    decisions: Mapping[str, Float8Decision] | None = None,
) -> list[FormatAssignment]:
    """Assigns a format to every module of ``model``, which may be on ``meta``, in the order of definition.

    Args:
        rules: pairs of pattern and format.
        default: format of the policy. ``fp8`` means FP8 for Linears except the first and the last product, and BF16
            for all else.
        decisions: FP8 decisions by module name; a Linear without one is FP8.

    Raises:
        ConfigError: a pattern matches no module; an ``fp8`` rule covers no Linear that can be FP8, or names a module
            that cannot; or a rule covers a submodule of an ``nn.MultiheadAttention`` alone.
    """
    modules = ModuleTree(model)
    _check_reach(modules, rules)
    assigned = [_assign(name, module, modules, rules, default, decisions or {}) for name, module in modules]
    _check_attention(assigned)
    return assigned


def _assign(
    name: str,
    module: nn.Module,
    modules: ModuleTree,
    rules: Sequence[tuple[str, str]],
    default: str,
    decisions: Mapping[str, Float8Decision],
) -> FormatAssignment:
    ancestors = modules.ancestors(module)
    own_names = modules.names[id(module)]
    by_class = next((other for other in (module, *ancestors) if fp32_class(other)), None)
    found: tuple[str, str] | None = None
    for pattern, wanted in rules:  # to the end: the last rule decides
        # a reduced precision reaches norms, routers, softmax and losses only by an exact name, see decision 0027
        if by_class is not None and wanted != "fp32" and pattern not in (*own_names, *modules.names[id(by_class)]):
            continue
        if _covers(pattern, own_names):
            found = pattern, wanted
    wanted, reason = (found[1], f"rule '{found[0]}'") if found else (default, POLICY)
    if found is None and by_class is not None:
        inside = f"inside '{modules.names[id(by_class)][0]}', a {fp32_class(by_class)}"
        return FormatAssignment(name, module, "fp32", fp32_class(module) or inside, ancestors)
    if wanted == "fp8":
        unsupported_reason = modules.unsupported_reason(module)
        if not unsupported_reason and modules.is_adapter(module) and (found is None or found[0] not in own_names):
            unsupported_reason = "an adapter: small products, which FP8 would not make faster"
        if not unsupported_reason and found is None:
            unsupported_reason = modules.first_or_last(module)
            if not unsupported_reason and name in decisions:
                reason = decisions[name].reason
                unsupported_reason = "" if decisions[name].is_float8 else reason
        if unsupported_reason:
            wanted, reason = "bf16", unsupported_reason
    return FormatAssignment(name, module, wanted, reason, ancestors)


def _check_attention(assigned: Sequence[FormatAssignment]) -> None:
    formats = {item.module: item for item in assigned}
    for item in assigned:
        parent = formats[item.ancestors[0]] if item.ancestors else item
        if isinstance(parent.module, nn.MultiheadAttention) and item.format != parent.format:
            raise ConfigError(
                f"precision {item.reason}: '{item.name}' cannot be {item.format} by itself: the MultiheadAttention "
                f"'{parent.name}' ({parent.format}) reads its weights and never calls it; "
                f"give '{parent.name}' the format"
            )


def _check_reach(modules: ModuleTree, rules: Sequence[tuple[str, str]]) -> None:
    everything = [name for names in modules.names.values() for name in names]
    for pattern, wanted in rules:
        if not any(fnmatchcase(name, pattern) for name in everything):
            hint = nearest(pattern, filter(None, everything))
            raise ConfigError(f"precision rule '{pattern}' matches no module{hint}")
        if wanted == "fp8":
            _check_float8_reach(modules, pattern)


def _check_float8_reach(modules: ModuleTree, pattern: str) -> None:
    reasons = {}
    for name, module in modules:
        if not _covers(pattern, modules.names[id(module)]):
            continue
        unsupported_reason = modules.unsupported_reason(module)
        is_named = pattern in modules.names[id(module)]
        if is_named and unsupported_reason and (isinstance(module, _PRODUCTS) or fp32_class(module)):
            raise ConfigError(f"precision rule '{pattern}: fp8': {unsupported_reason}; give it bf16 or fp32")
        if isinstance(module, nn.Linear):
            reasons[name] = unsupported_reason
    if all(reasons.values()):
        first = f" ('{next(iter(reasons))}': {next(iter(reasons.values()))})" if reasons else ""
        raise ConfigError(f"precision rule '{pattern}: fp8' reaches no Linear that can be FP8{first}")


def _covers(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(prefix, pattern) for name in names for prefix in _prefixes(name))


def _prefixes(name: str) -> Iterator[str]:
    """Yields ``a.b.c``, ``a.b``, ``a``, and the empty name of the model itself."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
