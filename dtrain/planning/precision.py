"""Prints the precision contract of a run as tables, before the run starts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from torch import nn

from dtrain.config.capabilities import CAPABILITIES
from dtrain.config.schema import RunConfig
from dtrain.data import load_dataset
from dtrain.data.text import VOCAB_SIZE
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.distributed.startup.setup import choose_device
from dtrain.planning.devices import Device
from dtrain.planning.planned_run import build_without_values
from dtrain.precision.contract import Contract, StateFormats, float8_candidates, resolve
from dtrain.precision.float8.choice import decide_float8
from dtrain.precision.rules import format_name
from dtrain.telemetry.texts import compact
from dtrain.tools.tables import Table, fold, show
from dtrain.train.setup import check_patterns, check_precision, executable, make_policy

_TO_BE_TIMED = "if timed faster than BF16 at the start"


def show_plan(config: RunConfig, planned: Device | None = None, *, folded: bool) -> tuple[str, ...]:
    """Prints the formats of modules and operations, and the matmuls that will be timed at the start.

    Returns the FP8 modules. If ``folded``, modules that differ only in one index share a row. ``planned`` is a GPU that
    is elsewhere. Raises ``ConfigError`` as ``dtrain train`` would.
    """
    device = choose_device(config.launch.device, LaunchEnv.read().local_rank)
    if planned is None:
        check_precision(config, device)
    is_language = config.data.is_language  # then the formats are the same with any vocabulary
    task = VOCAB_SIZE if is_language else load_dataset(config.data, config.model.max_seq_len).task
    model = build_without_values(config, task)
    check_patterns(config, model)
    is_tf32 = planned is not None and config.precision.name == "tf32"  # which a CPU refuses
    wanted = config if planned is None else executable(config, planned.type, planned.capability)
    policy = make_policy(config) if is_tf32 else make_policy(wanted).on(device)
    if planned is not None and config.precision.float8.choice != "all" and not policy.float8.emulate:
        policy = replace(policy, float8=replace(policy.float8, choice="timed"))
    candidates = float8_candidates(policy, model)
    decisions = decide_float8(candidates, replace(policy.float8, choice="all"), device)  # which times nothing
    if policy.float8.choice == "timed":
        decisions = tuple(replace(item, reason=_TO_BE_TIMED) if item.is_float8 else item for item in decisions)
    moments = "bf16" if config.optim.name == "adamw-bf16" else "fp32"
    states = StateFormats(config.engine.master, config.engine.grad_dtype, moments)
    contract = replace(resolve(policy, model, CAPABILITIES[config.engine.name].held, decisions), states=states)
    rows = [
        (module.name, module.kind, _shape(model.get_submodule(module.name)), module.format, module.reason)
        for module in contract.modules
    ]
    modules = Table("Modules", ("module", "kind", "weight", "format", "reason"), fold(rows, folded=folded))
    tables = [modules, Table("Operations outside rules", ("operation", "format"), _operations(contract))]
    timed = Counter(
        f"{policy.float8.num_rows} x {one.in_features} -> {one.out_features}"
        for one, decision in zip(candidates, decisions, strict=True)
        if decision.reason == _TO_BE_TIMED
    )
    if timed:
        title = "Timed at the start: output and both gradients, in FP8 and in BF16"
        tables.append(Table(title, ("rows x in -> out", "modules"), [(shape, str(n)) for shape, n in timed.items()]))
    show(tables)
    because = f", because {policy.reason}" if policy.reason else ""
    print(f"precision {policy.name} on {device.type if planned is None else planned.name}{because}")
    if contract.recipe is not None:
        print(f"float8: {contract.recipe.describe()}")
    numel: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        numel[format_name(contract.replica_dtypes[name])] += parameter.numel()
    weights = ", ".join(f"{compact(count)} in {name}" for name, count in numel.items())
    num_frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    frozen = f"; {compact(num_frozen)} of them frozen, without masters" if num_frozen else ""
    print(f"compute weights: {weights}{frozen}; {states.describe()}")
    return contract.float8_modules


def _shape(module: nn.Module) -> str:
    weight = module._parameters.get("weight")
    return "x".join(map(str, weight.shape)) if weight is not None else "-"


def _operations(contract: Contract) -> list[tuple[str, str]]:
    """Returns the formats of operations that no rule names."""
    compute = format_name(contract.policy.compute_dtype)
    rows = [("all", "fp32 (products tf32)" if contract.policy.tf32 else "fp32")]
    if contract.is_mixed:
        rows = [
            ("products, convolutions, RNN cells, attention", f"{compute}, sums in fp32"),
            ("softmax, norms, losses, reductions, linalg", "fp32"),
            ("elementwise", "format of the inputs"),
            ("inside dtrain.full_precision()", "fp32"),
            ("outputs of the model", "fp32"),
        ]
    if contract.recipe is not None:
        gradients = str(contract.recipe.grad_dtype).removeprefix("torch.float8_").removesuffix("fn")
        rows.insert(1, ("products of fp8 modules", f"e4m3 x e4m3, gradients {gradients} x e4m3, sums in fp32"))
    return rows
