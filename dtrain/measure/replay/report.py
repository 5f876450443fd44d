"""Prints the summary of a replay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dtrain.measure.replay.records import (
    GRADIENTS,
    REPORT_FILE,
    GradientRecord,
    MicroBatchRecord,
    ReplayReport,
    culprit_from_dict,
    micro_batch_file,
)
from dtrain.precision.formats import FP16
from dtrain.precision.histogram import Histogram, share
from dtrain.tools.tables import Table, plural, show

_NUM_GRADIENTS = 10
_NUM_MICRO_BATCHES = 16
_NUM_SAMPLES = 8  # of a micro-batch whose ids are shown
_TEXT_LENGTH = 32


def show_report(report: ReplayReport, out: Path, seconds: float) -> None:
    print("\n".join(summary_lines(report, seconds)), end="\n\n")
    show([micro_batch_table(report), gradient_table(report)])
    files = f"{REPORT_FILE}, {micro_batch_file(0)}.{{json,safetensors}} ..., {GRADIENTS}.{{json,safetensors}}"
    is_below = out.is_relative_to(Path.cwd())
    print(f"{out.relative_to(Path.cwd()) if is_below else out}: {files}", flush=True)


def summary_lines(report: ReplayReport, seconds: float) -> Iterator[str]:
    result, last = report.result, report.result.steps[-1]
    first = result.steps[0].step
    steps = f"step {first}" if first == last.step else f"steps {first} to {last.step}"
    recorded = "" if report.world_size is None else f" (the run had {report.world_size})"
    begin = "the seed" if result.checkpoint is None else Path(result.checkpoint).name
    yield f"replayed {steps} of {report.run} from {begin} on {plural(report.ranks, 'rank')}{recorded}, {seconds:.1f} s"
    yield from _comparison(report)
    state = "applied" if last.applied else f"skipped: {last.reason}"
    numbers = f"loss {_number(last.loss)}  grad_norm {_number(last.grad_norm)}  loss_scale {last.loss_scale:g}"
    yield f"step {last.step}: {state}  {numbers}"
    if report.culprit is not None:
        yield f"culprit: {culprit_from_dict(report.culprit)}"
    if report.differing_fields:
        text = "none" if report.recorded is None else str(culprit_from_dict(report.recorded))
        yield f"culprit differs from the recorded one in {', '.join(report.differing_fields)}; recorded: {text}"
    elif report.recorded is not None:
        yield f"culprit: the same as in failures/step-{last.step}.json"
    yield from (f"note: {note}" for note in report.notes)


def _comparison(report: ReplayReport) -> Iterator[str]:
    losses = [item for item in report.differences if item.field == "loss"]
    steps = plural(report.num_compared, "logged step")
    if not report.num_compared:
        yield "losses: the run has logged none of these steps"
    elif not report.differences:
        yield f"losses, gradient norms and loss scales of {steps}: equal bit for bit"
    else:
        worst = max(report.differences, key=lambda item: item.relative)
        first = report.differences[0]
        yield (
            f"{len(losses)} losses of {steps} differ; first: {first.field} of step {first.step} is {first.replayed!r}, "
            f"logged {first.logged!r}; largest relative difference {worst.relative:.2g} ({worst.field} of step "
            f"{worst.step})"
        )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def micro_batch_table(report: ReplayReport) -> Table:
    world_size = report.world_size or report.ranks

    def text(record: MicroBatchRecord) -> str:
        texts = ", ".join(record.text)
        shown = " ".join("".join(c if c.isprintable() and c != "|" else " " for c in texts).split())
        return shown if len(shown) <= _TEXT_LENGTH else f"{shown[: _TEXT_LENGTH - 3]}..."

    def samples(record: MicroBatchRecord) -> str:
        more = len(record.samples) - _NUM_SAMPLES
        return " ".join(map(str, record.samples[:_NUM_SAMPLES])) + (f" and {more} more" if more > 0 else "")

    columns = [
        ("file", lambda r: micro_batch_file(r.index)),
        ("rank, micro-batch", lambda r: f"{r.index % world_size}, {r.index // world_size}"),
        ("samples", samples),
        ("loss", lambda r: _number(r.loss)),
        ("first not finite in forward", lambda r: r.first_nonfinite or "-"),
        ("text", text),
    ]
    # those that went wrong first
    records = sorted(report.result.micro_batches, key=lambda r: (r.loss is not None and not r.first_nonfinite, r.index))
    shown = sorted(records[:_NUM_MICRO_BATCHES], key=lambda r: r.index)
    some = "" if len(shown) == len(records) else f"; {len(shown)} of {len(records)}"
    return Table.of(f"Micro-batches of step {report.step}{some}", columns, shown)


def gradient_table(report: ReplayReport) -> Table:
    """The gradients that are not finite, then the largest."""
    scale = report.result.steps[-1].loss_scale

    def flushed(record: GradientRecord) -> str:
        histogram = Histogram.from_dict(record.histogram)
        return f"{100 * share(histogram.flushed(FP16), histogram.num_nonzero):.2f} %"

    def largest(record: GradientRecord) -> float:
        return max(abs(record.min or 0.0), abs(record.max or 0.0))

    ordered = sorted(report.result.gradients, key=lambda r: (-(r.num_inf + r.num_nan), -largest(r)))
    columns = [
        ("parameter", lambda r: r.name),
        ("Inf", lambda r: str(r.num_inf)),
        ("NaN", lambda r: str(r.num_nan)),
        ("largest finite", lambda r: f"{largest(r):.3g}"),
        ("norm", lambda r: _number(r.norm)),
        ("flushed by FP16 unscaled", flushed),
    ]
    title = f"Gradients of step {report.step}, unscaled (loss scale {scale:g}); the worst {_NUM_GRADIENTS}"
    return Table.of(title, columns, ordered[:_NUM_GRADIENTS])
