"""The precision contract: a policy resolved on a model, which states the format of every module and parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from dtrain.errors import ContractError
from dtrain.precision.float8.cast import E4M3
from dtrain.precision.float8.choice import Float8Candidate, Float8Decision
from dtrain.precision.float8.linear import Float8Linear
from dtrain.precision.float8.options import PRODUCTS, Recipe
from dtrain.precision.policy import TRAINABLE_DTYPES, PrecisionPolicy
from dtrain.precision.rules import DTYPES, POLICY, FormatAssignment, assign, format_name


@dataclass(frozen=True)
class ModuleFormat:
    """The format of one module, for reports; ``format`` and ``reason`` as in ``FormatAssignment``."""

    name: str
    kind: str  # name of its class
    format: str
    reason: str


@dataclass(frozen=True)
class StateFormats:
    """How an engine holds what lies beside the compute replicas.

    Attributes:
        master: ``full``, or ``remainder``: the BF16 replica is a half of the FP32 master.
        main_grad: format of the main grads of BF16 gradients; others are FP32.
        moments: the narrowest format of an optimizer state.
    """

    master: str = "full"
    main_grad: str = "fp32"
    moments: str = "fp32"

    def describe(self) -> str:
        """Returns the formats of masters, main grads and moments, for people."""
        master = "fp32" if self.master == "full" else "fp32 as bf16 weight and 16-bit remainder"
        return f"masters {master}, main grads {self.main_grad}, moments {self.moments}"


@dataclass(frozen=True)
class Contract:
    """The dtypes of a model under a policy.

    Attributes:
        modules: the modules that have parameters, multiply, or are FP32 by their class.
        regions: compute dtype of each module whose dtype differs from that of the modules around it, or from what
            autocast would choose.
        replica_dtypes: dtype of each parameter's compute replica.
        weights: how the engine stores compute replicas, see ``resolve``.
        decisions: FP8 decisions for the Linears that no rule covers.
        fp32_class_overrides: the regions that a rule puts in reduced precision although their class is FP32 by default
            (norms, routers, softmax, losses).
        states: formats of masters, main grads and optimizer states.
    """

    policy: PrecisionPolicy
    modules: tuple[ModuleFormat, ...]
    regions: Mapping[str, torch.dtype]
    replica_dtypes: Mapping[str, torch.dtype]
    weights: str = "policy"
    decisions: tuple[Float8Decision, ...] = ()
    fp32_class_overrides: tuple[str, ...] = ()
    states: StateFormats = StateFormats()

    @property
    def fp32_modules(self) -> tuple[str, ...]:
        """Names of the modules that compute in FP32 inside a reduced-precision model, outer modules first."""
        return tuple(name for name, dtype in self.regions.items() if dtype == torch.float32)

    @property
    def float8_modules(self) -> tuple[str, ...]:
        return tuple(module.name for module in self.modules if module.format == "fp8")

    def is_shadowed(self, step: int) -> bool:
        """Whether a micro-batch of the step that ends with ``step`` attempted steps is computed in BF16 too."""
        every = self.policy.float8.shadow_every
        return every > 0 and step % every == 0 and bool(self.float8_modules)

    @property
    def recipe(self) -> Recipe | None:
        return Recipe.of(self.policy.float8, self.policy.compute_dtype) if self.float8_modules else None

    def recipe_of(self, module: str) -> Recipe:
        """Returns the recipe of one of ``float8_modules``, with the products that were decided for it."""
        assert self.recipe is not None
        decided = next((one.products for one in self.decisions if one.name == module), self.recipe.products)
        return replace(self.recipe, products=decided)

    @property
    def is_mixed(self) -> bool:
        """Whether anything computes in a format narrower than FP32."""
        return self.policy.is_reduced_precision or any(dtype != torch.float32 for dtype in self.regions.values())

    @property
    def needs_loss_scale(self) -> bool:
        """Whether any gradients are FP16, whose small values vanish without a loss scale."""
        return torch.float16 in (self.policy.compute_dtype, *self.regions.values())

    def parameter_dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a parameter and its gradient in autograd."""
        # the parameter of an FP8 weight is an expanded NaN of the compute dtype, see decision 0025
        dtype = self.replica_dtypes[name]
        return self.policy.compute_dtype if dtype == E4M3 else dtype

    def describe(self) -> list[str]:
        """Returns the lines that are printed at the start of a run."""
        policy = self.policy
        counts = Counter(self.replica_dtypes.values())
        shown = dict.fromkeys((policy.compute_dtype, torch.float32)) | dict.fromkeys(
            dtype for dtype in counts if dtype in DTYPES.values()
        )
        computed = [f"{counts.pop(dtype, 0)} in {format_name(dtype)}" for dtype in shown]
        computed += [f"{count} frozen in {format_name(dtype)}" for dtype, count in counts.items()]
        verb = "computed" if self.weights in ("policy", "quantized") else "stored"
        fp32_modules = f" ({len(self.fp32_modules)} modules compute in fp32)" if policy.is_reduced_precision else ""
        lines = [
            f"precision {policy.name}: master {format_name(policy.master_dtype)}, "
            f"compute {format_name(policy.compute_dtype)}, "
            f"gradients sent in {format_name(policy.reduce_dtype)}, summed in fp32, "
            f"output {format_name(policy.output_dtype)}, moments {self.states.moments}",
            f"parameters {verb}: {', '.join(computed)}{fp32_modules}",
        ]
        if self.states != StateFormats():
            lines.append(f"states: {self.states.describe()}")
        if policy.reason:
            lines.insert(0, f"precision auto: {policy.name}, because {policy.reason}")
        return lines + self._describe_modules()

    def _describe_modules(self) -> list[str]:
        if not self.policy.rules and not self.policy.uses_float8:
            return []
        groups: dict[tuple[str, str], list[str]] = {}
        for module in self.modules:
            groups.setdefault((module.format, module.reason), []).append(module.name)
        counts = Counter(module.format for module in self.modules)
        lines = ["modules: " + ", ".join(f"{count} in {name}" for name, count in counts.items())]
        for (name, reason), names in groups.items():
            most = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            lines.append(f"  {len(names)} in {name} ({reason}): {most}")
        if self.recipe is not None:
            lines.append(f"float8: {self.recipe.describe()}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for manifests, run directories and comparison between ranks."""
        policy = self.policy
        return {
            "precision": policy.name,
            "master": format_name(policy.master_dtype),
            "compute": format_name(policy.compute_dtype),
            "accumulate": "fp32",
            "reduce": format_name(policy.reduce_dtype),
            "output": format_name(policy.output_dtype),
            "optimizer_state": self.states.moments,
            "master_storage": self.states.master,
            "main_grad": self.states.main_grad,
            "weights": self.weights,
            "tf32": policy.tf32,
            "rules": [list(rule) for rule in policy.rules],
            "float8": _float8_options(policy) if policy.uses_float8 else None,
            "decisions": [asdict(decision) for decision in self.decisions],
            "modules": {m.name: {"kind": m.kind, "format": m.format, "reason": m.reason} for m in self.modules},
            "replicas": {name: format_name(dtype) for name, dtype in self.replica_dtypes.items()},
        }

    def check_parameters(self, parameters: Mapping[str, nn.Parameter], modules: Mapping[str, nn.Module]) -> None:
        """Checks the dtype of every parameter and the class of every FP8 module, given by the names of the contract.

        Raises:
            ContractError: a parameter or module differs from the contract; the message names it.
        """
        for name, parameter in parameters.items():
            want = self.parameter_dtype(name)
            if parameter.dtype != want:
                raise ContractError(
                    f"the compute replica of '{name}' is {parameter.dtype}, the contract says {want}; "
                    f"do not call .to(), .half() or .float() on a model after dtrain.initialize"
                )
        for name in self.float8_modules:
            module = modules.get(name)
            if not isinstance(module, Float8Linear):
                raise ContractError(
                    f"module '{name}' is a {type(module).__name__}, the contract says that its products are FP8; do "
                    f"not replace modules after dtrain.initialize"
                )


def earlier_decisions(saved: Mapping[str, Any], policy: PrecisionPolicy) -> tuple[Float8Decision, ...]:
    """Returns the FP8 decisions of a saved contract (``Contract.to_dict``); none if its FP8 options differ.

    A resumed run keeps its decisions, because timing a Linear again may decide differently and change the bits.
    """
    before, now = saved.get("float8"), _float8_options(policy)
    step = [key for key in now if not key.startswith("finish_")]  # a contract may have options that are gone
    if before is None or any(before.get(key) != now[key] for key in step):
        return ()
    return tuple(
        Float8Decision(
            decision["name"],
            decision["is_float8"],
            decision["reason"],
            decision.get("bf16_ms", decision.get("low_ms")),  # `low_ms` in contracts of earlier versions
            decision.get("float8_ms"),
            tuple(decision.get("products", PRODUCTS)),
        )
        for decision in saved.get("decisions", ())
    )


def _float8_options(policy: PrecisionPolicy) -> dict[str, Any]:
    """Returns the options that change what a run computes."""
    return {key: value for key, value in asdict(policy.float8).items() if key != "shadow_every"}


def float8_candidates(policy: PrecisionPolicy, model: nn.Module) -> list[Float8Candidate]:
    """Returns the Linears of ``model`` that can be FP8 and that no rule covers."""
    modules = resolve(policy, model).modules
    names = [module.name for module in modules if (module.format, module.reason) == ("fp8", POLICY)]
    weights = [(name, model.get_parameter(f"{name}.weight")) for name in names]
    return [Float8Candidate(name, weight.shape[0], weight.shape[1], weight.requires_grad) for name, weight in weights]


def resolve(
    policy: PrecisionPolicy, model: nn.Module, weights: str = "policy", decisions: Sequence[Float8Decision] = ()
) -> Contract:
    """Resolves ``policy`` on ``model``.

    Args:
        policy: the policy, with its rules.
        model: provides names, shapes and dtypes; it may be on ``meta``.
        weights: how the engine stores compute replicas. ``policy``: in the compute dtype, except weights of FP32
            modules and of modules in another 16-bit format, which are FP32 (autocast casts the latter). ``quantized``:
            each in the format of its module. ``fp32``: all in FP32, cast in each forward. ``compute``: all in the
            compute dtype; FP32 modules compute on FP32 copies.
        decisions: results of ``dtrain.precision.float8.choice.decide_float8``. A Linear without one is FP8 if
            possible.

    Raises:
        ConfigError: a rule cannot be applied to this model.
    """
    default = "fp8" if policy.name == "fp8" else format_name(policy.compute_dtype)
    assigned = assign(model, policy.rules, default, {decision.name: decision for decision in decisions})
    modules = tuple(
        ModuleFormat(item.name, type(item.module).__name__, item.format, item.reason)
        for item in assigned
        if item.is_listed
    )
    replicas = _replica_dtypes(model, assigned, policy, weights)
    fp32_class_overrides = tuple(item.name for item in assigned if item.overrides_fp32_class)
    return Contract(
        policy, modules, _regions(assigned, policy), replicas, weights, tuple(decisions), fp32_class_overrides
    )


def _regions(assigned: Sequence[FormatAssignment], policy: PrecisionPolicy) -> dict[str, torch.dtype]:
    dtypes = {item.module: _compute_dtype(item.format, policy) for item in assigned}
    # a module in the policy's own dtype is a region too if an ancestor has another one
    return {
        item.name: dtypes[item.module]
        for item in assigned
        if item.overrides_fp32_class
        or {policy.compute_dtype, *map(dtypes.__getitem__, item.ancestors)} != {dtypes[item.module]}
    }


def _compute_dtype(name: str, policy: PrecisionPolicy) -> torch.dtype:
    # of all operations but FP8 matmuls, whose output has the policy's compute dtype
    return policy.compute_dtype if name == "fp8" else DTYPES[name]


def _replica_dtypes(
    model: nn.Module, assigned: Sequence[FormatAssignment], policy: PrecisionPolicy, weights: str
) -> dict[str, torch.dtype]:
    wanted: dict[int, set[torch.dtype]] = {}
    for item in assigned:
        for local, p in item.module.named_parameters(recurse=False):
            is_quantized = item.format == "fp8" and local == "weight"
            dtype = E4M3 if is_quantized else _compute_dtype(item.format, policy)
            wanted.setdefault(id(p), set()).add(dtype)

    def replica_dtype(p: nn.Parameter) -> torch.dtype:
        dtype, *others = wanted[id(p)]
        if weights == "compute":
            return policy.compute_dtype
        if weights == "fp32" or others:  # tied between formats: only FP32 represents them all
            return torch.float32
        if weights == "quantized" or dtype in (torch.float32, policy.compute_dtype):
            return dtype
        return policy.compute_dtype if dtype == E4M3 else torch.float32

    return {name: replica_dtype(p) if p.dtype in TRAINABLE_DTYPES else p.dtype for name, p in model.named_parameters()}
