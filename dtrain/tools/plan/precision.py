"""The precision contract of a run, as tables, before anything of the run exists."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from dtrain.config.capabilities import CAPABILITIES
from dtrain.config.schema import RunConfig
from dtrain.data.text import VOCAB_SIZE
from dtrain.distributed.launch_env import LaunchEnv
from dtrain.distributed.setup import choose_device
from dtrain.models import build_model
from dtrain.precision.contract import Contract, float8_products, resolve
from dtrain.precision.float8.choice import Decision, Product, decide
from dtrain.precision.policy import PrecisionPolicy
from dtrain.precision.rules import short
from dtrain.telemetry.console import compact
from dtrain.tools.tables import Table, show
from dtrain.train.setup import check_patterns, check_precision, make_policy

_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a module's name
_HOLE = "#"
_TO_BE_TIMED = "where timed faster than BF16 at the start"


def show_plan(config: RunConfig, *, folded: bool) -> None:
    """Prints in which format each module computes, what operations do elsewhere, and what is timed at the start.

    Args:
        config: checked.
        folded: modules that differ in one index alone share a row.

    Raises:
        ConfigError: what ``dtrain train`` would refuse.
    """
    device = choose_device(config.launch.device, LaunchEnv.read().local_rank)
    check_precision(config, device)
    model = _build(config)
    check_patterns(config, model)
    policy = make_policy(config).on(device)
    products = float8_products(policy, model)
    decisions = _foreseen(products, policy, device)
    contract = resolve(policy, model, CAPABILITIES[config.engine.name].held, decisions)
    tables = [module_table(contract, model, folded=folded), operation_table(contract)]
    timed = {decision.name for decision in decisions if decision.reason == _TO_BE_TIMED}
    if timed:
        tables.append(timing_table([product for product in products if product.name in timed], policy))
    show(tables)
    for line in summary(contract, model, device):
        print(line)


def _build(config: RunConfig) -> nn.Module:
    """The model without weights, or with them where its code needs values."""
    try:
        with torch.device("meta"):
            return build_model(config.model, VOCAB_SIZE, config.seed)
    except (RuntimeError, NotImplementedError):
        return build_model(config.model, VOCAB_SIZE, config.seed)


def _foreseen(products: Sequence[Product], policy: PrecisionPolicy, device: torch.device) -> tuple[Decision, ...]:
    """What is known of the decisions without timing anything."""
    by_shape = decide(products, replace(policy.float8, choice="all"), device)
    if policy.float8.choice != "timed":
        return by_shape
    return tuple(replace(item, reason=_TO_BE_TIMED) if item.is_float8 else item for item in by_shape)


def summary(contract: Contract, model: nn.Module, device: torch.device) -> list[str]:
    """What the tables do not say: the device, how FP8 products are formed, and the weights by format."""
    policy = contract.policy
    lines = [f"precision {policy.name} on {device.type}" + (f", because {policy.reason}" if policy.reason else "")]
    if contract.recipe is not None:
        lines.append(f"float8: {contract.recipe.describe()}, {policy.float8.weight_scale} weight scales")
    numel: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        key = short(contract.replica_dtypes[name])
        numel[key] = numel.get(key, 0) + parameter.numel()
    held = ", ".join(f"{compact(count)} in {name}" for name, count in numel.items())
    return [*lines, f"weights as a forward finds them: {held}; masters, moments and summed gradients: fp32"]


@dataclass(frozen=True)
class _Row:
    kind: str
    shape: str
    format: str
    reason: str


def module_table(contract: Contract, model: nn.Module, *, folded: bool) -> Table:
    """A row for each module of the contract, or for those that differ in the index of a block alone."""
    rows: dict[tuple[str, _Row], list[str]] = {}
    for module in contract.modules:
        row = _Row(module.kind, _shape(model.get_submodule(module.name)), module.format, module.reason)
        pattern = _INDEX.sub(_HOLE, module.name, count=1) if folded else module.name
        rows.setdefault((pattern, row), []).append(module.name)
    return Table(
        "Modules",
        ("module", "kind", "weight", "format", "reason"),
        [
            (_name(pattern, names), row.kind, row.shape, row.format, row.reason)
            for (pattern, row), names in rows.items()
        ],
    )


def _name(pattern: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0] or "(the model)"
    runs: list[list[int]] = []
    for index in (int(found[0]) for name in names if (found := _INDEX.search(name))):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return pattern.replace(_HOLE, ",".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs))


def _shape(module: nn.Module) -> str:
    weight = module._parameters.get("weight")
    return "x".join(map(str, weight.shape)) if weight is not None else "-"


def operation_table(contract: Contract) -> Table:
    """What operations compute in, where no rule says otherwise."""
    compute = short(contract.policy.compute_dtype)
    if not contract.is_mixed:
        rows = [("all", "fp32 (products tf32)" if contract.policy.tf32 else "fp32")]
    else:
        rows = [
            ("products, convolutions, RNN cells, attention", f"{compute}, sums in fp32"),
            ("softmax, norms, losses, reductions, linalg", "fp32"),
            ("elementwise", "what their inputs have"),
            ("inside dtrain.full_precision()", "fp32"),
            ("outputs of the model", "fp32"),
        ]
    if contract.recipe is not None:
        gradients = short_float8(contract.recipe.grad_dtype)
        rows.insert(1, ("products of fp8 modules", f"e4m3 x e4m3, gradients {gradients} x e4m3, sums in fp32"))
    return Table("Operations, where no rule says otherwise", ("operation", "format"), rows)


def short_float8(dtype: torch.dtype) -> str:
    """``e4m3`` or ``e5m2``."""
    return str(dtype).removeprefix("torch.float8_").removesuffix("fn")


def timing_table(products: Sequence[Product], policy: PrecisionPolicy) -> Table:
    """The shapes that rank 0 times at the start, in FP8 and in BF16."""
    shapes: dict[tuple[int, int], int] = {}
    for product in products:
        shape = (product.out_features, product.in_features)
        shapes[shape] = shapes.get(shape, 0) + 1
    num_rows = policy.float8.num_rows
    return Table(
        "Timed at the start: output and both gradients, in FP8 and in BF16",
        ("rows x in -> out", "modules"),
        [(f"{num_rows} x {shape[1]} -> {shape[0]}", str(count)) for shape, count in shapes.items()],
    )
