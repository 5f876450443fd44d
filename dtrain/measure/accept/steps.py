"""The runs of training steps: which there are, in order of value, and what the page says of them. No torch.

Each run of a case is a process, alone on the GPU. Cases share their baselines: dtrain in BF16 is measured once for its
peers, for FP8, for recomputation and for reproducible sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from typing import Any

from dtrain.config.blocks import Blocks
from dtrain.config.dump import config_to_dict
from dtrain.config.optim import OptimConfig
from dtrain.config.tool_schema import Float8BenchConfig, Float8SuiteConfig
from dtrain.measure.accept.job import CUT, Ended, PartJob
from dtrain.measure.accept.models import MODELS
from dtrain.measure.accept.report import PartReport
from dtrain.measure.bench.peers import PEERS
from dtrain.measure.bench.records import BenchmarkCase, RankJob
from dtrain.measure.bench.report.statistics import spread
from dtrain.precision.hardware import rate
from dtrain.telemetry.texts import compact
from dtrain.tools.tables import Column, Table

DTRAIN, CHUNKED, REPRODUCIBLE = "dtrain", "dtrain, chunked loss", "dtrain, reproducible"
FSDP2, DEEPSPEED, PLAIN = "FSDP2", "DeepSpeed", "plain AMP"
TENSORWISE, ROWWISE = "FP8 tensorwise", "FP8 rowwise"
EAGER, SELECTIVE, FULL, OFFLOAD = "dtrain, eager", "recompute=selective", "recompute=full", "offload=cpu"
_KEYS = (SELECTIVE, FULL, OFFLOAD)


def _dtrain(name: str, precision: str = "bf16", **options: Any) -> BenchmarkCase:
    return BenchmarkCase(name, "native", 1, precision, 2, **options)


_CASES = {
    case.name: case
    for case in (
        _dtrain(DTRAIN),
        _dtrain(CHUNKED),
        _dtrain(REPRODUCIBLE, reproducible=True),
        BenchmarkCase(FSDP2, "fsdp2_no_reshard", 1, "bf16"),  # on one GPU resharding only adds copies
        BenchmarkCase(DEEPSPEED, "deepspeed_2", 1, "bf16"),
        BenchmarkCase(PLAIN, "plain", 1, "bf16"),
        _dtrain(TENSORWISE, "fp8", recipe="tensorwise"),
        _dtrain(ROWWISE, "fp8", recipe="rowwise"),
        _dtrain(EAGER, blocks=Blocks()),  # with blocks the activations are measured
        _dtrain(SELECTIVE, blocks=Blocks(recompute="selective")),
        _dtrain(FULL, blocks=Blocks(recompute="full")),
        _dtrain(OFFLOAD, blocks=Blocks(), offload="cpu"),
    )
}
ORDER = (  # (model, case, run), in order of value; pairs alternate
    ("1.2B", DTRAIN, 0), ("1.2B", FSDP2, 0), ("1.2B", TENSORWISE, 0), ("1.2B", CHUNKED, 0), ("1.2B", DTRAIN, 1),
    ("1.2B", FSDP2, 1), ("1.2B", TENSORWISE, 1), ("1.2B", DEEPSPEED, 0), ("1.2B", REPRODUCIBLE, 0), ("3B", DTRAIN, 0),
    ("3B", FSDP2, 0), ("3B", TENSORWISE, 0), ("1.2B", PLAIN, 0), ("3B", DTRAIN, 1), ("3B", FSDP2, 1),
    ("1.2B", ROWWISE, 0), ("1.2B", DEEPSPEED, 1), ("3B", TENSORWISE, 1), ("1.2B", EAGER, 0), ("1.2B", SELECTIVE, 0),
    ("1.2B", FULL, 0), ("1.2B", OFFLOAD, 0), ("1.2B", ROWWISE, 1), ("1.2B", CHUNKED, 1), ("1.2B", REPRODUCIBLE, 1),
    ("1.2B", PLAIN, 1), ("3B", CHUNKED, 0), ("3B", DEEPSPEED, 0), ("3B", ROWWISE, 0), ("1.2B", DTRAIN, 2),
    ("1.2B", FSDP2, 2), ("3B", PLAIN, 0),
)  # fmt: skip
SMALL_ORDER = tuple(
    ("tiny", name, number)
    for name, number in (
        (DTRAIN, 0), (FSDP2, 0), (TENSORWISE, 0), (CHUNKED, 0), (DTRAIN, 1), (TENSORWISE, 1), (REPRODUCIBLE, 0),
        (EAGER, 0), (SELECTIVE, 0), (DEEPSPEED, 0), (PLAIN, 0), (FULL, 0), (OFFLOAD, 0), (ROWWISE, 0),
    )
)  # fmt: skip
GRAPHS = (DTRAIN, TENSORWISE, FSDP2, CHUNKED)
"""Cases whose compiled blocks differ."""

_GIB_OF_SIZES = 77.0  # less than an 80 GB card shows
_SIZES = {"1.2B": 3, "3B": 1, "tiny": 2}  # sequences that fit there beside FP32 logits, in every engine
_CHUNKED_SIZES = {"1.2B": 6, "3B": 1, "tiny": 2}
_EAGER_SIZES = {"1.2B": 2, "3B": 1, "tiny": 2}
_STATE_BYTES = 18  # a parameter: compute 2, main grad 4, master 4, moments 8
_PARAMETERS = {"1.2B": 1.24e9, "3B": 3.2e9, "tiny": 1e5}
_ATTEMPTS = 6
_LIMIT_S, _PEER_LIMIT_S, _LEAST_S = 70.0, 90.0, 15.0
_MAX_THREADS = 8
_LR = 3e-4
_OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "ALLOC_FAILED")
_NOTE = (
    "Each run is a process of its own, alone on the device: warm-up, then windows of steps timed by events, without a "
    "read of the loss. Run 1 is on random tokens, further runs on text, so that their losses mean something. ms: "
    "median (least to most) over the windows. Blocks are compiled, dtrain's by `model.compile=blocks` and a peer's by "
    "`torch.compile`, unless the case is eager or has a key that takes less memory. The loss is eager, in full or by "
    "chunks (`model.loss_chunk=auto`). MFU: model FLOPs over the published dense BF16 peak of the exact device, "
    "attention counted by its causal half or in full. Speed: tokens/s over those of the baseline's run of the same "
    "number: dtrain, or its eager case for the keys that take less memory. W, MHz: power limit, and clock meanwhile."
)


# -- jobs --------------------------------------------------------------------------------------------------------------


def size_of(model: str, name: str, gib: float) -> int:
    """Returns the sequences of a step on a device of ``gib``; a run that is out of memory halves them."""
    sizes = _CHUNKED_SIZES if name == CHUNKED else _EAGER_SIZES if name in (EAGER, *_KEYS) else _SIZES
    states = _STATE_BYTES * _PARAMETERS[model] / 2**30
    share = (gib - states) / (_GIB_OF_SIZES - states)
    return sizes[model] if model == "tiny" else max(1, int(sizes[model] * share))


def step_job(
    model: str, name: str, number: int, *, device: str, threads: int, size: int, layers: int | None = None
) -> PartJob:
    """Returns the job of one run; with ``layers`` one step of a model of that depth, for its compiled graphs alone."""
    config = MODELS[model]
    if name == CHUNKED:
        config = replace(config, loss_chunk="auto")
    if layers is not None:  # the graphs of the blocks are the same at any depth and vocabulary
        config = replace(config, num_layers=layers, vocab_size=512)
    threads = 1 if device == "cpu" else min(_MAX_THREADS, threads)
    bench = Float8BenchConfig(device=device, threads_per_rank=threads, micro_batch_size=size)
    suite = config_to_dict(Float8SuiteConfig(bench=bench, model=config, optim=OptimConfig(lr=_LR)))
    compiles = layers is not None or (device != "cpu" and name not in (EAGER, *_KEYS))
    options: dict[str, Any] = {"is_compiled": compiles, "warmup": 4, "windows": 3, "steps": 6, "is_text": number > 0}
    if device == "cpu":
        options |= {"warmup": 1, "windows": 2, "steps": 3}
    if layers is not None:
        options |= {"warmup": 1, "windows": 1, "steps": 1}
    if name == EAGER:
        options["attempts"] = 1 if device == "cpu" else _ATTEMPTS
    job = {"rank_job": asdict(RankJob(_CASES[name], suite, "", size)), "micro_batch": size, **options}
    limit = _PEER_LIMIT_S if name == DEEPSPEED else _LIMIT_S
    if layers is not None:
        return PartJob(f"compiled, {name}", "compiled", "step", limit, 2 * limit, {"job": job}, threads)
    title = f"{model}, {name}, run {number + 1}"
    return PartJob(title, "steps", "step", _LEAST_S, limit, {"job": job}, threads, again=_smaller)


def _smaller(job: PartJob, ended: Ended) -> PartJob | None:
    """Returns the job with half of the sequences if this one was out of memory."""
    size = job.options["job"]["micro_batch"]
    if size == 1 or not any(text in " ".join([ended.error, *ended.tail]) for text in _OUT_OF_MEMORY):
        return None
    own = deepcopy({**job.options["job"], "micro_batch": size // 2})
    own["rank_job"]["config"]["bench"]["micro_batch_size"] = size // 2
    return replace(job, options={"job": own})


def is_dtrain(job: str) -> bool:
    """Whether a job of compiled blocks is dtrain's; a peer may fail."""
    return _CASES[job.removeprefix("compiled, ")].is_dtrain


