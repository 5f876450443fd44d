"""The contract: a policy resolved on a model, so that every module's format is known, and can be proven."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from dtrain.errors import ContractError
from dtrain.precision.float8.cast import E4M3
from dtrain.precision.float8.choice import Decision, Product
from dtrain.precision.float8.linear import Float8Linear
from dtrain.precision.float8.options import Recipe
from dtrain.precision.policy import HELD, PrecisionPolicy
from dtrain.precision.rules import DTYPES, POLICY, Assignment, assign, short


@dataclass(frozen=True)
class ModuleFormat:
    """What one module computes in, for people.

    Attributes:
        name: of the module.
        kind: its class.
        format: ``fp32``, ``bf16``, ``fp16`` or ``fp8``.
        reason: ``policy``, ``norm``, ``rule 'blocks.0.*'``, ``last product``, ...
    """

    name: str
    kind: str
    format: str
    reason: str


@dataclass(frozen=True)
class Contract:
    """Which dtype every parameter's replica has, and all else that a checkpoint or a reader needs to know.

    Attributes:
        policy: that it follows from.
        modules: those that have parameters, multiply, or are FP32 by their class.
        regions: the modules that compute in another dtype than what is round them, or than what autocast would give
            them, and that dtype.
        forced: those of them that a rule makes low though their class keeps them in FP32: norms, softmax, losses.
        replica_dtypes: of the weights as they are held for the model's forward, by parameter.
        weights: how they are held, see :func:`resolve`.
        decisions: about the FP8 products that no rule decides about.
    """

    policy: PrecisionPolicy
    modules: tuple[ModuleFormat, ...]
    regions: Mapping[str, torch.dtype]
    replica_dtypes: Mapping[str, torch.dtype]
    weights: str = "policy"
    decisions: tuple[Decision, ...] = ()
    forced: tuple[str, ...] = ()

    @property
    def fp32_modules(self) -> tuple[str, ...]:
        """Names of the modules that compute in FP32 where others do not; outer ones come before what they contain."""
        return tuple(name for name, dtype in self.regions.items() if dtype == torch.float32)

    @property
    def float8_modules(self) -> tuple[str, ...]:
        """Names of the Linears whose products are FP8."""
        return tuple(module.name for module in self.modules if module.format == "fp8")

    @property
    def recipe(self) -> Recipe | None:
        """Of all FP8 products; None where there is none."""
        return Recipe.of(self.policy.float8, self.policy.compute_dtype) if self.float8_modules else None

    @property
    def is_mixed(self) -> bool:
        """Whether anything computes in a format narrower than FP32."""
        return self.policy.is_reduced_precision or any(dtype != torch.float32 for dtype in self.regions.values())

    @property
    def needs_loss_scale(self) -> bool:
        """Whether gradients anywhere are FP16, so that small ones vanish without a loss scale."""
        return torch.float16 in (self.policy.compute_dtype, *self.regions.values())

    def parameter_dtype(self, name: str) -> torch.dtype:
        """Of a parameter and its gradient as autograd knows them: an FP8 replica lies behind a compute dtype."""
        dtype = self.replica_dtypes[name]
        return self.policy.compute_dtype if dtype == E4M3 else dtype

    def describe(self) -> list[str]:
        """Lines for people."""
        policy = self.policy
        counts = Counter(self.replica_dtypes.values())
        shown = dict.fromkeys((policy.compute_dtype, torch.float32)) | dict.fromkeys(
            dtype for dtype in counts if dtype in DTYPES.values()
        )
        computed = [f"{counts.pop(dtype, 0)} in {short(dtype)}" for dtype in shown]
        computed += [f"{count} frozen in {short(dtype)}" for dtype, count in counts.items()]
        verb = "computed" if self.weights in ("policy", "quantized") else "held"
        fp32_modules = f" ({len(self.fp32_modules)} modules compute in fp32)" if policy.is_reduced_precision else ""
        lines = [
            f"precision {policy.name}: master {short(policy.master_dtype)}, compute {short(policy.compute_dtype)}, "
            f"gradients travel in {short(policy.reduce_dtype)}, summed in fp32, output {short(policy.output_dtype)}, "
            f"moments fp32",
            f"parameters {verb}: {', '.join(computed)}{fp32_modules}",
        ]
        if policy.reason:
            lines.insert(0, f"precision auto: {policy.name}, because {policy.reason}")
        return lines + self._describe_modules()

    def _describe_modules(self) -> list[str]:
        """One line a format and reason, where more than the policy and the classes of modules has decided."""
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
            lines.append(f"float8: {self.recipe.describe()}, {self.policy.float8.weight_scale} weight scales")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Plain values for manifests, run directories and comparison between ranks."""
        policy = self.policy
        return {
            "precision": policy.name,
            "master": short(policy.master_dtype),
            "compute": short(policy.compute_dtype),
            "accumulate": "fp32",
            "reduce": short(policy.reduce_dtype),
            "output": short(policy.output_dtype),
            "optimizer_state": "fp32",
            "weights": self.weights,
            "tf32": policy.tf32,
            "rules": [list(rule) for rule in policy.rules],
            "float8": asdict(policy.float8) if policy.uses_float8 else None,
            "decisions": [asdict(decision) for decision in self.decisions],
            "modules": {m.name: {"kind": m.kind, "format": m.format, "reason": m.reason} for m in self.modules},
            "replicas": {name: short(dtype) for name, dtype in self.replica_dtypes.items()},
        }

    def check_parameters(self, model: nn.Module) -> None:
        """Asserts the dtype of every live parameter, and that FP8 modules are what they were made.

        Raises:
            ContractError: naming the first one that is something else.
        """
        for name, parameter in model.named_parameters():
            want = self.parameter_dtype(name)
            if parameter.dtype != want:
                raise ContractError(
                    f"the compute replica of '{name}' is {parameter.dtype}, the contract says {want}; "
                    f"do not call .to(), .half() or .float() on a model after dtrain.initialize"
                )
        for name in self.float8_modules:
            module = model.get_submodule(name)
            if not isinstance(module, Float8Linear):
                raise ContractError(
                    f"module '{name}' is a {type(module).__name__}, the contract says that its products are FP8; do "
                    f"not replace modules after dtrain.initialize"
                )


