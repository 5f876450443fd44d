"""``dtrain plan shapes``: the products of a step, what bounds them, and the sizes that break a rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dtrain.config.model import DEFAULT_FACTORY, GPT2_FACTORY, HF_FACTORY, USED_KEYS, VOCAB_MULTIPLE
from dtrain.models.factory import vocabulary
from dtrain.planning.devices import Device
from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.record.products import ATTENTION, CONVOLUTION, MatrixProduct, products
from dtrain.planning.record.recorder import UPDATE, StepRecorder
from dtrain.planning.shapes.rules import BATCH, HEAD_DIM, Cause, find_causes
from dtrain.planning.shapes.variants import has_products, measured_gain
from dtrain.tools.tables import Table, fold, show

_BUDGET_S = 20.0
"""Seconds that all measurements may take."""

_MIN_GAIN = 0.03
"""Smallest share of the products' time that an advice must save."""

_HOPPER = (9, 0)

_EXPERTS = "experts"
_NOTES = {
    ATTENTION: "attention: M and N are tokens, K is the head dim, pairs are heads of samples",
    _EXPERTS: "experts: M, and K in wgrad, are the rows of all",
    CONVOLUTION: "convolution: M are positions, K the values of a window, pairs are groups; in wgrad K are positions",
}


def show_shapes(run: PlannedRun, *, measure: bool = True, folded: bool = True) -> None:
    """Prints the products of forward and backward of one micro-batch, and the sizes that break a rule.

    If ``measure``, padding is timed on a planned device that is this machine's and has the format in hardware. If
    ``folded``, modules that differ only in one index share a row.
    """
    found, linears = record_products(run)
    causes = find_causes(found, linears)
    show([_product_table(found, run.device, folded=folded)])
    for line in _summary(found, run):
        print(line)
    if not causes:
        print("no size breaks a rule: all are multiples of 8 in 16-bit formats, 16 in fp8, 4 in tf32; fp32 has no rule")
        return
    gains = [_gain(cause, run, len(causes)) if measure else None for cause in causes]
    print()
    show([_cause_table(causes, gains, run)])


def record_products(run: PlannedRun) -> tuple[list[MatrixProduct], dict[str, tuple[int, int]]]:
    """Returns the products of a micro-batch, and the features of the model's Linears by name."""
    recorder = StepRecorder()
    with run.engine(recorder) as (engine, step):
        linears = {
            name: (module.in_features, module.out_features)
            for name, module in engine.module.named_modules()
            if isinstance(module, nn.Linear)
        }
        (recorded,) = recorder.record_steps(engine, step, [1])
    calls = [call for call in recorded.calls if call.part != UPDATE]  # Muon multiplies matrices in the update
    return products(calls, tf32=run.is_tf32), linears


def _assumed_tile(device: Device) -> tuple[int, int] | None:
    """Returns the tile of the output that a thread block is assumed to compute; None for a CPU."""
    if device.num_sms is None:
        return None
    return (128, 256) if device.capability >= _HOPPER else (128, 128)


def _product_table(found: Sequence[MatrixProduct], device: Device, *, folded: bool) -> Table:
    sizes = ("M x N x K", "pairs", "format", "GFLOP", "MB", "FLOP/byte")
    columns = ("module", "pass", "kind", *sizes, "bound by", "tiles")
    rows = [(product.call.module, *_cells(product, device)) for product in found]
    return Table("Products of one micro-batch", columns, fold(rows, folded=folded))


def _cells(product: MatrixProduct, device: Device) -> tuple[str, ...]:
    ridge = _ridge_point(device, product.format)
    bound = "-" if ridge is None else "compute" if product.intensity >= ridge else "memory"
    tile = _assumed_tile(device)
    efficiency = "-"
    if tile is not None and device.num_sms is not None and product.kind != ATTENTION and not product.is_grouped:
        efficiency = f"{product.tile_efficiency(tile):.0%} x {product.wave_efficiency(tile, device.num_sms):.0%}"
    return (
        product.part + (" again" if product.call.is_recomputed else ""),
        product.kind,
        f"{product.m} x {product.n} x {product.k}",
        str(product.batch),
        product.format,
        f"{product.flops / 1e9:.4g}",
        f"{product.nbytes / 1e6:.4g}",
        f"{product.intensity:.0f}",
        bound,
        efficiency,
    )


def _ridge_point(device: Device, format_name: str) -> float | None:
    """Returns the FLOPs per byte above which the published rate bounds a product, below it the bandwidth."""
    rate = device.rate(format_name)
    return None if rate is None or device.bandwidth is None else rate / device.bandwidth


