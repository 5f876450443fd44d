"""The report on the FP8 suite."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from dtrain.measure.bench.records import CaseResult, Float8Results, LinearFormat, ProductTimes, WidthResults
from dtrain.measure.bench.report.report import Report, origin
from dtrain.measure.bench.report.statistics import (
    all_steps_ms,
    final_loss,
    load,
    peak,
    ratios,
    spread,
    state,
    timed,
    title,
    tokens_per_s,
)
from dtrain.telemetry.texts import compact
from dtrain.tools.tables import Column, Table, plural

_EMULATED = (
    "FP8 was emulated in FP32, because this device has no FP8 Tensor Cores: the times say nothing about a device that "
    "has them. The losses do: an emulated product differs from the real one only in the order of its sums."
)
_FORMAT_COLUMNS = ("first of them", "Linears", "weight", "format", "because")
_NOTES = (
    "Step ms: median (least to most) over all timed steps, on the slowest rank. Speed-up: BF16's steps over FP8's of "
    "the same round, median (least to most). Loss: mean over the last round; all cases of a width start from the "
    "same weights and see the same data. Products: the three of a Linear, on operands that were cast before; "
    "'all three, with casts' is its forward and backward with all casts of a micro-batch (the weight's come once a "
    "step and are not in it). TFLOP/s counts a product of [M, K] and [K, N] as 2 M N K."
)


def describe_float8(results: Float8Results) -> Report:
    bench = results.config["bench"]
    ranks, threads = plural(bench["ranks"], "rank"), plural(bench["threads_per_rank"], "thread")
    facts = [
        *origin(results),
        f"{results.tokens_per_rank:,} tokens a rank and step, {ranks}, {threads} a rank. {bench['rounds']} rounds of "
        f"{bench['steps']} steps.",
        *([_EMULATED] if results.emulated else []),
        *(f"Did not run: {failure.reason}." for failure in results.failures),
    ]
    tables = [_steps_table(results)]
    for width in results.widths:
        by_formats: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for result in width.cases:
            if result.footprint.linears:
                by_formats.setdefault(_format_rows(result.footprint.linears), []).append(result.case.name)
        for rows, names in by_formats.items():
            tables.append(Table(f"Linears at width {width.hidden_dim}, {', '.join(names)}", _FORMAT_COLUMNS, rows))
        if width.products:
            tables.append(_products_table(width))
    return Report(facts, tables, [_NOTES])


def _steps_table(results: Float8Results) -> Table:
    Row = tuple[int, CaseResult]
    rows = [(width.hidden_dim, result) for width in results.widths for result in timed(width.cases)]
    bf16 = {width: result for width, result in rows if result.case.precision == "bf16"}

    def loss_difference(row: Row) -> str:
        width, result = row
        if width not in bf16:
            return "not measured"
        return f"{100 * (final_loss(result) / final_loss(bf16[width]) - 1):+.2f} %"

    def speed_up(row: Row) -> str:
        width, result = row
        return spread([1 / ratio for ratio in ratios(result, bf16[width])], 3) if width in bf16 else "not measured"

    columns: list[Column[Row]] = [
        ("width", lambda row: str(row[0])),
        ("parameters", lambda row: compact(row[1].footprint.num_parameters)),
        ("case", lambda row: title(row[1], results)),
        ("step ms", lambda row: spread(all_steps_ms(row[1]), 1)),
        ("tokens/s", lambda row: tokens_per_s(row[1], results)),
        ("state MiB a rank", lambda row: state(row[1])),
        ("peak MiB a rank", lambda row: peak(row[1])),
        ("load", lambda row: load(row[1])),
        ("loss", lambda row: f"{final_loss(row[1]):.4f}"),
        ("loss against bf16", loss_difference),
        ("speed-up over bf16", speed_up),
    ]
    return Table.of("Steps and memory", columns, rows)


def _format_rows(linears: Sequence[LinearFormat]) -> tuple[tuple[str, ...], ...]:
    """Returns a row for each shape, format and reason; repeated layers are counted."""
    equal: dict[tuple[str, ...], list[str]] = {}
    for linear in linears:
        cells = (f"{linear.out_features} x {linear.in_features}", linear.format, linear.reason)
        equal.setdefault(cells, []).append(linear.name)
    return tuple((names[0], str(len(names)), *cells) for cells, names in equal.items())


def _products_table(width: WidthResults) -> Table:
    baseline, *recipes = width.products[0].ms

    def speed_up(product: ProductTimes, recipe: str) -> str:
        pairs = zip(product.ms[baseline], product.ms[recipe], strict=True)
        return spread([before / after for before, after in pairs], 2)

    columns: list[Column[ProductTimes]] = [
        ("product", lambda product: product.product),
        ("M x N x K", _sizes),
        (f"{baseline} ms", lambda product: f"{median(product.ms[baseline]):.3f}"),
        ("TFLOP/s", lambda product: f"{_tflops(product, baseline):.3g}"),
    ]
    for name in recipes:
        columns += [
            (f"{name} ms", lambda product, name=name: f"{median(product.ms[name]):.3f}"),  # type: ignore[misc]
            ("TFLOP/s", lambda product, name=name: f"{_tflops(product, name):.3g}"),  # type: ignore[misc]
            (f"{name} speed-up", lambda product, name=name: speed_up(product, name)),  # type: ignore[misc]
        ]
    return Table.of(f"Products at width {width.hidden_dim}", columns, width.products)


def _sizes(product: ProductTimes) -> str:
    rows, out, inner = product.rows, product.out_features, product.in_features
    sizes = {"input gradient": (rows, inner, out), "weight gradient": (out, inner, rows)}
    return " x ".join(map(str, sizes.get(product.product, (rows, out, inner))))


def _tflops(product: ProductTimes, case: str) -> float:
    num_products = 1 if product.product in ("output", "input gradient", "weight gradient") else 3
    flops = 2.0 * product.rows * product.out_features * product.in_features * num_products
    return flops / median(product.ms[case]) / 1e9
