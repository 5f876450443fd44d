"""Predicts a run's step in BF16 and in FP8, from one recorded step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from dtrain.config.precision import Float8
from dtrain.engine.blocks.install import find_blocks
from dtrain.errors import ConfigError
from dtrain.planning.devices import Device
from dtrain.planning.planned_run import PlannedRun, build_without_values
from dtrain.planning.record.products import ATTENTION, MATMUL, WGRAD, MatrixProduct, products
from dtrain.planning.record.recorder import UPDATE, RecordedCall
from dtrain.planning.time.prediction import Assumptions, PricedRun
from dtrain.train import outlook


def float8_lines(modules: Collection[str], device: Device, plan: Callable[[], PlannedRun]) -> list[str]:
    """Returns what FP8 brings to ``modules`` of a run; the last line says it alone. Raises as ``expect``."""
    if device.type == "cpu" or device.capability < (8, 9):
        return [outlook.emulated_line(device.name)]
    found = expect(plan(), modules)
    return [*found.details(), found.line()]


def expect(run: PlannedRun, modules: Collection[str]) -> outlook.Outlook:
    """Returns the step of ``run`` with ``modules``, its FP8 Linears; ``ConfigError``: a rate is not published."""
    config, rate, bandwidth = run.config, run.device.rate("fp8"), run.device.bandwidth
    if rate is None or bandwidth is None:
        raise ConfigError(f"the FP8 rate or the bandwidth of {run.device.name} is not published; take another device")
    name = "bf16" if config.precision.name == "fp8" else config.precision.name
    rules = {pattern: "bf16" if rule == "fp8" else rule for pattern, rule in config.precision.rules.items()}
    precision = replace(config.precision, name=name, rules=rules, float8=Float8())  # whose options need FP8
    recorded = replace(run, config=replace(config, precision=precision)).record(for_time=True)
    cost, blocks = outlook.recipe_cost(config.precision.float8.recipe), _blocks(run)

    def seconds(call: RecordedCall, product: MatrixProduct | None, bf16_s: float, *, float8: bool, fuse: bool) -> float:
        fused = fuse and call.module.startswith(blocks)
        if product is None:
            return bf16_s * (outlook.FUSED_SHARE if fused else 1.0)
        if not float8 or call.module not in modules or (product.part == WGRAD and not cost.has_wgrad):
            return bf16_s
        elements = 0 if product.part == WGRAD else product.m * product.k  # of the input, or of the output's gradient
        nbytes = product.nbytes - product.m * product.k - product.k * product.n  # operands have one byte an element
        return outlook.float8_seconds(product.flops, elements, rate, bandwidth, cost, fused=fused, nbytes=nbytes)

    def predicted(*, fuse: bool) -> outlook.Times:
        assumed = Assumptions(efficiency=outlook.BF16_SHARE)
        changes = (partial(seconds, float8=float8, fuse=fuse) for float8 in (False, True))
        steps = (PricedRun.of(recorded, assumed.efficiency, change).predict(assumed).step for change in changes)
        return outlook.Times(*(step.seconds for step in steps))

    flops = dict.fromkeys(outlook.KINDS, 0)
    for product in products(call for call in recorded.steps[-1].calls if call.part != UPDATE):
        is_linear = product.kind == MATMUL and not (product.is_batched or product.is_grouped)
        linear = outlook.FP8_LINEARS if product.call.module in modules else outlook.LINEARS
        is_causal = product.kind == ATTENTION and any(value is True for value in product.call.signature.args)
        kind = outlook.IN_ATTENTION if product.kind == ATTENTION else linear if is_linear else outlook.OTHERS
        flops[kind] += product.flops // (2 if is_causal else 1)
    unfused, fused = predicted(fuse=False), predicted(fuse=True)
    targets = config.train.global_batch_size * config.targets_per_sample
    facts = (run.compiles_blocks, targets, run.task.unit, cost.rate)
    return outlook.Outlook(run.device.name, flops, unfused, fused, *facts)


def _blocks(run: PlannedRun) -> tuple[str, ...]:
    """Returns how the names of modules in blocks begin; none if the model has no blocks that could be compiled."""
    options = replace(run.config.model.block_options, compile="blocks")
    try:
        return tuple(f"{name}." for name, _ in find_blocks(build_without_values(run.config, run.task), options))
    except ConfigError:
        return ()
