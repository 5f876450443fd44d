"""The report of one run, or of several, as one HTML file: no script, no request, the same bytes from the same files."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.config.dump import defaults
from dtrain.config.schema import GROUP_OPTIONS, RunConfig
from dtrain.errors import directory_error
from dtrain.telemetry.gpu import GPUState
from dtrain.telemetry.metrics import METRIC, write_atomically
from dtrain.telemetry.report.curves import COLORS, Curve, chart, number
from dtrain.telemetry.report.read import Run, Series, flatten
from dtrain.telemetry.texts import bytes_text

_RATE = "Rate"
_CHARTS = (  # title, fields, logarithmic
    ("Loss", ("loss", "val_loss", "val_loss_ema"), False),
    ("Gradient norm", ("grad_norm",), True),
    ("Learning rate", ("lr",), False),
    ("Loss scale", ("loss_scale",), True),
    (_RATE, ("tokens_per_s",), False),
)
_PHASES = (
    ("data_wait_ms", "data"),
    ("forward_ms", "forward"),
    ("backward_ms", "backward"),
    ("rank_wait_ms", "wait for ranks"),
    ("update_ms", "update"),
)
_LARGEST_PRECISION_ROWS = 8
REPORT_FILE = "report.html"
_OWN_KEYS = ("run_dir", "resume")  # differ in every run


@dataclass(frozen=True)
class Section:
    """A part of the page: a table, charts as SVG, notes."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    charts: Sequence[tuple[str, str]] = ()
    text: str = ""
    picture: str = ""  # as a data URI


def write_report(paths: Sequence[Path], out: Path, *, deep: bool = False) -> None:
    """Writes the report of the runs at ``paths`` to ``out``.

    Args:
        deep: whether checkpoints are hashed whole.

    Raises:
        ConfigError: a path is no run directory, or ``out`` cannot be written.
    """
    text = page([Run.open(path, deep=deep) for path in paths])
    try:
        write_atomically(out, text)
    except OSError as error:
        raise directory_error("out", out.parent, error) from error


def page(runs: Sequence[Run]) -> str:
    """Returns the page. jinja2 escapes all texts; the charts escape their own."""
    from jinja2 import Environment, StrictUndefined  # here, because a run needs it at its end only

    source = resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    single = len(runs) == 1
    sections = list(_sections(runs[0])) if single else list(_comparison(runs))
    return environment.from_string(source).render(
        title=runs[0].name if single else f"{len(runs)} runs",
        subtitle=_subtitle(runs[0]) if single else ", ".join(run.name for run in runs),
        tiles=_tiles(runs[0]) if single else [],
        legend=_legend(runs),
        charts=_charts(runs),
        sections=[section for section in sections if section.rows or section.charts or section.text],
    )


# -- curves ------------------------------------------------------------------------------------------------------------


def _charts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    found = []
    skipped = [skip["step"] for run in runs for skip in run.metrics.skips]
    metrics = dict.fromkeys(name.removesuffix("_ema") for run in runs for name in run.metrics.series)
    own = [
        (name.removeprefix("val_").upper() if len(name) < 9 else name.removeprefix("val_").capitalize(), name)
        for name in metrics
        if METRIC.fullmatch(name)
    ]
    more = [(title, (name, f"{name}_ema"), False) for title, name in own]
    for title, fields, log in [*_CHARTS[:1], *more, *_CHARTS[1:]]:
        curves = [curve for name in fields for curve in _curves(runs, name)]
        if title == "Loss scale" and all((np.asarray(curve.values) == 1.0).all() for curve in curves):
            continue
        marks = skipped if title in ("Loss", "Loss scale") else []
        if title == _RATE:
            title = f"{runs[0].unit.capitalize()} per second"
        svg = chart(title, curves, log=log, marks=marks)
        if svg:
            found.append((title, svg))
    return found


