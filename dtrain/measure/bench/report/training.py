"""Reports on the suites that train: engine, precision, vote, telemetry and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from dtrain.measure.bench.records import CaseResult, TrainingResults
from dtrain.measure.bench.report.first import FIRST_TABLES
from dtrain.measure.bench.report.overhead import OVERHEAD_NOTES, overhead_table
from dtrain.measure.bench.report.report import Report, origin
from dtrain.measure.bench.report.statistics import (
    all_steps_ms,
    final_loss,
    load,
    peak,
    ratios,
    spread,
    state,
    step_ms,
    timed,
    title,
    tokens_per_s,
)
from dtrain.telemetry.texts import compact
from dtrain.tools.tables import Column, Table, plural

LOSS_TOLERANCE = 0.02
"""Largest relative distance of final losses on equal data; beyond it a row is marked WRONG.

Rounding differs between cases (BF16 replicas or autocast, order of sums), so losses drift apart a little. A wrong
gradient moves them much further.
"""

_FAMILIES = ("fsdp2", "deepspeed")  # libraries whose fastest variant is compared with too, beside the fastest peer
_NOTES = (
    "Step ms: median (least to most) over all timed steps, on the slowest rank. Ratios and speed-ups: median (least "
    "to most) over the rounds. State: bytes of the distinct storages after a step, and their ratio to the ZeRO "
    "formula; gradients that are freed by then are not counted. Loss: mean over the last round; cases with the same "
    f"number of ranks see the same data, and a loss more than {LOSS_TOLERANCE:.0%} away is WRONG. CPU ms: median "
    "processor time of a step, summed over ranks and threads. Load: the machine's 1-minute average, the benchmark "
    "included."
)


def describe_training(results: TrainingResults) -> Report:
    bench, footprint = results.config["bench"], results.cases[0].footprint
    results = replace(results, cases=timed(results.cases))
    threads = plural(bench["threads_per_rank"], "thread")
    facts = [
        *origin(results),
        f"{compact(footprint.num_parameters)} parameters ({footprint.num_parameters:,}), {results.tokens_per_rank:,} "
        f"tokens a rank and step, {threads} a rank, on {footprint.device}. "
        f"{bench['rounds']} rounds of {bench['steps']} steps.",
        *(f"Did not run: {failure.reason}." for failure in results.failures),
    ]
    if results.train_starts_s:
        seconds, starts = spread(results.train_starts_s, 1), plural(len(results.train_starts_s), "start")
        facts.append(f"`dtrain train`, from the command to the end of the first step: {seconds} s ({starts}).")
    tables, notes = [_main_table(results)], [_NOTES]
    if results.suite in FIRST_TABLES:
        table, note = FIRST_TABLES[results.suite]
        tables.insert(0, table(results.cases))
        notes.insert(0, note)
    overhead = overhead_table(results.cases)
    if overhead is not None:
        # A run without other peers measures the overhead, so that table comes first.
        tables.insert(0 if bench.get("peers") == [] else 1, overhead)
        notes += OVERHEAD_NOTES
    return Report(facts, [*tables, _details_table(results)], [*notes, *_formulas(results.cases)])


def has_wrong_loss(result: CaseResult, results: Sequence[CaseResult]) -> bool:
    """Whether the final loss is far from that of the first case that trained on the same data."""
    if result.case.is_lower_bound:
        return False
    reference = next(
        other for other in results if other.case.ranks == result.case.ranks and not other.case.is_lower_bound
    )
    own, expected = final_loss(result), final_loss(reference)
    return not abs(own - expected) <= LOSS_TOLERANCE * abs(expected)


def fastest_peer(results: Sequence[CaseResult], prefix: str = "") -> CaseResult | None:
    """Returns the peer with the least median step time whose name begins with ``prefix``, if there is one.

    Peers with a wrong loss, those on one rank and the control do not count.
    """
    peers = [
        result
        for result in results
        if result.case.engine != "plain"
        and not result.case.is_dtrain
        and result.case.baseline is None
        and result.case.name.startswith(prefix)
        and not has_wrong_loss(result, results)
    ]
    return min(peers, key=step_ms, default=None)


def _main_table(results: TrainingResults) -> Table:
    comparisons = {"engine": _engine_columns, "precision": _precision_columns, "vote": _vote_columns}
    compared = comparisons.get(results.suite)
    columns: list[Column[CaseResult]] = [
        ("case", lambda result: title(result, results)),
        ("ranks", lambda result: str(result.case.ranks)),
        ("step ms", lambda result: spread(all_steps_ms(result), 1)),
        *(compared(results.cases) if compared else []),
        ("state MiB a rank", state),
        ("peak MiB a rank", peak),
        ("loss", lambda result: f"{final_loss(result):.4f}{' WRONG' * has_wrong_loss(result, results.cases)}"),
    ]
    return Table.of("Steps and memory", columns, results.cases)


def _engine_columns(results: Sequence[CaseResult]) -> list[Column[CaseResult]]:
    found = (fastest_peer(results, prefix) for prefix in ("", *_FAMILIES))
    peers = {peer.case.name: peer for peer in found if peer is not None}

    def speed_up(result: CaseResult, peer: CaseResult) -> str:
        is_native = result.case.engine == "native" and result.case.ranks == peer.case.ranks
        return spread(ratios(peer, result), 3) if is_native else ""

    def price(result: CaseResult, variant: str) -> str:
        """Returns the ratio to the case that differs in nothing but ``variant``."""
        plain = replace(result.case, **{variant: False})  # type: ignore[arg-type]
        pairs = (ratios(result, other) for other in results if replace(plain, name=other.case.name) == other.case)
        return spread(next(pairs, []), 3) if getattr(result.case, variant) else ""

    found_variants = [name for name in ("reproducible", "graph") if any(getattr(one.case, name) for one in results)]
    return [
        *_step_over_plain(results, ranks=1),
        *((f"step / not {name}", lambda result, name=name: price(result, name)) for name in found_variants),
        *((f"speed-up over {name}", lambda result, peer=peer: speed_up(result, peer)) for name, peer in peers.items()),
    ]


def _step_over_plain(results: Sequence[CaseResult], ranks: int) -> list[Column[CaseResult]]:
    return [
        (f"step / {plain.case.name}", lambda result, plain=plain: spread(ratios(result, plain), 3))  # type: ignore[misc]
        for plain in results
        if plain.case.engine == "plain" and (plain.case.ranks == 1) == (ranks == 1)
    ]


def _precision_columns(results: Sequence[CaseResult]) -> list[Column[CaseResult]]:
    return [
        ("speed-up over fp32", lambda result, fp32=fp32: spread([1 / ratio for ratio in ratios(result, fp32)], 2))  # type: ignore[misc]
        for fp32 in results
        if fp32.case.name == "fp32"
    ]


def _vote_columns(results: Sequence[CaseResult]) -> list[Column[CaseResult]]:
    unscaled = {result.case.precision: result for result in results if result.case.loss_scale == "none"}

    def over_none(result: CaseResult) -> str:
        other = unscaled.get(result.case.precision)
        return "not measured" if other is None else spread(ratios(result, other), 4)

    return [("step / loss scale none", over_none)]


def _details_table(results: TrainingResults) -> Table:
    columns: list[Column[CaseResult]] = [
        ("case", lambda result: result.case.name),
        ("CPU ms, all ranks", _cpu_ms),
        ("tokens/s", lambda result: tokens_per_s(result, results)),
        *(_step_over_plain(results.cases, ranks=2) if results.suite == "engine" else []),
        ("first step s", lambda result: f"{result.first_step_s:.1f}"),
        ("load", load),
    ]
    return Table.of("Details", columns, results.cases)


def _cpu_ms(result: CaseResult) -> str:
    times = [value for timed in result.rounds for value in timed.cpu_ms]
    return f"{median(times):.1f}" if times else "not measured"


def _formulas(results: Sequence[CaseResult]) -> list[str]:
    lines = dict.fromkeys(f"- {result.case.name}: {_formula(result)}" for result in results if result.footprint.formula)
    return ["ZeRO formula, bytes a parameter on one rank:\n\n" + "\n".join(lines)] if lines else []


def _formula(result: CaseResult) -> str:
    formula, numel = result.footprint.formula or {}, result.footprint.num_parameters
    kinds = " + ".join(f"{kind} {size / numel:.2f}" for kind, size in formula.items())
    return f"{kinds} = {sum(formula.values()) / numel:.2f}"