def missing_package(name: str) -> str:
    """Returns why a case cannot run here, or an empty string."""
    case = _CASES[name]
    peer = None if case.is_dtrain else PEERS.get(case.engine)
    return "" if peer is None or peer.is_installed else f"package {peer.package} is not installed"


# -- records -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """A run: ``figures`` are the step's ``CaseFigures``, or None with the reason in ``error``."""

    model: str
    name: str
    number: int
    figures: dict[str, Any] | None
    error: str = ""

    @property
    def micro_batch(self) -> int:
        return int(self.figures["micro_batch"]) if self.figures else 0

    @property
    def step_ms(self) -> float:
        assert self.figures is not None
        return float(median(self.figures["window_ms"]))

    @property
    def tokens_per_s(self) -> float:
        return self.micro_batch * MODELS[self.model].max_seq_len / self.step_ms * 1000

    @property
    def utilization(self) -> tuple[float, float] | None:
        """MFU with causal and with full FLOPs, in [0, 1]; None without a published peak."""
        assert self.figures is not None
        peak = rate(self.figures["device"], "bf16")
        if peak is None:
            return None
        per_s = self.tokens_per_s / peak / 1e12
        return self.figures["flops_causal"] * per_s, self.figures["flops_full"] * per_s


def records_of(ended: Sequence[Ended]) -> list[Record]:
    """Reads model, case and number from the names of the jobs."""
    records = []
    for found in ended:
        label, number = found.name.rsplit(", run ", 1)
        model, name = label.split(", ", 1)
        records.append(Record(model, name, int(number) - 1, found.results.get("figures"), found.error))
    return records