def _curves(runs: Sequence[Run], name: str) -> Iterator[Curve]:
    """Yields a curve for each group of runs; those that differ only in their seed are a band."""
    dashed = name.startswith("val_loss") or name.endswith("_ema")
    for color, group in enumerate(_groups(runs)):
        series = [run.metrics.series[name] for run in group if run.metrics.series.get(name)]
        if not series:
            continue
        label = f"{_group_name(group)} {name}"
        if len(series) == 1:
            yield Curve(label, color, series[0].steps, series[0].values, is_dashed=dashed)
            continue
        tables = [dict(zip(one.steps.tolist(), one.values.tolist(), strict=True)) for one in series]
        steps = sorted(set(tables[0]).intersection(*tables[1:]))
        columns = [[table[step] for table in tables] for step in steps]
        mean = [sum(column) / len(column) for column in columns]
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        yield Curve(f"{label}, mean of {len(series)} seeds", color, steps, mean, low, high, is_dashed=dashed)


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Returns the runs by their configuration without the seed, in the order of the runs."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        own = {key: value for key, value in run.config.items() if key not in (*_OWN_KEYS, "seed")}
        groups.setdefault(repr(sorted(own.items(), key=lambda item: item[0])) if own else run.name, []).append(run)
    return list(groups.values())


def _group_name(group: Sequence[Run]) -> str:
    if len(group) == 1:
        return group[0].name
    return f"{group[0].name} (seeds {', '.join(str(run.config.get('seed')) for run in group)})"


def _legend(runs: Sequence[Run]) -> list[tuple[str, str]]:
    groups = _groups(runs)
    return (
        [(COLORS[index % len(COLORS)], _group_name(group)) for index, group in enumerate(groups)]
        if len(runs) > 1
        else []
    )


# -- one run -----------------------------------------------------------------------------------------------------------


def _subtitle(run: Run) -> str:
    summary, last = run.summary, run.metrics.last
    steps = f"{last.get('step', 0)} of {run.config.get('train.steps', '?')} steps"
    names = [str(run.config[key]) for key in ("model.name", "engine.name") if key in run.config]
    precision = summary.get("precision") or run.config.get("precision.name")
    parts = [run.state, steps, *names, *([str(precision)] if precision else [])]
    return " · ".join(parts)


def _tiles(run: Run) -> list[tuple[str, str]]:
    summary, last = run.summary, run.metrics.last

    def final(name: str) -> float | None:
        values = run.metrics.series[name].values
        return float(values[-1]) if len(values) else None

    tokens_s = summary.get("tokens_per_s") or final("tokens_per_s")
    peaks = run.metrics.series["peak_memory"].values
    tiles = [
        ("loss", _text(final("loss"))),
        ("validation loss", _text(final("val_loss"))),
        *((name.removeprefix("val_"), _text(final(name))) for name in run.metrics.series if METRIC.fullmatch(name)),
        (f"{run.unit} / s", _text(tokens_s)),
        ("MFU", " / ".join(f"{100 * each:.1f} %" for each in _utilizations(run)) or "unknown"),
        ("skipped steps", _text(last.get("skipped_steps", 0))),
        ("peak memory", _bytes(float(max(peaks))) if len(peaks) else "-"),
        ("ranks", _text(summary.get("world_size") or run.environment.get("world_size"))),
    ]
    return [(name, value) for name, value in tiles if value != "-"]


def _sections(run: Run) -> Iterator[Section]:
    yield _what_ran(run)
    columns = ("step", "reason", "loss_scale", "culprit")
    skips = [tuple(_text(skip[name]) for name in columns) for skip in run.metrics.skips]
    notes = [f"{run.metrics.num_skipped} skipped in all", *(f"a hang: failures/{name}" for name in run.hangs)]
    yield Section("Skipped steps", columns, skips, notes)
    yield _time(run)
    yield _memory(run)
    yield _precision(run)
    yield _contract(run)
    yield _checkpoints(run)
    yield _ranks(run)
    environment = dict(flatten(run.environment))
    yield Section("Environment", ("", ""), [(key, _text(value)) for key, value in environment.items()])
    picture = base64.b64encode(run.picture).decode()
    picture = f"data:image/png;base64,{picture}" if picture else ""
    yield Section("Sample", text=run.sample, picture=picture, notes=list(filter(None, [run.picture_note])))