def _summary(found: Sequence[MatrixProduct], run: PlannedRun) -> list[str]:
    device = run.device
    flops = sum(product.flops for product in found)
    again = sum(product.flops for product in found if product.call.is_recomputed)
    lines = [
        f"{flops / 1e12:.4g} TFLOP in {len(found)} products of one micro-batch"
        + (f", {again / flops:.0%} of them recomputed in backward" if again else "")
        + "; attention is counted in full, also if it is causal"
    ]
    ridges = {product.format: _ridge_point(device, product.format) for product in found}
    known = ", ".join(f"{ridge:.0f} in {name}" for name, ridge in ridges.items() if ridge is not None)
    if known:
        lines.append(
            f"{device.name}: products above {known} FLOP/byte are bound by compute (published rate / bandwidth)"
        )
    if not all(ridges.values()):
        unknown = ", ".join(name for name, ridge in ridges.items() if ridge is None)
        lines.append(f"{device.name}: what bounds products in {unknown} is unknown: no rate or bandwidth is published")
    tile = _assumed_tile(device)
    if tile is not None:
        lines.append(
            f"tiles: share of full {tile[0]} x {tile[1]} tiles x share of {device.num_sms} multiprocessors at work "
            "over all waves; the tile is assumed, the library may choose others, or split K"
        )
    present = {product.kind for product in found} | {_EXPERTS for product in found if product.is_grouped}
    return [*lines, *(note for what, note in _NOTES.items() if what in present)]


# -- rules


def _gain(cause: Cause, run: PlannedRun, num_causes: int) -> float | None:
    device = torch.device("cuda" if run.device.type == "cuda" else "cpu")
    formats = {product.format for product in cause.products}
    if not run.device.is_here or not all(has_products(name, device) for name in formats):
        return None
    torch.manual_seed(0)
    return measured_gain(cause, _pad_multiple(cause, run), device, _BUDGET_S / num_causes)


def _cause_table(causes: Sequence[Cause], gains: Sequence[float | None], run: PlannedRun) -> Table:
    rows = []
    for cause, gain in zip(causes, gains, strict=True):
        by_dimension: dict[str, list[str]] = {}
        for module, dimension in fold(cause.uses):
            by_dimension.setdefault(dimension, []).append(module)
        where = "; ".join(f"{dimension} of {', '.join(names)}" for dimension, names in by_dimension.items())
        what, key = describe(cause, run)
        rows.append((what, where, str(cause.multiple), key, _advice(cause, gain, run)))
    return Table("Sizes that break a rule", ("size", "where", "multiple of", "set", "gain"), rows)


def describe(cause: Cause, run: PlannedRun) -> tuple[str, str]:
    """Returns what the size is, and the keys that set it."""
    model, size = run.config.model, cause.size
    others = "".join(f", {other} = {other // size} x {size}" for other in sorted(cause.sizes - {size}))
    is_built_in = model.factory in (DEFAULT_FACTORY, GPT2_FACTORY)
    if cause.kind == BATCH:
        return _describe_rows(size, run)
    if cause.kind == HEAD_DIM:
        return f"head dim {size}", "model.num_heads = model.hidden_dim / head dim" if is_built_in else _origin(run)
    if not run.config.data.is_language:
        if size == vocabulary(model, run.task) and any(dimension == "N" for _, dimension in cause.uses):
            return f"outputs {size}{others}", f"the head of {model.factory}: pad its outputs, and cut off the padding"
    elif size == vocabulary(model, run.task) and model.factory != HF_FACTORY:
        return f"vocabulary {size}{others}", (
            f"the head of {model.factory}: padded_vocab_size() of dtrain.models.causal_lm; cut the logits to the "
            "vocabulary before the loss"
        )
    if size == model.lora.r:
        return f"r {size}", "model.lora.r"
    if "hidden_dim" in USED_KEYS.get(model.factory, ()) and size == model.hidden_dim:
        return f"hidden_dim {size}{others}", "model.hidden_dim"
    if not is_built_in:
        names = {dimension for _, dimension in cause.uses}
        what = "channels" if any(name.startswith("channels") for name in names) else "size"
        return f"{what} {size}{others}", _origin(run)
    for name in ("hidden_dim", "ffn_dim"):
        if getattr(model, name) in cause.sizes:
            return f"{name} {size}{others}", f"model.{name}"
    return f"size {size}{others}", "model.num_heads, model.num_kv_heads, model.ffn_dim"


def _describe_rows(size: int, run: PlannedRun) -> tuple[str, str]:
    micro_batch = run.config.train.micro_batch_size
    if size == micro_batch:
        return f"micro-batch {size}", "train.micro_batch_size"
    if not run.config.data.is_language:
        return f"rows {size}", "train.micro_batch_size"
    if size % micro_batch == 0 and any(tensor.numel() == size for tensor in run.batch.values()):
        length = size // micro_batch
        return f"micro-batch {micro_batch} x sequence {length} = {size}", "train.micro_batch_size, model.max_seq_len"
    return f"rows {size}", "train.micro_batch_size, model.max_seq_len"


def _origin(run: PlannedRun) -> str:
    return "config.json of model.path" if run.config.model.factory == HF_FACTORY else run.config.model.factory


def _pad_multiple(cause: Cause, run: PlannedRun) -> int:
    is_size = run.config.data.is_language and cause.kind not in (BATCH, HEAD_DIM)
    return VOCAB_MULTIPLE if is_size and cause.size == vocabulary(run.config.model, run.task) else cause.multiple


def _advice(cause: Cause, gain: float | None, run: PlannedRun) -> str:
    padded = cause.padded(cause.size, _pad_multiple(cause, run))
    if gain is None:
        return f"rule broken, gain of {padded} not measured"
    if gain < _MIN_GAIN:
        return f"rule broken, gain of {padded} measured below {_MIN_GAIN:.0%}"
    return f"padding to {padded} saves {gain:.0%} of these products (measured)"