Groups = Mapping[tuple[str, str], Sequence[Record]]


def by_case(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Groups the records with figures by model and case, in the order of their first runs."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.figures is not None:
            groups.setdefault((record.model, record.name), []).append(record)
    return groups


def speed_ups(records: Sequence[Record], baseline: Sequence[Record]) -> list[float]:
    """Returns tokens/s over the baseline's, run by run; further runs of one of the two do not count."""
    others = {record.number: record for record in baseline}
    pairs = [(record, others[record.number]) for record in records if record.number in others]
    return [record.tokens_per_s / other.tokens_per_s for record, other in pairs]


def speed_up(groups: Groups, model: str, name: str, baseline: str) -> float | None:
    """Returns the median speed-up of a case over another one of the model; None if they have no runs to compare."""
    ratios = speed_ups(groups.get((model, name), []), groups.get((model, baseline), []))
    return median(ratios) if ratios else None


def loss_difference(records: Sequence[Record], baseline: Sequence[Record]) -> float | None:
    """Returns how far the mean loss of the last quarter is from the baseline's, relatively, on the same text.

    None if no runs on text took the same steps, or if a loss is not finite.
    """
    for record in records:
        for other in baseline:
            if record.figures is None or other.figures is None or 0 in (record.number, other.number):
                continue
            own, expected = record.figures["losses"], other.figures["losses"]
            if (record.micro_batch, len(own)) != (other.micro_batch, len(expected)):
                continue
            count = max(1, len(own) // 4)
            if None in (*own[-count:], *expected[-count:]):
                return None
            return float(mean(own[-count:]) / mean(expected[-count:]) - 1)
    return None


def median_record(records: Sequence[Record]) -> Record:
    return sorted(records, key=lambda record: record.tokens_per_s)[len(records) // 2]


def device_states(figures: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the bytes of model states on the device, and those by the formula."""
    kinds = [kind for kind in figures["formula"] if kind not in figures["host_kinds"]]
    return sum(figures["model_states"][kind] for kind in kinds), sum(figures["formula"][kind] for kind in kinds)


def baseline_of(name: str) -> str:
    """Returns the case with which ``name`` is compared."""
    return EAGER if name in (EAGER, *_KEYS) else DTRAIN


# -- the page ----------------------------------------------------------------------------------------------------------


def report(ended: Sequence[Ended]) -> PartReport:
    """Returns the lines on all runs; a peer may fail, which the page says under what was left out."""
    records = records_of(ended)
    groups = by_case(records)
    failures, left_out = [], {}
    for record, found in zip(records, ended, strict=True):
        if not record.error:
            continue
        if found.status == CUT or not _CASES[record.name].is_dtrain:
            left_out[found.name] = record.error
        else:
            failures.append(f"{found.name}: {record.error}")
    return PartReport(_conclusions(groups), failures, left_out, _section(groups, records))


def _conclusions(groups: Groups) -> list[str]:
    lines = []
    for (model, name), records in groups.items():
        record = median_record(records)
        parts = [f"{record.step_ms:.1f} ms a step of {record.micro_batch}, {compact(record.tokens_per_s)} tokens/s"]
        if record.utilization is not None:
            causal, full = record.utilization
            parts.append(f"MFU {causal:.1%} causal, {full:.1%} full at {power_and_clock(record)}")
        baseline = baseline_of(name)
        if name != baseline and (ratio := speed_up(groups, model, name, baseline)) is not None:
            parts.append(f"{ratio:.3f} x {baseline}")
        difference = loss_difference(records, groups.get((model, DTRAIN), []))
        if name in (TENSORWISE, ROWWISE):
            formats = [linear["format"] for linear in (record.figures or {})["linears"]]
            parts.append(f"{formats.count('fp8')} of {len(formats)} Linears in FP8{_emulated(record)}")
            parts.append("loss not compared" if difference is None else f"loss {difference:+.2%} from BF16's")
        lines.append(f"{model}, {name}: {'; '.join(parts)}")
    return lines


def _emulated(record: Record) -> str:
    return ", emulated in FP32, so the time means nothing" if (record.figures or {})["emulates_float8"] else ""


def power_and_clock(record: Record) -> str:
    """Returns power limit and clock during the windows, without which a rate says little."""
    state = (record.figures or {}).get("state") or {}
    watts, clock = state.get("power_limit_w"), state.get("sm_clock_mhz")
    return f"{'unknown' if watts is None else f'{watts:.0f}'} W, {'unknown' if clock is None else f'{clock:.0f}'} MHz"


def _section(groups: Groups, records: Sequence[Record]) -> list[str]:
    columns: list[Column[tuple[tuple[str, str], Sequence[Record]]]] = [
        ("model", lambda row: row[0][0]),
        ("case", lambda row: row[0][1]),
        ("sequences", lambda row: ", ".join(dict.fromkeys(str(record.micro_batch) for record in row[1]))),
        ("ms a step", lambda row: spread([ms for found in _figures(row[1], "window_ms") for ms in found], 1)),
        ("tokens/s", lambda row: compact(median(record.tokens_per_s for record in row[1]))),
        ("MFU causal, full", lambda row: _utilization(median_record(row[1]))),
        ("W, MHz", lambda row: power_and_clock(row[1][-1])),
        ("speed", lambda row: _speed(groups, *row[0])),
        ("loss", lambda row: _loss(row[1][-1])),
        ("peak GiB", lambda row: _gib(row[1], "peak_allocated")),
        ("reserved", lambda row: _gib(row[1], "peak_reserved")),
        ("states GiB, of the formula", lambda row: _states(row[1][-1])),
        ("activations GiB", lambda row: _gib(row[1], "activations")),
        ("set-up, first step s", lambda row: f"{_most(row[1], 'setup_s'):.1f}, {_most(row[1], 'first_step_s'):.1f}"),
        ("graphs, breaks", lambda row: ", ".join(str(_most(row[1], key)) for key in ("graphs", "graph_breaks"))),
    ]
    if not groups:
        return ["No run has figures."]
    lines = [Table.of("Steps", columns, list(groups.items())).markdown(), "", _NOTE, *_largest(groups)]
    warned = {
        f"- {record.name}, {record.model}: {text}": None
        for record in records
        for text in (record.figures or {}).get("warnings", ())
    }
    lines += ["", "dtrain warned:", "", *warned] if warned else []
    for (model, name), own in groups.items():
        if rows := choice_rows(own[-1]):
            names = ("weight", "Linears", "BF16 ms", "FP8 ms", "ratio", "format", "because")
            title = f"Choice for each Linear, {name}, {model}, all three products with the casts:"
            lines += ["", title, "", Table("", names, rows).markdown()]
    return lines


def _largest(groups: Groups) -> list[str]:
    """Returns a line with the largest micro-batch that was tried and fit."""
    lines = []
    for (model, name), records in groups.items():
        for figures in (record.figures or {} for record in records if name == EAGER):
            largest, failed = max([figures["micro_batch"], *figures["fitted"]]), figures["failed"]
            limit = f"{failed} does not" if failed else "more was not tried"
            lines += ["", f"Largest micro-batch, {model}, eager: {largest} sequences fit, {limit}."]
    return lines


def choice_rows(record: Record) -> list[tuple[str, ...]]:
    """Returns a row for each shape and format of the Linears in FP8 or BF16; equal ones are counted."""
    shapes: dict[tuple[Any, ...], int] = {}
    for linear in (record.figures or {}).get("linears", ()):
        size = f"{linear['out_features']} x {linear['in_features']}"
        key = (size, linear["bf16_ms"], linear["float8_ms"], linear["format"], linear["reason"])
        shapes[key] = shapes.get(key, 0) + 1
    return [
        (
            size,
            str(count),
            *("not timed" if value is None else f"{value:.3f}" for value in (bf16, float8)),
            "" if bf16 is None or float8 is None else f"{float8 / bf16:.2f}",
            chosen,
            reason,
        )
        for (size, bf16, float8, chosen, reason), count in shapes.items()
    ]


def _figures(records: Sequence[Record], name: str) -> list[Any]:
    return [record.figures[name] for record in records if record.figures is not None]


def _most(records: Sequence[Record], name: str) -> Any:
    return max(_figures(records, name))


def _gib(records: Sequence[Record], name: str) -> str:
    most = max((value for value in _figures(records, name) if value), default=0)
    return f"{most / 2**30:.2f}" if most else ""


def _utilization(record: Record) -> str:
    return "unknown" if record.utilization is None else "{:.1%}, {:.1%}".format(*record.utilization)


def _speed(groups: Groups, model: str, name: str) -> str:
    ratios = speed_ups(groups[model, name], groups.get((model, baseline_of(name)), []))
    return "" if name == baseline_of(name) or not ratios else spread(ratios, 3)


def _loss(record: Record) -> str:
    losses = (record.figures or {}).get("losses") or [None]
    ends = "not finite" if None in (losses[0], losses[-1]) else f"{losses[0]:.3f} to {losses[-1]:.3f}"
    return ends if record.number else f"{ends} (random)"


def _states(record: Record) -> str:
    if not record.figures or not record.figures["formula"]:
        return ""
    held, formula = device_states(record.figures)
    return f"{held / 2**30:.3f}, {held / formula:.4f}" if formula else "all on the host"
