"""Tables from results, in Markdown, and the document that holds them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from dtrain.errors import BenchError
from dtrain.telemetry.console import compact
from dtrain.telemetry.metrics import write_atomically
from dtrain.tools.bench.float8_report import describe_float8
from dtrain.tools.bench.overhead import describe_overheads
from dtrain.tools.bench.records import AnyResults, Entry, Float8Results, Results, Timings
from dtrain.tools.bench.tables import describe_machine, final_loss, peak, ratios, spread, state, step_ms
from dtrain.tools.bench.timing import describe_timings
from dtrain.tools.bench.vote import describe_votes
from dtrain.tools.tables import Column, markdown_table

LOSS_TOLERANCE = 0.02
"""How far the final losses of contenders with equal data may be apart, relative; beyond it a row is WRONG.

Rounding differs between them (BF16 replicas or autocast, order of sums), so training drifts a little; a wrong gradient
is far outside.
"""

_FAMILIES = ("fsdp2", "deepspeed")  # whose fastest variant is compared with, beside the best peer


def is_wrong(entry: Entry, entries: Sequence[Entry]) -> bool:
    """Whether the final loss is far from that of the first contender which trained on the same data."""
    if entry.contender.is_floor:
        return False
    reference = next(
        other for other in entries if other.contender.ranks == entry.contender.ranks and not other.contender.is_floor
    )
    own, expected = final_loss(entry), final_loss(reference)
    return not abs(own - expected) <= LOSS_TOLERANCE * abs(expected)


def best(entries: Sequence[Entry], prefix: str = "") -> Entry | None:
    """The one with the least median step time among the peers on several ranks whose name begins with ``prefix``.

    One whose losses are wrong is fast for nothing and does not count. None where there is no such peer.
    """
    peers = [
        entry
        for entry in entries
        if entry.contender.engine != "plain"
        and not entry.contender.is_dtrain
        and entry.contender.pair is None
        and entry.contender.name.startswith(prefix)
        and not is_wrong(entry, entries)
    ]
    return min(peers, key=step_ms, default=None)


def describe(results: AnyResults) -> str:
    """Everything about one run in Markdown: what was run, the table, and what its columns leave open."""
    if isinstance(results, Timings):
        return describe_timings(results)
    if isinstance(results, Float8Results):
        return describe_float8(results)
    bench, entries = results.config["bench"], results.entries
    one = entries[0].footprint
    columns = _COLUMNS[results.suite](results)
    facts = [
        f"`{results.command}`",
        f"{results.date}, {describe_machine(results.host)}.",
        f"{compact(one.num_parameters)} parameters ({one.num_parameters:,}), {results.tokens_per_rank:,} tokens a rank "
        f"and step, {bench['threads_per_rank']} thread{'s' if bench['threads_per_rank'] > 1 else ''} a rank, on "
        f"{one.device}. {bench['rounds']} rounds of {bench['steps']} steps, contenders in turn.",
    ]
    absences = [f"Did not run: {absence.reason}." for absence in results.absences]
    votes = describe_votes(entries) if results.suite == "vote" else []
    comparisons = [*_speed_ups(entries), *describe_overheads(entries), *votes]
    return "\n\n".join([*facts, markdown_table(columns, entries), *absences, *comparisons, *_notes(results)])


def _engine_columns(results: Results) -> list[Column[Entry]]:
    peers = [entry for entry in results.entries if entry.contender.engine == "plain"]
    versus: list[Column[Entry]] = [
        (f"step / {peer.contender.name}", lambda entry, peer=peer: spread(ratios(entry, peer), 3))  # type: ignore[misc]
        for peer in peers
    ]
    return [
        ("contender", lambda entry: entry.contender.name),
        ("ranks", lambda entry: str(entry.contender.ranks)),
        *_common(results),
        *versus,
        ("first step s", lambda entry: f"{entry.first_step_s:.1f}"),
    ]


def _precision_columns(results: Results) -> list[Column[Entry]]:
    versus: list[Column[Entry]] = [
        ("speed-up over fp32", lambda entry, fp32=fp32: spread([1 / ratio for ratio in ratios(entry, fp32)], 2))  # type: ignore[misc]
        for fp32 in results.entries
        if fp32.contender.name == "fp32"
    ]
    return [("precision", lambda entry: entry.contender.name), *_common(results), *versus]


def _vote_columns(results: Results) -> list[Column[Entry]]:
    unscaled = {entry.contender.precision: entry for entry in results.entries if entry.contender.loss_scale == "none"}

    def over_none(entry: Entry) -> str:
        other = unscaled.get(entry.contender.precision)
        return "not measured" if other is None else spread(ratios(entry, other), 4)

    return [
        ("precision, loss scale", lambda entry: entry.contender.name),
        *_common(results),
        ("step / loss scale none", over_none),
    ]


_COLUMNS = {"engine": _engine_columns, "precision": _precision_columns, "vote": _vote_columns}


def _speed_ups(entries: Sequence[Entry]) -> list[str]:
    """How many times as fast as the best peer, FSDP2 and DeepSpeed the native engine is on as many ranks."""
    overall = best(entries)
    if overall is None:
        return []
    rivals = {rival.contender.name: rival for prefix in ("", *_FAMILIES) if (rival := best(entries, prefix))}
    own = [
        entry
        for entry in entries
        if entry.contender.engine == "native" and entry.contender.ranks == overall.contender.ranks
    ]
    columns: list[Column[Entry]] = [
        ("contender", lambda entry: entry.contender.name),
        *(
            (f"speed-up over {name}", lambda entry, rival=rival: spread(ratios(rival, entry), 3))
            for name, rival in rivals.items()
        ),
    ]
    said = (
        f"Best peer by median step time: {overall.contender.name}, {step_ms(overall):.1f} ms. The native "
        "engine's speed-up by round, also over the fastest variant of FSDP2 and of DeepSpeed:"
    )
    return [said, markdown_table(columns, own)] if own else [said.partition(". The native")[0] + "."]


def _common(results: Results) -> list[Column[Entry]]:
    def tokens_per_s(entry: Entry) -> str:
        return compact(results.tokens_per_rank * entry.contender.ranks / step_ms(entry) * 1000)

    def loss(entry: Entry) -> str:
        return f"{final_loss(entry):.4f}{' WRONG' if is_wrong(entry, results.entries) else ''}"

    return [
        ("step ms", lambda entry: spread([value for turn in entry.turns for value in turn.step_ms], 1)),
        ("CPU ms, all ranks", _cpu_ms),
        ("tokens/s", tokens_per_s),
        ("state MiB a rank", state),
        ("peak MiB a rank", peak),
        ("loss", loss),
        ("load", lambda entry: f"{median(turn.load for turn in entry.turns):.1f}"),
    ]


def _cpu_ms(entry: Entry) -> str:
    spent = [value for turn in entry.turns for value in turn.cpu_ms]
    return f"{median(spent):.1f}" if spent else "not measured"


def _notes(results: Results) -> list[str]:
    notes = [
        "Step time: median (least to most) over all timed steps, each as long as on its slowest rank; ratios: median "
        "(least to most) over the rounds. Loss: mean over the steps of the last round; contenders with the same number "
        f"of ranks saw the same data and must agree within {LOSS_TOLERANCE:.0%}. Load: the machine's 1-minute average, "
        "the benchmark's own processes included. CPU: median processor time of a step, summed over ranks and threads. "
        "State: bytes of the distinct storages after a step, and against the ZeRO formula in force; gradients that "
        "are freed by then are not in it."
    ]
    formulas = {
        f"{entry.contender.name}: {_formula(entry)}": None for entry in results.entries if entry.footprint.formula
    }
    notes.append(
        "ZeRO formula in force, bytes a parameter on one rank:\n\n" + "\n".join(f"- {line}" for line in formulas)
    )
    if results.train_starts_s:
        seconds = spread(results.train_starts_s, 1)
        notes.append(
            f"`dtrain train`, command to the end of the first step: {seconds} s ({len(results.train_starts_s)} starts)."
        )
    return notes


def _formula(entry: Entry) -> str:
    formula, numel = entry.footprint.formula or {}, entry.footprint.num_parameters
    parts = " + ".join(f"{kind} {size / numel:.2f}" for kind, size in formula.items())
    return f"{parts} = {sum(formula.values()) / numel:.2f}"


def update_document(document: Path, results: Mapping[str, AnyResults]) -> None:
    """Puts the description of each results file between its markers in ``document``; adds markers that are missing.

    The markers are comments, ``<!-- results NAME -->`` and ``<!-- end NAME -->``; all else stays as it is.

    Raises:
        BenchError: the folder of ``document`` is not there, or a marker has lost its end.
    """
    if not document.parent.is_dir():
        raise BenchError(f"{document.parent} is not a folder; set bench.docs=PATH to the document to write")
    text = document.read_text(encoding="utf-8") if document.exists() else "# Benchmarks\n"
    for name, result in results.items():
        begin, end = f"<!-- results {name} -->", f"<!-- end {name} -->"
        if begin not in text:
            text = f"{text.rstrip()}\n\n## {name}\n\n{begin}\n{end}\n"
        if end not in text.partition(begin)[2]:
            raise BenchError(f"{document}: '{begin}' has no '{end}' after it; restore the marker")
        block = f"{begin}\n\n{describe(result)}\n\n{end}"
        text = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, block=block: block, text, flags=re.S)  # type: ignore[misc]
    write_atomically(document, text)
