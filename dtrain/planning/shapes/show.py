"""``dtrain plan shapes``: the products of a step, what bounds them, and the sizes that break a rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from dtrain.config.model import DEFAULT_FACTORY, GPT2_FACTORY, HF_FACTORY, USED_KEYS, VOCAB_MULTIPLE
from dtrain.models.factory import vocabulary
from dtrain.planning.devices import Device
from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.record.products import ATTENTION, CONVOLUTION, GROUPED, MatrixProduct, products
from dtrain.planning.record.recorder import UPDATE, StepRecorder
from dtrain.planning.shapes.rules import BATCH, HEAD_DIM, SIZE, Cause, find_causes
from dtrain.planning.shapes.variants import has_products, measured_gain
from dtrain.tools.tables import Column, Table, fold, show

_BUDGET_S = 20.0
"""Seconds that all measurements may take."""

_MIN_GAIN = 0.03
"""Smallest share of the products' time that an advice must save."""

_NOTES = {
    ATTENTION: "attention: M and N are tokens, K is the head dim, pairs are heads of samples",
    GROUPED: "experts: M, and K in wgrad, are the rows of all",
    CONVOLUTION: "convolution: M are positions, K the values of a window, pairs are groups; in wgrad K are positions",
}


def show_shapes(run: PlannedRun, *, measure: bool = True, folded: bool = True) -> None:
    """Prints the products of forward and backward of one micro-batch, and the sizes that break a rule.

    If ``measure``, padding is timed on a planned device that is this machine's and has the format in hardware. If
    ``folded``, modules that differ only in one index share a row.
    """
    found, linears = record_products(run)
    causes = find_causes(found, linears)
    table = _product_table(found, run.device)
    show([replace(table, rows=fold(table.rows, folded=folded))])
    for line in _summary(found, run.device):
        print(line)
    if not causes:
        print("no size breaks a rule: all are multiples of 8 in 16-bit formats, 16 in fp8, 4 in tf32; fp32 has no rule")
        return
    rows = [_cause_row(cause, run, _BUDGET_S / len(causes) if measure else None) for cause in causes]
    print()
    show([Table("Sizes that break a rule", ("size", "where", "multiple of", "set", "gain"), rows)])


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
    return products(calls, tf32=run.config.precision.name == "tf32"), linears


def _product_table(found: Sequence[MatrixProduct], device: Device) -> Table:
    def bound(product: MatrixProduct) -> str:
        ridge = device.ridge_point(product.format)
        return "-" if ridge is None else "compute" if product.intensity >= ridge else "memory"

    def tiles(product: MatrixProduct) -> str:
        if device.num_sms is None or product.kind == ATTENTION or product.is_grouped:
            return "-"
        return "{:.0%} x {:.0%}".format(*product.efficiency(device.tile, device.num_sms))

    columns: list[Column[MatrixProduct]] = [
        ("module", lambda product: product.call.module),
        ("pass", lambda product: product.part + (" again" if product.call.is_recomputed else "")),
        ("kind", lambda product: product.kind),
        ("M x N x K", lambda product: f"{product.m} x {product.n} x {product.k}"),
        ("pairs", lambda product: str(product.batch)),
        ("format", lambda product: product.format),
        ("GFLOP", lambda product: f"{product.flops / 1e9:.4g}"),
        ("MB", lambda product: f"{product.nbytes / 1e6:.4g}"),
        ("FLOP/byte", lambda product: f"{product.intensity:.0f}"),
        ("bound by", bound),
        ("tiles", tiles),
    ]
    return Table.of("Products of one micro-batch", columns, found)


def _summary(found: Sequence[MatrixProduct], device: Device) -> Iterator[str]:
    flops = sum(product.flops for product in found)
    again = sum(product.flops for product in found if product.call.is_recomputed)
    recomputed = f", {again / flops:.0%} of them recomputed in backward" if again else ""
    yield (
        f"{flops / 1e12:.4g} TFLOP in {len(found)} products of one micro-batch{recomputed}; attention is counted in "
        "full, also if it is causal"
    )
    ridges = {product.format: device.ridge_point(product.format) for product in found}
    if known := ", ".join(f"{ridge:.0f} in {name}" for name, ridge in ridges.items() if ridge):
        yield f"{device.name}: products above {known} FLOP/byte are bound by compute (published rate / bandwidth)"
    if unknown := ", ".join(name for name, ridge in ridges.items() if not ridge):
        yield f"{device.name}: what bounds products in {unknown} is unknown: no rate or bandwidth is published"
    if device.num_sms is not None:
        yield (
            f"tiles: share of full {device.tile[0]} x {device.tile[1]} tiles x share of {device.num_sms} "
            "multiprocessors at work over all waves; the tile is assumed, the library may choose others, or split K"
        )
    present = {name for product in found for name in (product.kind, product.call.signature.name)}
    yield from (note for what, note in _NOTES.items() if what in present)