def earlier_decisions(saved: Mapping[str, Any], policy: PrecisionPolicy) -> tuple[Decision, ...]:
    """What a contract that :meth:`Contract.to_dict` has saved decided, where ``policy`` forms FP8 products alike.

    A product that is timed again may be chosen otherwise, and a run that goes on would compute with other bits.
    """
    if saved.get("float8") != asdict(policy.float8):
        return ()
    return tuple(Decision(**decision) for decision in saved["decisions"])


def float8_products(policy: PrecisionPolicy, model: nn.Module) -> list[Product]:
    """The products of ``model`` that can be FP8 and that no rule decides about."""
    modules = resolve(policy, model).modules
    names = [module.name for module in modules if (module.format, module.reason) == ("fp8", POLICY)]
    return [Product(name, *model.get_parameter(f"{name}.weight").shape) for name in names]


def resolve(
    policy: PrecisionPolicy, model: nn.Module, weights: str = "policy", decisions: Sequence[Decision] = ()
) -> Contract:
    """The contract of ``model`` under ``policy``.

    Args:
        policy: with its rules.
        model: with its names, shapes and dtypes; it may be on ``meta``.
        weights: how an engine holds what the model computes with: ``policy``, FP32 modules in FP32, as those of
            another 16-bit format than the compute dtype, which autocast casts, and the rest in the compute dtype;
            ``quantized``, each in the format of its module; ``fp32``, all in FP32, cast in each forward; ``compute``,
            all in the compute dtype, also those of FP32 modules, which compute on FP32 copies.
        decisions: of :func:`dtrain.precision.float8.choice.decide`; a product without one is FP8 where it can be.

    Raises:
        ConfigError: a rule that cannot be honoured on this model.
    """
    default = "fp8" if policy.name == "fp8" else short(policy.compute_dtype)
    assigned = assign(model, policy.rules, default, {decision.name: decision for decision in decisions})
    modules = tuple(
        ModuleFormat(item.name, type(item.module).__name__, item.format, item.reason)
        for item in assigned
        if item.is_listed
    )
    replicas = _replica_dtypes(model, assigned, policy, weights)
    forced = tuple(item.name for item in assigned if item.is_forced)
    return Contract(policy, modules, _regions(assigned, policy), replicas, weights, tuple(decisions), forced)


def _regions(assigned: Sequence[Assignment], policy: PrecisionPolicy) -> dict[str, torch.dtype]:
    dtypes = {item.module: _compute_dtype(item.format, policy) for item in assigned}
    return {
        item.name: dtypes[item.module]
        for item in assigned
        if item.is_forced or {policy.compute_dtype, *map(dtypes.__getitem__, item.inside)} != {dtypes[item.module]}
    }


def _compute_dtype(name: str, policy: PrecisionPolicy) -> torch.dtype:
    """Of what a module computes beside its FP8 products."""
    return policy.compute_dtype if name == "fp8" else DTYPES[name]


def _replica_dtypes(
    model: nn.Module, assigned: Sequence[Assignment], policy: PrecisionPolicy, weights: str
) -> dict[str, torch.dtype]:
    wanted: dict[int, set[torch.dtype]] = {}
    for item in assigned:
        for local, p in item.module.named_parameters(recurse=False):
            is_quantised = item.format == "fp8" and local == "weight"
            dtype = E4M3 if is_quantised else _compute_dtype(item.format, policy)
            wanted.setdefault(id(p), set()).add(dtype)

    def held(p: nn.Parameter) -> torch.dtype:
        dtype, *others = wanted[id(p)]
        if weights == "compute":
            return policy.compute_dtype
        if weights == "fp32" or others:  # tied between modules of several formats: only FP32 holds them all
            return torch.float32
        if weights == "quantized" or dtype in (torch.float32, policy.compute_dtype):
            return dtype
        return policy.compute_dtype if dtype == E4M3 else torch.float32

    return {name: held(p) if p.dtype in HELD else p.dtype for name, p in model.named_parameters()}
