"""The tables of ``dtrain bench float8``, in Markdown."""

from __future__ import annotations

from collections import Counter
from statistics import median

from dtrain.telemetry.console import compact
from dtrain.tools.bench.records import Entry, Float8Results, LinearFormat, ProductTimes, Width
from dtrain.tools.bench.tables import describe_machine, final_loss, peak, ratios, spread, state, step_ms
from dtrain.tools.tables import Column, markdown_table

_PRODUCTS_IN = {"output": 1, "input gradient": 1, "weight gradient": 1}  # else all three

_EMULATED = (
    "FP8 was emulated in FP32 here, because this device has no FP8 Tensor Cores: the times say nothing about one that "
    "has. The losses do: an emulated product has the bits of the real one but for the order of its sums."
)
_NOTES = (
    "Step time: median (least to most) over all timed steps, each as long as on its slowest rank. Speed-up: of the "
    "BF16 turn over the FP8 turn of the same round, median (least to most). Loss: mean over the steps of the last "
    "round; all contenders of a width start from the same weights and see the same data. Products: the three of a "
    "Linear alone, on operands that were cast before; 'all three, with casts' is its forward and backward with all "
    "casts that a micro-batch needs (the weight's come once a step and are not in it). TFLOP/s counts a product of "
    "[M, K] and [K, N] as 2 M N K."
)


def describe_float8(results: Float8Results) -> str:
    """Everything about one run: the race, the formats and the products of each width, and what the columns mean."""
    bench = results.config["bench"]
    threads = bench["threads_per_rank"]
    facts = [
        f"`{results.command}`",
        f"{results.date}, {describe_machine(results.host)}.",
        f"{results.tokens_per_rank:,} tokens a rank and step, {bench['ranks']} rank{'s' * (bench['ranks'] > 1)}, "
        f"{threads} thread{'s' * (threads > 1)} a rank. {bench['rounds']} rounds of {bench['steps']} steps, contenders "
        f"in turn.",
    ]
    if results.emulated:
        facts.append(_EMULATED)
    widths = [text for width in results.widths for text in _describe_width(width, results)]
    return "\n\n".join([*facts, *widths, _NOTES])


def _describe_width(width: Width, results: Float8Results) -> list[str]:
    footprint = width.entries[0].footprint
    parts = [
        f"**Width {width.hidden_dim}**: {compact(footprint.num_parameters)} parameters "
        f"({footprint.num_parameters:,}), on {footprint.device}.",
        markdown_table(_columns(width, results), width.entries),
        *(f"Did not run: {absence.reason}." for absence in width.absences),
    ]
    alike: dict[str, list[str]] = {}  # by table, the contenders that it is true of
    for entry in width.entries:
        if entry.footprint.linears:
            alike.setdefault(_formats(entry.footprint.linears), []).append(entry.contender.name)
    for text, names in alike.items():
        parts += [f"Linears of {', '.join(names)}:", text]
    return [*parts, _products(width.products)] if width.products else parts


def _columns(width: Width, results: Float8Results) -> list[Column[Entry]]:
    low = next((entry for entry in width.entries if entry.contender.precision == "bf16"), None)

    def tokens_per_s(entry: Entry) -> str:
        return compact(results.tokens_per_rank * entry.contender.ranks / step_ms(entry) * 1000)

    columns: list[Column[Entry]] = [
        ("contender", lambda entry: entry.contender.name),
        ("step ms", lambda entry: spread([value for turn in entry.turns for value in turn.step_ms], 1)),
        ("tokens/s", tokens_per_s),
        ("state MiB a rank", state),
        ("peak MiB a rank", peak),
        ("loss", lambda entry: f"{final_loss(entry):.4f}"),
        ("load", lambda entry: f"{median(turn.load for turn in entry.turns):.1f}"),
    ]
    if low is None:
        return columns
    loss = final_loss(low)
    return [
        *columns,
        ("loss off bf16's", lambda entry: f"{100 * (final_loss(entry) / loss - 1):+.2f} %"),
        ("speed-up over bf16", lambda entry: spread([1 / ratio for ratio in ratios(entry, low)], 3)),
    ]


def _formats(linears: list[LinearFormat]) -> str:
    """A row for each shape, format and reason; layers that repeat are counted."""
    counts = Counter((linear.out_features, linear.in_features, linear.format, linear.reason) for linear in linears)
    first = {
        (linear.out_features, linear.in_features, linear.format, linear.reason): linear.name
        for linear in reversed(linears)
    }
    columns: list[Column[tuple[int, int, str, str]]] = [
        ("first of them", lambda row: first[row]),
        ("Linears", lambda row: str(counts[row])),
        ("weight", lambda row: f"{row[0]} x {row[1]}"),
        ("format", lambda row: row[2]),
        ("because", lambda row: row[3]),
    ]
    return markdown_table(columns, list(counts))


def _products(products: list[ProductTimes]) -> str:
    low, *recipes = products[0].ms

    def speed_up(product: ProductTimes, recipe: str) -> str:
        pairs = zip(product.ms[low], product.ms[recipe], strict=True)
        return spread([before / after for before, after in pairs], 2)

    columns: list[Column[ProductTimes]] = [
        ("product", lambda product: product.product),
        ("M x N x K", _sizes),
        (f"{low} ms", lambda product: f"{median(product.ms[low]):.3f}"),
        ("TFLOP/s", lambda product: f"{_tflops(product, low):.3g}"),
    ]
    for name in recipes:
        columns += [
            (f"{name} ms", lambda product, name=name: f"{median(product.ms[name]):.3f}"),  # type: ignore[misc]
            ("TFLOP/s", lambda product, name=name: f"{_tflops(product, name):.3g}"),  # type: ignore[misc]
            (f"{name} speed-up", lambda product, name=name: speed_up(product, name)),  # type: ignore[misc]
        ]
    return markdown_table(columns, products)


def _sizes(product: ProductTimes) -> str:
    rows, out, inner = product.rows, product.out_features, product.in_features
    sizes = {"input gradient": (rows, inner, out), "weight gradient": (out, inner, rows)}
    return " x ".join(map(str, sizes.get(product.product, (rows, out, inner))))


def _tflops(product: ProductTimes, contender: str) -> float:
    flops = 2.0 * product.rows * product.out_features * product.in_features * _PRODUCTS_IN.get(product.product, 3)
    return flops / median(product.ms[contender]) / 1e9