def _cause_row(cause: Cause, run: PlannedRun, budget_s: float | None) -> tuple[str, ...]:
    """Returns the row of a cause, whose padding is timed for ``budget_s`` seconds; None: it is not."""
    modules = defaultdict(list)  # by dimension
    for module, dimension in fold(cause.uses):
        modules[dimension].append(module)
    where = "; ".join(f"{dimension} of {', '.join(names)}" for dimension, names in modules.items())
    multiple = VOCAB_MULTIPLE if run.config.data.is_language and _has_all_outputs(cause, run) else cause.multiple
    padded, gain = cause.padded(cause.size, multiple), _gain(cause, multiple, run, budget_s)
    if gain is not None and gain >= _MIN_GAIN:
        advice = f"padding to {padded} saves {gain:.0%} of these products (measured)"
    else:
        measured = "not measured" if gain is None else f"measured below {_MIN_GAIN:.0%}"
        advice = f"rule broken, gain of {padded} {measured}"
    what, key = describe(cause, run)
    return what, where, str(cause.multiple), key, advice


def _gain(cause: Cause, multiple: int, run: PlannedRun, budget_s: float | None) -> float | None:
    device = torch.device(run.device.type)
    if not (budget_s and run.device.is_here and all(has_products(one.format, device) for one in cause.products)):
        return None
    torch.manual_seed(0)
    return measured_gain(cause, multiple, device, budget_s)


def _has_all_outputs(cause: Cause, run: PlannedRun) -> bool:
    """Whether the size is that of a vocabulary, or of the outputs for other data."""
    return cause.kind == SIZE and cause.size == vocabulary(run.config.model, run.task)


def describe(cause: Cause, run: PlannedRun) -> tuple[str, str]:
    """Returns what the size is, and the keys that set it."""
    model, size, is_language = run.config.model, cause.size, run.config.data.is_language
    micro_batch, letters = run.config.train.micro_batch_size, {name[0] for _, name in cause.uses}
    is_built_in, is_hf = model.factory in (DEFAULT_FACTORY, GPT2_FACTORY), model.factory == HF_FACTORY
    is_rows, of_head = cause.kind == BATCH, _has_all_outputs(cause, run)
    is_sequence = is_language and not size % micro_batch and size in {tensor.numel() for tensor in run.batch.values()}
    rows_key = "train.micro_batch_size" + (", model.max_seq_len" if is_language else "")
    own_key, head = "config.json of model.path" if is_hf else model.factory, f"the head of {model.factory}: "
    cut = "padded_vocab_size() of dtrain.models.causal_lm; cut the logits to the vocabulary before the loss"
    has_width = "hidden_dim" in USED_KEYS.get(model.factory, ())
    known = [  # the first that applies
        (is_rows and size == micro_batch, "micro-batch", "train.micro_batch_size"),
        (is_rows and is_sequence, f"micro-batch {micro_batch} x sequence {size // micro_batch} =", rows_key),
        (is_rows, "rows", rows_key),
        (cause.kind == HEAD_DIM and is_built_in, "head dim", "model.num_heads = model.hidden_dim / head dim"),
        (cause.kind == HEAD_DIM, "head dim", own_key),
        (of_head and is_language and not is_hf, "vocabulary", head + cut),
        (of_head and not is_language and "N" in letters, "outputs", head + "pad its outputs, and cut off the padding"),
        (size == model.lora.r, "r", "model.lora.r"),
        (has_width and size == model.hidden_dim, "hidden_dim", "model.hidden_dim"),
        (not is_built_in, "channels" if "c" in letters else "size", own_key),
        (model.hidden_dim in cause.sizes, "hidden_dim", "model.hidden_dim"),
        (model.ffn_dim in cause.sizes, "ffn_dim", "model.ffn_dim"),
        (True, "size", "model.num_heads, model.num_kv_heads, model.ffn_dim"),
    ]
    what, key = next((what, key) for applies, what, key in known if applies)
    others = "".join(f", {other} = {other // size} x {size}" for other in sorted(cause.sizes - {size}))
    return f"{what} {size}{others}", key
