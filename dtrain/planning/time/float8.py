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
from dtrain.train.outlook import (
    BF16_SHARE,
    FP8_LINEARS,
    FUSED_SHARE,
    IN_ATTENTION,
    KINDS,
    LINEARS,
    OTHERS,
    Outlook,
    Times,
    emulated_line,
    float8_seconds,
    recipe_cost,
)


def float8_lines(modules: Collection[str], device: Device, plan: Callable[[], PlannedRun]) -> list[str]:
    """Returns what FP8 brings to ``modules`` in the run that ``plan`` returns; the last line says it alone.

    Raises:
        ConfigError: a rate of the GPU is not published.
    """
    if device.type == "cpu" or device.capability < (8, 9):
        return [emulated_line(device.name)]
    found = expect(plan(), modules)
    return [*found.details(), found.line()]


def expect(run: PlannedRun, modules: Collection[str]) -> Outlook:
    """Returns the predicted step of ``run`` with ``modules``, which are Linears, in BF16 and in FP8.

    Raises:
        ConfigError: a rate of the GPU is not published.
    """
    config, device = run.config, run.device
    rate, bandwidth = device.rate("fp8"), device.bandwidth
    if rate is None or bandwidth is None:
        raise ConfigError(f"the FP8 rate or the bandwidth of {device.name} is not published; take another device")
    rules = {name: "bf16" if rule == "fp8" else rule for name, rule in config.precision.rules.items()}
    name = "bf16" if config.precision.name == "fp8" else config.precision.name
    # options of FP8 are refused without FP8
    precision = replace(config.precision, name=name, rules=rules, float8=Float8())
    recorded = replace(run, config=replace(config, precision=precision)).record(for_time=True)
    cost, blocks = recipe_cost(config.precision.float8.recipe), _blocks(run)

    def seconds(call: RecordedCall, product: MatrixProduct | None, bf16_s: float, *, float8: bool, fuse: bool) -> float:
        fused = fuse and call.module.startswith(blocks)
        if product is None:
            return bf16_s * (FUSED_SHARE if fused else 1.0)
        is_float8 = float8 and product.kind == MATMUL and call.module in modules
        if not is_float8 or (product.part == WGRAD and not cost.has_wgrad):
            return bf16_s
        elements = 0 if product.part == WGRAD else product.m * product.k  # of the input, or of the output's gradient
        nbytes = product.nbytes - product.m * product.k - product.k * product.n  # operands have one byte an element
        return float8_seconds(product.flops, elements, rate, bandwidth, cost, fused=fused, nbytes=nbytes)

    def predicted(*, fuse: bool) -> Times:
        steps = (
            PricedRun.of(recorded, BF16_SHARE, partial(seconds, float8=float8, fuse=fuse)) for float8 in (False, True)
        )
        return Times(*(priced.predict(Assumptions(efficiency=BF16_SHARE)).step.seconds for priced in steps))

    found = products(call for call in recorded.steps[-1].calls if call.part != UPDATE)
    flops = {kind: sum(_flops(product) for product in found if _kind(product, modules) == kind) for kind in KINDS}
    targets = config.train.global_batch_size * config.targets_per_sample
    times = predicted(fuse=False), predicted(fuse=True)
    return Outlook(device.name, flops, *times, run.compiles_blocks, targets, run.task.unit)


def _blocks(run: PlannedRun) -> tuple[str, ...]:
    """Returns how the names of modules in blocks begin, or none if the model has no blocks that could be compiled."""
    options = replace(run.config.model.block_options, compile="blocks")
    try:
        return tuple(f"{name}." for name, _ in find_blocks(build_without_values(run.config, run.task), options))
    except ConfigError:
        return ()


def _kind(product: MatrixProduct, modules: Collection[str]) -> str:
    if product.kind == ATTENTION:
        return IN_ATTENTION
    if product.kind != MATMUL or product.is_batched or product.is_grouped:
        return OTHERS
    return FP8_LINEARS if product.call.module in modules else LINEARS


def _flops(product: MatrixProduct) -> int:
    """Returns the FLOPs of ``product``: half of attention's if it is causal."""
    is_causal = product.kind == ATTENTION and any(argument is True for argument in product.call.signature.args)
    return product.flops // (2 if is_causal else 1)