def _what_ran(run: Run) -> Section:
    default = _defaults(run.config)
    rows = [
        (key, _text(value), _text(default[key]) if key in default else "(not a key of this version)")
        for key, value in run.config.items()
        if key not in _OWN_KEYS and default.get(key, _MISSING) != value
    ]
    return Section(
        "What ran", ("key", "value", "default"), rows, ["keys that differ from the defaults of dtrain train"]
    )


_MISSING = object()


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the default of each key, with the options of the groups that the run has chosen."""
    values = defaults(RunConfig)
    for group, options in GROUP_OPTIONS.items():
        chosen = options.get(str(config.get(f"{group}.name")))
        if chosen is not None:
            values[group] = {**defaults(chosen), "name": values[group]["name"]}
    return dict(flatten(values))


def _time(run: Run) -> Section:
    series = run.metrics.series
    step = _mean(series["step_ms"])
    if not step:
        return Section("Time of a step")
    phases = [(label, _mean(series[name])) for name, label in _PHASES if series[name]]
    rows = [(label, f"{value:.2f} ms", f"{100 * value / step:.1f} %") for label, value in phases]
    if len(phases) > 1:
        rest = step - sum(value for _, value in phases)
        rows.append(("other", f"{rest:.2f} ms", f"{100 * rest / step:.1f} %"))
    rows.append(("step", f"{step:.2f} ms", "100.0 %"))
    notes = ["mean over the logged steps without the first, on rank 0"]
    found, rate = _utilizations(run), run.summary.get("tokens_per_s")
    if found and rate:
        in_full = f" ({100 * found[1]:.1f} % if it counts in full)" if len(found) > 1 else ""
        notes.append(
            f"MFU {100 * found[0]:.1f} % = FLOPs of the model for a token x {number(rate)} tokens/s / ranks / peak "
            f"rate of the device in this precision; causal attention counts half{in_full}, recomputation not at all"
        )
        notes.append(f"rank 0's GPU at the end: {GPUState.of(run.summary.get('gpu')).brief}")
    return Section("Time of a step", ("phase", "time", "share"), rows, notes)


def _utilizations(run: Run) -> list[float]:
    """Returns the MFU with causal attention, and with full; nothing if it is unknown."""
    return [mfu for name in ("mfu", "mfu_full") if isinstance(mfu := run.summary.get(name), float)]


def _mean(series: Series) -> float:
    values = series.values[1:] if len(series.values) > 1 else series.values
    return float(values.mean()) if len(values) else 0.0


def _memory(run: Run) -> Section:
    rows = []
    for row in _records(run.memory.get("rows")):
        low, high, measured = row.get("planned_low"), row.get("planned_high"), row.get("measured")
        planned = _bytes(low) if low == high else f"{_bytes(low)} to {_bytes(high)}"
        rows.append((str(row.get("kind")), planned, _bytes(measured)))
    if rows:
        return Section(
            "Memory, planned and measured", ("kind", "planned", "measured"), rows, run.memory.get("notes", [])
        )
    held = run.summary.get("memory") or {}
    return Section("Memory", ("kind", "bytes of rank 0"), [(kind, _bytes(size)) for kind, size in held.items() if size])


def _precision(run: Run) -> Section:
    found = []
    for name, own in (run.precision.get("parameters") or {}).items():
        shares, update = own.get("shares") or {}, own.get("update") or {}
        found.append((shares.get("flushed_fp16") or 0.0, name, own.get("format", ""), shares, update))
    found.sort(key=lambda item: (-item[0], item[1]))
    rows = []
    for _, name, form, shares, update in found[:_LARGEST_PRECISION_ROWS]:
        lost = [*(shares.get(key) for key in ("zeros", "flushed_fp16", "flushed_e4m3")), update.get("lost_bf16")]
        rows.append((name, str(form), *map(_share, lost)))
    step = run.precision.get("step")
    columns = ("parameter", "computed in", "zeros", "FP16 flushes", "E4M3 flushes", "lost without master")
    return Section("Precision", columns, rows, [f"step {step}; the gradients of which FP16 would flush most"])


def _share(value: Any) -> str:
    return f"{100 * value:.2f} %" if isinstance(value, (int, float)) else "-"


def _contract(run: Run) -> Section:
    counts: dict[str, int] = {}
    for module in _records(run.contract.get("modules")):
        if module:
            counts[str(module.get("format"))] = counts.get(str(module.get("format")), 0) + 1
    rows = [(key, _text(value)) for key, value in run.contract.items() if isinstance(value, (str, int, float, bool))]
    rows += [(f"modules in {form}", str(count)) for form, count in sorted(counts.items())]
    return Section("Precision contract", ("", ""), rows)


def _checkpoints(run: Run) -> Section:
    rows = [
        (status.path.name, _bytes(status.num_bytes), _text(status.val_loss), status.problem or "verifies")
        for status in run.checkpoints
    ]
    how = (
        "every byte was hashed"
        if run.deep
        else "manifests, names and sizes were checked; verify=true hashes every byte"
    )
    return Section("Checkpoints", ("checkpoint", "size", "validation loss", "state"), rows, [how])


def _ranks(run: Run) -> Section:
    series, last = run.metrics.series, run.metrics.last
    if not series["busy_median_ms"]:
        return Section("Ranks")
    rows = [
        ("slowest rank", _text(last.get("slowest_rank"))),
        *((label, f"{_mean(series[name]):.2f} ms") for name, label in (
            ("busy_slowest_ms", "busy, slowest rank"), ("busy_median_ms", "busy, median rank"),
            ("busy_spread_ms", "slowest to fastest"))),
    ]  # fmt: skip
    return Section("Ranks", ("", ""), rows, ["a step's time in which a rank does not wait for others"])


# -- several runs ------------------------------------------------------------------------------------------------------


def _comparison(runs: Sequence[Run]) -> Iterator[Section]:
    rows = []
    for run in runs:
        tiles = dict(_tiles(run))
        rows.append((run.name, run.state, *(tiles.get(name, "-") for name in _FIGURES)))
    yield Section("Results", ("run", "state", *_FIGURES), rows)
    keys = [key for run in runs for key in run.config]
    different = [key for key in dict.fromkeys(keys) if len({repr(run.config.get(key)) for run in runs}) > 1]
    table = [(key, *(_text(run.config.get(key)) for run in runs)) for key in different if key not in _OWN_KEYS]
    yield Section("Differences of the configurations", ("key", *(run.name for run in runs)), table)
    environments = [dict(flatten(run.environment)) for run in runs]
    names = [key for key in dict.fromkeys(key for own in environments for key in own) if key != "started"]
    other = [key for key in names if len({repr(own.get(key)) for own in environments}) > 1]
    rows = [(key, *(_text(own.get(key)) for own in environments)) for key in other]
    yield Section("Differences of the environments", ("", *(run.name for run in runs)), rows)


_FIGURES = ("loss", "validation loss", "tokens / s", "MFU", "skipped steps", "peak memory", "ranks")


# -- texts -------------------------------------------------------------------------------------------------------------


def _records(value: Any) -> list[dict[str, Any]]:
    """Returns the mappings in a list that a file should hold."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return str(value)


def _bytes(value: Any) -> str:
    return bytes_text(value) if isinstance(value, (int, float)) else "-"
