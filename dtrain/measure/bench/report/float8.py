"""The report on the FP8 suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from statistics import median

from dtrain.measure.bench.records import CaseResult, LinearFormat, ProductTimes, TrainingResults
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


def describe_float8(results: TrainingResults) -> Report:
    bench = results.config["bench"]
    ranks, threads = plural(bench["ranks"], "rank"), plural(bench["threads_per_rank"], "thread")
    facts = [
        *origin(results),
        f"{results.tokens_per_rank:,} tokens a rank and step, {ranks}, {threads} a rank. {bench['rounds']} rounds of "
        f"{bench['steps']} steps.",
        *([_EMULATED] if any(result.footprint.emulates_float8 for result in results.cases) else []),
        *(f"Did not run: {failure.reason}." for failure in results.failures),
    ]
    tables = [_steps_table(results)]
    for width in dict.fromkeys(result.case.width for result in results.cases):
        by_formats: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for result in results.cases:
            if result.case.width == width and result.footprint.linears:
                by_formats.setdefault(_format_rows(result.footprint.linears), []).append(result.case.name)
        for rows, names in by_formats.items():
            tables.append(Table(f"Linears at width {width}, {', '.join(names)}", _FORMAT_COLUMNS, rows))
        if products := [product for product in results.products if product.width == width]:
            tables.append(_products_table(products))
    return Report(facts, tables, [_NOTES])


def _steps_table(results: TrainingResults) -> Table:
    bf16 = {result.case.width: result for result in timed(results.cases) if result.case.precision == "bf16"}

    def against_bf16(result: CaseResult, text: Callable[[CaseResult], str]) -> str:
        return text(bf16[result.case.width]) if result.case.width in bf16 else "not measured"

    columns: list[Column[CaseResult]] = [
        ("width", lambda own: str(own.case.width)),
        ("parameters", lambda own: compact(own.footprint.num_parameters)),
        ("case", lambda own: title(own, results)),
        ("step ms", lambda own: spread(all_steps_ms(own), 1)),
        ("tokens/s", lambda own: tokens_per_s(own, results)),
        ("state MiB a rank", state),
        ("peak MiB a rank", peak),
        ("load", load),
        ("loss", lambda own: f"{final_loss(own):.4f}"),
        (
            "loss against bf16",
            lambda own: against_bf16(own, lambda bf16: f"{100 * (final_loss(own) / final_loss(bf16) - 1):+.2f} %"),
        ),
        (
            "speed-up over bf16",
            lambda own: against_bf16(own, lambda bf16: spread([1 / ratio for ratio in ratios(own, bf16)], 3)),
        ),
    ]
    return Table.of("Steps and memory", columns, timed(results.cases))


def _format_rows(linears: Sequence[LinearFormat]) -> tuple[tuple[str, ...], ...]:
    """Returns a row for each shape, format and reason; repeated layers are counted."""
    equal: dict[tuple[str, ...], list[str]] = {}
    for linear in linears:
        cells = (f"{linear.out_features} x {linear.in_features}", linear.format, linear.reason)
        equal.setdefault(cells, []).append(linear.name)
    return tuple((names[0], str(len(names)), *cells) for cells, names in equal.items())


def _products_table(products: Sequence[ProductTimes]) -> Table:
    baseline, *recipes = products[0].ms

    def tflops(product: ProductTimes, case: str) -> str:
        return f"{2.0 * prod(product.sizes) * product.count / median(product.ms[case]) / 1e9:.3g}"

    def speed_up(product: ProductTimes, recipe: str) -> str:
        pairs = zip(product.ms[baseline], product.ms[recipe], strict=True)
        return spread([before / after for before, after in pairs], 2)

    columns: list[Column[ProductTimes]] = [
        ("product", lambda product: product.product),
        ("M x N x K", lambda product: " x ".join(map(str, product.sizes))),
    ]
    for name in (baseline, *recipes):
        columns += [
            (f"{name} ms", lambda product, name=name: f"{median(product.ms[name]):.3f}"),  # type: ignore[misc]
            ("TFLOP/s", lambda product, name=name: tflops(product, name)),  # type: ignore[misc]
        ]
        if name in recipes:
            columns.append((f"{name} speed-up", lambda product, name=name: speed_up(product, name)))  # type: ignore[misc]
    return Table.of(f"Products at width {products[0].width}", columns, products)
