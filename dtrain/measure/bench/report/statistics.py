"""The figures that several reports show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from dtrain.measure.bench.records import CaseResult, TrainingResults
from dtrain.telemetry.texts import compact


def spread(values: Sequence[float], digits: int) -> str:
    """Formats median (least to most)."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def ratios(result: CaseResult, baseline: CaseResult) -> list[float]:
    """Returns ``result``'s step time over ``baseline``'s in each round, medians of the round's steps.

    If their micro-batches differ, it is the time of a sequence.
    """
    sizes = (result.micro_batch or 1) / (baseline.micro_batch or 1)
    pairs = zip(result.rounds, baseline.rounds, strict=False)  # of a run that was ended
    return [median(own.step_ms) / median(other.step_ms) / sizes for own, other in pairs]


def cpu_ratios(result: CaseResult, baseline: CaseResult) -> list[float]:
    """Returns ``result``'s processor time of a step over ``baseline``'s in each round, as ``ratios``."""
    pairs = zip(result.rounds, baseline.rounds, strict=False)  # of a run that was ended
    return [median(own.cpu_ms) / median(other.cpu_ms) for own, other in pairs]


def timed(results: Sequence[CaseResult]) -> list[CaseResult]:
    """Returns those with a round; a run that was ended may have cases without one."""
    return [result for result in results if result.rounds]


def all_steps_ms(result: CaseResult) -> list[float]:
    return [value for timed in result.rounds for value in timed.step_ms]


def step_ms(result: CaseResult) -> float:
    return median(all_steps_ms(result))


def final_loss(result: CaseResult) -> float:
    """Returns the mean loss of the last round; NaN if one of its steps had none."""
    losses = [math.nan if loss is None else loss for loss in result.rounds[-1].losses]
    return sum(losses) / len(losses)


def tokens_per_s(result: CaseResult, results: TrainingResults) -> str:
    tokens = results.tokens_per_rank * result.case.ranks
    if result.micro_batch is not None:
        tokens = tokens * result.micro_batch // results.config["bench"]["micro_batch_size"]
    return compact(tokens / step_ms(result) * 1000)


def title(result: CaseResult, results: TrainingResults) -> str:
    """Returns the name of the case, and its sequences if those of the suite were too many for its memory."""
    size = results.config["bench"].get("micro_batch_size")
    return result.case.name + ("" if result.micro_batch in (None, size) else f", {result.micro_batch} sequences")


def load(result: CaseResult) -> str:
    return f"{median(timed.load for timed in result.rounds):.1f}"


def state(result: CaseResult) -> str:
    """Formats the MiB of model states on a rank, with their ratio to the ZeRO formula if there is one."""
    footprint = result.footprint
    held = sum(footprint.state.values())
    if footprint.formula is None:
        return _mib(held)
    expected = sum(footprint.formula.values())
    return f"{_mib(held)} = {held / expected:.3f} x {_mib(expected)}"


def peak(result: CaseResult) -> str:
    """Formats the MiB of the highest memory in use on a rank: of its GPU, else of the process."""
    device, rss = result.footprint.peak_device, result.footprint.peak_rss
    return _mib(rss) if device is None else f"{_mib(device)} on the GPU"


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f}"
