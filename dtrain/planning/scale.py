"""``dtrain plan scale``: a step, the start, the memory and a checkpoint at several numbers of ranks, and what binds."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from dtrain.config.engines import Native
from dtrain.planning.memory.plan import FITS, MemoryPlan, memory_of
from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.time.network import Fabric
from dtrain.planning.time.prediction import Assumptions, Prediction, accumulation, assumptions, predict
from dtrain.planning.time.replay import GRADIENTS, PURPOSES, REPLICAS, VOTE, WEIGHTS
from dtrain.telemetry.texts import bytes_range, bytes_text
from dtrain.tools.tables import Column, Table, plural, show

_BINDS = 0.01  # part of a step, or of the elements, from which a limit is named
_COLORS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#999999")  # Okabe and Ito's


@dataclass(frozen=True)
class ScalingPoint(Prediction):
    """A step on some ranks, and what is beside it: the memory of a rank, the job's nodes, the seconds of a checkpoint.

    ``efficiency`` are samples a second of a rank, divided by those of a rank on the fewest ranks. ``shard_size`` is the
    configured one, which may be more than the ranks, or 0.
    """

    memory: MemoryPlan
    nodes: int
    write_s: float
    efficiency: float
    shard_size: int

    @property
    def run(self) -> PlannedRun:
        return self.recorded.run

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by what it consists of."""
        waits = {f"wait: {purpose}": self.step.total(purpose).exposed for purpose in PURPOSES}
        return {"compute": self.step.compute, "slowed by transfers": self.step.slowed, **waits}


def scale(run: PlannedRun, ranks: Sequence[int], assumed: Assumptions, *, is_strong: bool) -> list[ScalingPoint]:
    """Returns ``run``, which is on the first of ``ranks``, at each of them; they ascend.

    If ``is_strong``, the global batch stays, at least a micro-batch for each of the most ranks; else that of each rank.
    Raises as ``with_ranks`` and ``predict``.
    """
    links = assumed.links(run)  # a network that does not fit is an error before anything is recorded
    per_node = links.ranks_per_node if isinstance(links, Fabric) else links.num_ranks
    micro, whole = run.config.train.micro_batch_size, run.config.train.global_batch_size
    kept = ceil(whole / (micro * ranks[-1])) * ranks[-1]  # micro-batches of all ranks
    found: list[ScalingPoint] = []
    best = 0.0
    for count in ranks:
        size = ceil(kept / count) * micro * count if is_strong else whole // run.num_ranks * count
        prediction = predict(with_ranks(run, count, size), assumed)
        recorded, each = prediction.recorded, prediction.targets_per_s / count
        best = best or each
        writers = ceil(recorded.shard_ranks / per_node)  # one replica writes
        point = ScalingPoint(
            **vars(prediction),
            memory=memory_of(recorded),
            nodes=ceil(count / per_node),
            write_s=recorded.saved[1] / (writers * assumed.write_gbps * 1e9),
            efficiency=each / best,
            shard_size=run.config.engine.shard_size or 0,
        )
        found.append(point)
    return found


