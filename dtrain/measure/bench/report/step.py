"""The report on the suite of training steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

from dtrain.config.tool_schema import STEP_CASES
from dtrain.measure.bench.records import CaseResult, Footprint, LinearFormat, TrainingResults
from dtrain.measure.bench.report.report import Report, origin
from dtrain.measure.bench.report.statistics import all_steps_ms, ratios, spread, step_ms, timed, tokens_per_s
from dtrain.measure.bench.targets import is_judged, judge
from dtrain.precision.hardware import rate
from dtrain.telemetry.gpu import GPUState
from dtrain.telemetry.texts import compact
from dtrain.tools.tables import Column, Table

_NOTE = (
    "Step ms: median (least to most) over the windows of {window} steps, in which the host reads no loss. MFU: model "
    "FLOPs over the published dense BF16 peak of the exact device, attention counted by its causal half, or in full. "
    "Speed: tokens/s over those of the baseline in the same round: dtrain, or its eager case for the keys that take "
    "less memory. Loss: first to last of a start. Peaks: of the rounds, without the start. States: bytes on the device "
    "by those of the ZeRO formula. Activations: bytes that a forward leaves for backward. W, MHz, °C: power limit, and "
    "clock and temperature while windows ran."
)


def describe_step(results: TrainingResults) -> Report:
    bench, cases = results.config["bench"], timed(results.cases)
    model = compact(results.cases[0].footprint.num_parameters)
    facts = [
        *origin(results),
        f"{model} parameters, {results.tokens_per_rank:,} tokens a step unless the row says else, on "
        f"{results.cases[0].footprint.device}; batches: {bench['data']}. {bench['rounds']} rounds of {bench['steps']} "
        f"steps, each {'beside the others' if bench['resident'] else 'a start of its own'}.",
        *(f"Did not run: {failure.reason}." for failure in results.failures),
        *(_largest(result) for result in cases if bench["attempts"]),
        *(f"{result.case.name} warned: {text}" for result in cases for text in result.footprint.warnings),
    ]
    tables = [_table(results, cases)]
    for result in cases:
        if linears := result.footprint.linears:
            tables.append(Table(f"Choice for each Linear, {result.case.name}", _CHOICES, _choices(linears)))
    return Report(facts, tables, [_NOTE.format(window=bench["window_steps"])], [_line(results, one) for one in cases])


def _table(results: TrainingResults, cases: Sequence[CaseResult]) -> Table:
    columns: list[Column[CaseResult]] = [
        ("case", lambda result: result.case.name),
        ("sequences", lambda result: str(result.micro_batch)),
        ("step ms", lambda result: spread(all_steps_ms(result), 1)),
        ("tokens/s", lambda result: tokens_per_s(result, results)),
        ("MFU causal, full", lambda result: "unknown" if (found := _mfu(result, results)) is None else found[1]),
        ("W, MHz, °C", _power_and_clock),
        ("speed", lambda result: _speed(result, cases)),
        ("loss", lambda result: _losses(result)),
        ("peak, reserved GiB", lambda result: _gib(result.footprint.peak_device, result.footprint.peak_reserved)),
        ("states GiB, / formula", lambda result: _states(result.footprint)),
        ("activations GiB", lambda result: _gib(result.footprint.activations)),
        ("set-up, first step s", lambda result: f"{result.setup_s or 0:.1f}, {_first_s(result):.1f}"),
        ("graphs, breaks", lambda result: f"{result.footprint.graphs or 0}, {result.footprint.graph_breaks}"),
    ]
    if is_judged(results.host.gpus):
        columns.append(("target", lambda result: _judgment(results, result)))
    return Table.of("Steps", columns, cases)


def figures_of(results: TrainingResults, result: CaseResult) -> dict[str, float]:
    """Returns the figures of a case that have targets, by name."""
    found: dict[str, float] = {}
    if (utilization := _mfu(result, results)) is not None:
        found["MFU"] = utilization[0]
    for other in results.cases:
        if other.case.name != result.case.name and (speeds := [1 / ratio for ratio in ratios(result, other)]):
            found[f"speed over {other.case.name}"] = median(speeds)
            found[f"slower than {other.case.name}"] = 1 / median(speeds) - 1
            if (difference := _loss_difference(result, other)) is not None:
                found[f"loss from {other.case.name}'s"] = difference
    held, formula = _bytes_of_states(result.footprint)
    if formula:
        found["states over the formula"] = held / formula
    return found


def _judgment(results: TrainingResults, result: CaseResult) -> str:
    numel = result.footprint.num_parameters
    return judge(results.suite, result.case.name, figures_of(results, result), numel)


def _line(results: TrainingResults, result: CaseResult) -> str:
    """Returns the conclusion on a case."""
    figures, baseline = figures_of(results, result), _baseline(result)
    parts = [f"{step_ms(result):.1f} ms a step of {result.micro_batch}, {tokens_per_s(result, results)} tokens/s"]
    if (utilization := _mfu(result, results)) is not None:
        parts.append(f"MFU {utilization[1]} (causal, full) at {_power_and_clock(result)} (W, MHz, °C)")
    if (speed := figures.get(f"speed over {baseline}")) is not None:
        parts.append(f"{speed:.3f} x {baseline}")
    if result.case.precision == "fp8":
        formats = [linear.format for linear in result.footprint.linears]
        emulated = ", emulated in FP32, so the time means nothing" if result.footprint.emulates_float8 else ""
        parts.append(f"{formats.count('fp8')} of {len(formats)} Linears in FP8{emulated}")
        difference = figures.get("loss from dtrain's")
        parts.append("loss not compared" if difference is None else f"loss {difference:+.2%} from BF16's")
    return f"{result.case.name}: {'; '.join(parts)}"


def _mfu(result: CaseResult, results: TrainingResults) -> tuple[float, str] | None:
    """Returns the MFU with causal FLOPs, and the text of both; None without a published peak."""
    footprint = result.footprint
    peak = rate(footprint.device, "bf16")
    if peak is None or footprint.flops_causal is None or footprint.flops_full is None:
        return None
    tokens = (result.micro_batch or 1) * results.config["model"]["max_seq_len"]
    per_s = tokens / step_ms(result) * 1000 / peak / 1e12
    return footprint.flops_causal * per_s, f"{footprint.flops_causal * per_s:.1%}, {footprint.flops_full * per_s:.1%}"


def _baseline(result: CaseResult) -> str:
    return "eager" if "blocks" in STEP_CASES[result.case.name] else "dtrain"


def _speed(result: CaseResult, cases: Sequence[CaseResult]) -> str:
    name = _baseline(result)
    other = next((other for other in cases if other.case.name == name), None)
    return "" if other is None or other is result else spread([1 / ratio for ratio in ratios(result, other)], 3)


def _losses(result: CaseResult) -> str:
    first, last = (result.warmup.losses or result.rounds[-1].losses)[0], result.rounds[-1].losses[-1]
    return "not finite" if first is None or last is None else f"{first:.3f} to {last:.3f}"


def _loss_difference(result: CaseResult, other: CaseResult) -> float | None:
    """Returns how far the mean loss of the last quarter is from the other case's, relatively, on the same data."""
    own, expected = (one.rounds[-1].losses if one.rounds else [] for one in (result, other))
    if result.micro_batch != other.micro_batch or len(own) != len(expected) or None in (*own, *expected) or not own:
        return None
    count = max(1, len(own) // 4)
    return mean(map(float, own[-count:])) / mean(map(float, expected[-count:])) - 1  # type: ignore[arg-type]


def _power_and_clock(result: CaseResult) -> str:
    """Returns power limit, clock and temperature while windows ran, without which a rate says little."""
    state = result.rounds[-1].gpu or GPUState()
    values = (state.power_limit_w, state.sm_clock_mhz, state.temperature_c)
    return ", ".join("unknown" if value is None else f"{value:.0f}" for value in values)


def _first_s(result: CaseResult) -> float:
    return result.first_step_s - (result.setup_s or 0.0)


def _bytes_of_states(footprint: Footprint) -> tuple[int, int]:
    """Returns the bytes of model states on the device, and those by the formula."""
    kinds = [kind for kind in footprint.formula or {} if kind not in footprint.host_kinds]
    return sum(footprint.state[kind] for kind in kinds), sum((footprint.formula or {})[kind] for kind in kinds)


def _states(footprint: Footprint) -> str:
    held, formula = _bytes_of_states(footprint)
    if not footprint.formula:
        return ""
    return f"{held / 2**30:.3f}, {held / formula:.4f}" if formula else "all on the host"


def _gib(*sizes: int | None) -> str:
    return ", ".join(f"{size / 2**30:.2f}" for size in sizes if size)


def _largest(result: CaseResult) -> str:
    footprint = result.footprint
    largest = max([result.micro_batch or 0, *footprint.fitted])
    limit = f"{footprint.unfit} do not" if footprint.unfit else "more was not tried"
    return f"Largest micro-batch, {result.case.name}: {largest} sequences fit, {limit}."


_CHOICES = ("weight", "Linears", "BF16 ms", "FP8 ms", "ratio", "format", "because")


def _choices(linears: Sequence[LinearFormat]) -> list[tuple[str, ...]]:
    """Returns a row for each shape and format of the Linears in FP8 or BF16, counted; times with casts."""
    equal: dict[tuple[str, ...], int] = {}
    for one in linears:
        times = ("not timed" if value is None else f"{value:.3f}" for value in (one.bf16_ms, one.float8_ms))
        is_timed = one.bf16_ms is not None and one.float8_ms is not None
        ratio = f"{(one.float8_ms or 0) / (one.bf16_ms or 1):.2f}" if is_timed else ""
        cells = (f"{one.out_features} x {one.in_features}", *times, ratio, one.format, one.reason)
        equal[cells] = equal.get(cells, 0) + 1
    return [(cells[0], str(count), *cells[1:]) for cells, count in equal.items()]