def with_ranks(run: PlannedRun, ranks: int, global_batch_size: int) -> PlannedRun:
    """Returns ``run`` on ``ranks`` ranks; as many as a replica has, or fewer, are one replica.

    Raises ``ConfigError`` if replicas of ``engine.shard_size`` ranks do not make up ``ranks``.
    """
    config, engine = run.config, run.config.engine
    if isinstance(engine, Native) and (engine.shard_size or 0) >= ranks:
        engine = replace(engine, shard_size=None)
    engine.check_ranks(ranks)
    train = replace(config.train, global_batch_size=global_batch_size)
    return replace(run, config=replace(config, engine=engine, train=train), num_ranks=ranks)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def show_points(points: Sequence[ScalingPoint], *, is_strong: bool) -> None:
    """Prints the tables, the assumptions, and the limits that bind."""
    run = points[0].run
    absent = {f"wait: {name}" for name in PURPOSES if not any(point.step.total(name).nbytes for point in points)}
    steps: list[Column[ScalingPoint]] = [
        ("ranks", lambda point: f"{point.run.num_ranks:,}"),
        ("step ms", lambda point: _ms(point.step.seconds)),
        *((name, lambda point, name=name: _ms(point.parts[name])) for name in points[0].parts if name not in absent),
        ("efficiency", lambda point: f"{point.efficiency:.1%}"),
        (f"{run.task.unit}/s", lambda point: f"{point.targets_per_s:,.0f}"),
    ]
    others: list[Column[ScalingPoint]] = [
        steps[0],
        ("memory of a rank", lambda point: bytes_range(point.memory.low, point.memory.high)),
        ("checkpoint", lambda point: bytes_text(point.recorded.saved[1])),
        ("checkpoint of a rank", lambda point: bytes_text(point.recorded.saved[0])),
        ("written in s", lambda point: f"{point.write_s:.3g}"),
        ("start: transfers s", lambda point: f"{point.startup_s:.3g}"),
        ("vote received", lambda point: f"{point.step.total(VOTE).nbytes / 1e3:,.1f} kB"),
        ("vote ms", lambda point: _ms(point.step.total(VOTE).seconds)),
        ("vote, % of the step", lambda point: f"{point.step.total(VOTE).seconds / point.step.seconds:.2%}"),
    ]
    title = f"A step on {run.device.name}, the same {'global batch' if is_strong else 'batch of each rank'}"
    show([Table.of(title, steps, points), Table.of("Beside the step", others, points)])
    limits = [f"{plural(point.run.num_ranks, 'rank')}: {line}" for point in points for line in remarks(point)]
    print("\n".join([*scale_assumptions(points), *limits]))


def scale_assumptions(points: Sequence[ScalingPoint]) -> list[str]:
    """Returns what the figures rest on, a sentence each."""
    return [
        *assumptions(points[0].run, points[0].assumed, [point.run.num_micro_batches for point in points]),
        "not in these times: congestion, failures, reading data; of the start: processes, the creation of groups and "
        "connections, and compilation",
    ]


def remarks(point: ScalingPoint) -> list[str]:
    """Returns a sentence for each limit that binds; also if ``point`` does not fit, or is not as it is configured."""
    run, recorded, memory, step, ring = point.run, point.recorded, point.memory, point.step, point.ring or point.step
    least = _BINDS * step.seconds
    device, fit = memory.device, memory.fit.replace("may fit", "may not fit")
    used, numel = map(sum, zip(*recorded.elements.values(), strict=True))
    root = sum(seconds for label, seconds in step.waits.items() if label.startswith("root/"))
    sent, ringed = (found.total(GRADIENTS).seconds for found in (step, ring))
    joined, vote, weights = step.total(REPLICAS).exposed, step.total(VOTE).seconds, step.total(WEIGHTS).seconds
    engine, remedies = run.config.engine, ["larger micro-batches"]
    if engine.zero_stage < 3:  # at stage 3 each micro-batch gathers the weights and reduces the gradients
        remedies.append("more of them a step")
    if isinstance(engine, Native) and engine.zero_stage and point.nodes > 1 and engine.shard_size is None:
        remedies.append("engine.shard_size")
    listed = " or ".join(remedies) if len(remedies) < 3 else "{}, {}, or {}".format(*remedies)
    sentences = [
        (
            point.shard_size > run.num_ranks,
            f"one replica, because engine.shard_size={point.shard_size} is more; dtrain train would refuse it",
        ),
        (
            memory.fit != FITS,
            f"{fit} on {device.name} ({bytes_text(device.memory)} for a rank): {bytes_range(memory.low, memory.high)}; "
            "dtrain plan memory proposes changes",
        ),
        (
            step.seconds - ring.seconds > least,
            f"unreduced gradients go by all-to-all, each through a rank's own NIC: {_ms(sent)} ms in flight; a ring "
            f"reduce-scatter of them in FP32 would take {_ms(ringed)} ms, and the step {_ms(ring.seconds)} instead of "
            f"{_ms(step.seconds)} ms",
        ),
        (
            numel - used > _BINDS * used,
            f"shards are whole chunks: {numel - used:,} of {numel:,} elements ({1 - used / numel:.1%}) are padding, "
            "which is sent and stored like the others",
        ),
        (
            root > least,
            "the root group (embedding, head, norms) is gathered before the first block and reduced last: a rank waits "
            f"{_ms(root)} ms for it",
        ),
        (
            joined > least,
            f"the sum over {run.num_ranks // recorded.shard_ranks} replicas (FP32, once a step) is waited for "
            f"{_ms(joined)} ms; more micro-batches a step or a larger engine.shard_size make it weigh less",
        ),
        (
            vote > least,
            f"the vote's gather takes {_ms(vote)} ms, {vote / step.seconds:.1%} of the step, and overlaps with nothing",
        ),
        (
            step.total().seconds > step.compute,
            f"transfers take {_ms(step.total().seconds)} ms ({_ms(weights)} of weights), longer than the computation, "
            f"{_ms(step.compute)} ms; {listed} reduce this",
        ),
    ]
    return [sentence for binds, sentence in sentences if binds]


def to_json(points: Sequence[ScalingPoint], *, is_strong: bool) -> dict[str, Any]:
    """Returns all as plain JSON; times are in seconds."""
    return {
        "assumptions": asdict(points[0].assumed),
        "device": points[0].run.device.name,
        "scaling": "strong" if is_strong else "weak",
        "unit": points[0].run.task.unit,
        "points": [
            {
                "ranks": point.run.num_ranks,
                "nodes": point.nodes,
                "shard_ranks": point.recorded.shard_ranks,
                "micro_batch_size": point.run.config.train.micro_batch_size,
                "micro_batches": point.run.num_micro_batches,
                "step_s": point.step.seconds,
                "compute_s": point.step.compute,
                "slowed_s": point.step.slowed,
                "targets_per_s": point.targets_per_s,
                "efficiency": point.efficiency,
                "transfers": [
                    {"purpose": of, "axis": axis, **asdict(one)} for (of, axis), one in point.step.shares.items()
                ],
                "ring_step_s": None if point.ring is None else point.ring.seconds,
                "memory_bytes": [point.memory.low, point.memory.high],
                "checkpoint_bytes": point.recorded.saved[1],
                "checkpoint_rank_bytes": point.recorded.saved[0],
                "write_s": point.write_s,
                "startup_s": point.startup_s,
                "elements": point.recorded.elements,
                "limits": remarks(point),
            }
            for point in points
        ],
    }


def draw(path: Path, by_kind: Mapping[bool, Sequence[ScalingPoint]]) -> None:
    """Writes a picture of both scalings, ``by_kind`` of whether the global batch stays: a bar for each step."""
    from matplotlib.figure import Figure  # it takes half a second to import

    figure = Figure(figsize=(11, 5.2))
    legend: dict[str, Any] = {}
    for axis, (is_strong, points) in zip(figure.subplots(1, 2), sorted(by_kind.items()), strict=True):
        last = points[-1].run
        whole, counts = last.config.train.global_batch_size, sorted(point.run.num_micro_batches for point in points)
        kept = f"global batch {whole}" if is_strong else plural(whole // last.num_ranks, "sample") + " a rank"
        axis.set_title(f"{'strong' if is_strong else 'weak'} scaling: {kept}, {accumulation(counts)}", fontsize=10)
        names, bottom = [str(point.run.num_ranks) for point in points], [0.0] * len(points)
        for part, color in zip(points[0].parts, _COLORS, strict=True):
            shares = [100 * point.parts[part] / point.step.seconds for point in points]
            if any(shares):
                legend[part] = axis.bar(names, shares, bottom=bottom, label=part, color=color, width=0.65)
            bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
        for number, point in enumerate(points):
            taken = f"{seconds:,.4g} s" if (seconds := point.step.seconds) > 2 else f"{1e3 * seconds:,.4g} ms"
            axis.text(number, 101, f"{taken}\n{point.efficiency:.1%}", ha="center", va="bottom", fontsize=8)
        axis.set(ylim=(0, 118), xlabel="ranks", ylabel="share of a step, %")
    style: dict[str, Any] = {"bbox_to_anchor": (0.5, 0.12), "ncols": len(legend), "fontsize": 8, "frameon": False}
    figure.legend(legend.values(), legend.keys(), loc="lower center", **style)
    first = by_kind[True][0].run
    engine = first.config.engine
    sharded = f", replicas of {engine.shard_size} ranks" if engine.shard_size else ""
    lines = [f"Simulated: {first.config.model.name}, {first.device.name}, ZeRO stage {engine.zero_stage}{sharded}"]
    lines += [line[0].upper() + line[1:] for line in scale_assumptions([*by_kind[False], *by_kind[True]])]
    figure.text(0.02, 0.01, textwrap.fill(". ".join(lines) + ".", 165), fontsize=7.5, va="bottom")
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    figure.savefig(path, dpi=110)
