"""``dtrain plan scale``: a step, the start, the memory and a checkpoint at several numbers of ranks, and what binds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.config.engines import Native
from dtrain.planning.memory.plan import FITS, MemoryPlan, memory_of
from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.time.network import Fabric
from dtrain.planning.time.prediction import Assumptions, Prediction, accumulation, assumptions, predict
from dtrain.planning.time.replay import GRADIENTS, PURPOSES, REPLICAS, VOTE, WEIGHTS
from dtrain.telemetry.texts import bytes_range, bytes_text
from dtrain.tools.tables import Column, Table, plural, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BINDS = 0.01
"""Part of a step, or of the elements, from which a limit is named."""

_COLORS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#999999")  # Okabe and Ito's


@dataclass(frozen=True)
class ScalingPoint(Prediction):
    """A step on some ranks, and what is beside it.

    Attributes:
        memory: of a rank.
        write_s: seconds of a checkpoint.
        nodes: of the job.
        efficiency: samples a second of a rank, divided by those of a rank on the fewest ranks.
    """

    memory: MemoryPlan
    write_s: float
    nodes: int
    efficiency: float

    @property
    def ranks(self) -> int:
        return self.recorded.run.num_ranks

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by what it consists of."""
        waits = {f"wait: {purpose}": self.step.total(purpose).exposed for purpose in PURPOSES}
        return {"compute": self.step.compute, "slowed by transfers": self.step.slowed, **waits}


def scale(run: PlannedRun, ranks: Sequence[int], assumed: Assumptions, *, is_strong: bool) -> list[ScalingPoint]:
    """Returns ``run``, which is on the first of ``ranks``, at each of them; they ascend.

    If ``is_strong``, the global batch stays, at least a micro-batch for each of the most ranks; else that of each rank.

    Raises:
        ConfigError: a number of ranks or the network does not fit the run.
    """
    links = assumed.links(run)  # a network that does not fit is an error before anything is recorded
    per_node = links.ranks_per_node if isinstance(links, Fabric) else links.num_ranks
    micro, own = run.config.train.micro_batch_size, run.config.train.global_batch_size // run.num_ranks
    whole = -(-run.config.train.global_batch_size // (micro * ranks[-1])) * micro * ranks[-1]
    found: list[ScalingPoint] = []
    for count in ranks:
        size = -(-whole // (micro * count)) * micro * count if is_strong else own * count
        prediction = predict(with_ranks(run, count, size), assumed)
        recorded = prediction.recorded
        writers = -(-recorded.shard_ranks // per_node)  # one replica writes
        write_s = recorded.saved[1] / (writers * assumed.write_gbps * 1e9)
        each = prediction.targets_per_s / count
        efficiency = each / (found[0].targets_per_s / found[0].ranks) if found else 1.0
        memory, nodes = memory_of(recorded), -(-count // per_node)
        found.append(
            ScalingPoint(**vars(prediction), memory=memory, write_s=write_s, nodes=nodes, efficiency=efficiency)
        )
    return found


def with_ranks(run: PlannedRun, ranks: int, global_batch_size: int) -> PlannedRun:
    """Returns ``run`` on ``ranks`` ranks; as many as a replica has, or fewer, are one replica.

    Raises:
        ConfigError: replicas of ``engine.shard_size`` ranks do not make up ``ranks``.
    """
    engine = run.config.engine
    if isinstance(engine, Native) and engine.shard_size is not None and engine.shard_size >= ranks:
        engine = replace(engine, shard_size=None)
    elif isinstance(engine, Native):
        engine.check_ranks(ranks)
    train = replace(run.config.train, global_batch_size=global_batch_size)
    return replace(run, config=replace(run.config, engine=engine, train=train), num_ranks=ranks)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def show_points(run: PlannedRun, points: Sequence[ScalingPoint], assumed: Assumptions, *, is_strong: bool) -> None:
    """Prints the tables, the assumptions, and the limits that bind."""
    absent = {f"wait: {name}" for name in PURPOSES if not any(point.step.total(name).nbytes for point in points)}
    ranks: Column[ScalingPoint] = ("ranks", lambda point: f"{point.ranks:,}")
    steps: list[Column[ScalingPoint]] = [
        ranks,
        ("step ms", lambda point: _ms(point.step.seconds)),
        *((name, lambda point, name=name: _ms(point.parts[name])) for name in points[0].parts if name not in absent),
        ("efficiency", lambda point: f"{point.efficiency:.1%}"),
        (f"{run.unit}/s", lambda point: f"{point.targets_per_s:,.0f}"),
    ]
    others: list[Column[ScalingPoint]] = [
        ranks,
        ("memory of a rank", lambda point: bytes_range(point.memory.low, point.memory.high)),
        ("checkpoint", lambda point: bytes_text(point.recorded.saved[1])),
        ("checkpoint of a rank", lambda point: bytes_text(point.recorded.saved[0])),
        ("written in s", lambda point: f"{point.write_s:.3g}"),
        ("start: transfers s", lambda point: f"{point.startup_s:.3g}"),
        ("vote received", lambda point: f"{point.step.total(VOTE).nbytes / 1e3:,.1f} kB"),
        ("vote ms", lambda point: _ms(point.step.total(VOTE).seconds)),
        ("vote, % of the step", lambda point: f"{point.step.total(VOTE).seconds / point.step.seconds:.2%}"),
    ]
    kind = "the same global batch" if is_strong else "the same batch of each rank"
    title = f"A step on {run.device.name}, {kind}"
    show([Table.of(title, steps, points), Table.of("Beside the step", others, points)])
    for line in scale_assumptions(run, points, assumed):
        print(line)
    for point in points:
        for line in remarks(run, point):
            print(f"{plural(point.ranks, 'rank')}: {line}")


def scale_assumptions(run: PlannedRun, points: Sequence[ScalingPoint], assumed: Assumptions) -> Iterator[str]:
    """Yields what the figures rest on, a sentence each."""
    yield from assumptions(run, assumed, [point.recorded.run.num_micro_batches for point in points])
    yield (
        "not in these times: congestion, failures, reading data; of the start: processes, the creation of groups and "
        "connections, and compilation"
    )


def remarks(run: PlannedRun, point: ScalingPoint) -> Iterator[str]:
    """Yields a sentence if ``point`` does not fit, or is not ``run`` as it is configured, and for each limit.

    A limit takes 1 % of the step, or of the elements.
    """
    size = getattr(run.config.engine, "shard_size", None)
    if size is not None and size > point.ranks:
        yield f"one replica, because engine.shard_size={size} is more; dtrain train would refuse it"
    memory = point.memory
    if memory.fit != FITS:
        device, fit = memory.device, memory.fit.replace("may fit", "may not fit")
        yield (
            f"{fit} on {device.name} ({bytes_text(device.memory)} for a rank): {bytes_range(memory.low, memory.high)}; "
            "dtrain plan memory proposes changes"
        )
    step, ring = point.step, point.ring
    if ring is not None and step.seconds - ring.seconds > _BINDS * step.seconds:
        sent, taken = (found.total(GRADIENTS).seconds for found in (step, ring))
        yield (
            f"unreduced gradients go by all-to-all, each through a rank's own NIC: {_ms(sent)} "
            f"ms in flight; a ring reduce-scatter of them in FP32 would take {_ms(taken)} ms, and the step "
            f"{_ms(ring.seconds)} instead of {_ms(step.seconds)} ms"
        )
    numel, used = (sum(getattr(buffer, name) for buffer in point.recorded.buffers) for name in ("numel", "used"))
    if numel - used > _BINDS * used:
        yield (
            f"shards are whole chunks: {numel - used:,} of {numel:,} elements ({1 - used / numel:.1%}) are padding, "
            "which is sent and stored like the others"
        )
    root = sum(seconds for label, seconds in step.waits.items() if label.startswith("root/"))
    if root > _BINDS * step.seconds:
        yield (
            "the root group (embedding, head, norms) is gathered before the first block and reduced last: a rank "
            f"waits {_ms(root)} ms for it"
        )
    waited = step.total(REPLICAS).exposed
    if waited > _BINDS * step.seconds:
        yield (
            f"the sum over {point.ranks // point.recorded.shard_ranks} replicas (FP32, once a step) is waited for "
            f"{_ms(waited)} ms; more micro-batches a step or a larger engine.shard_size make it weigh less"
        )
    vote, weights, busy = (step.total(purpose).seconds for purpose in (VOTE, WEIGHTS, None))
    if vote > _BINDS * step.seconds:
        part = vote / step.seconds
        yield f"the vote's gather takes {_ms(vote)} ms, {part:.1%} of the step, and overlaps with nothing"
    if busy > step.compute:
        yield (
            f"transfers take {_ms(busy)} ms ({_ms(weights)} of weights), longer than the computation, "
            f"{_ms(step.compute)} ms; {_remedies(point)} reduce this"
        )


def _remedies(point: ScalingPoint) -> str:
    """Returns what makes transfers a smaller part of the step.

    More micro-batches do not at stage 3, where each gathers the weights and reduces the gradients.
    """
    engine = point.recorded.run.config.engine
    more = engine.zero_stage < 3
    if isinstance(engine, Native) and engine.zero_stage and point.nodes > 1 and engine.shard_size is None:
        return f"larger micro-batches{', more of them a step,' if more else ''} or engine.shard_size"
    return "larger micro-batches" + (" or more of them a step" if more else "")


def to_json(
    run: PlannedRun, points: Sequence[ScalingPoint], assumed: Assumptions, *, is_strong: bool
) -> dict[str, Any]:
    """Returns all as plain JSON; times are in seconds."""
    return {
        "assumptions": asdict(assumed),
        "device": run.device.name,
        "scaling": "strong" if is_strong else "weak",
        "unit": run.unit,
        "points": [_point_json(run, point) for point in points],
    }


def _point_json(run: PlannedRun, point: ScalingPoint) -> dict[str, Any]:
    config, step = point.recorded.run.config, point.step
    return {
        "ranks": point.ranks,
        "nodes": point.nodes,
        "shard_ranks": point.recorded.shard_ranks,
        "micro_batch_size": config.train.micro_batch_size,
        "micro_batches": point.recorded.run.num_micro_batches,
        "step_s": step.seconds,
        "compute_s": step.compute,
        "slowed_s": step.slowed,
        "targets_per_s": point.targets_per_s,
        "efficiency": point.efficiency,
        "transfers": [
            {"purpose": purpose, "axis": axis, **asdict(share)} for (purpose, axis), share in step.shares.items()
        ],
        "ring_step_s": None if point.ring is None else point.ring.seconds,
        "memory_bytes": [point.memory.low, point.memory.high],
        "checkpoint_bytes": point.recorded.saved[1],
        "checkpoint_rank_bytes": point.recorded.saved[0],
        "write_s": point.write_s,
        "startup_s": point.startup_s,
        "elements": {buffer.name: [buffer.used, buffer.numel] for buffer in point.recorded.buffers},
        "limits": list(remarks(run, point)),
    }


def draw(path: Path, run: PlannedRun, by_kind: Mapping[bool, Sequence[ScalingPoint]], assumed: Assumptions) -> None:
    """Writes a picture of both scalings, ``by_kind`` of whether the global batch stays, with what they assume."""
    from matplotlib.figure import Figure  # it takes half a second to import

    figure = Figure(figsize=(11, 5.2))
    axes = figure.subplots(1, 2)
    for axis, is_strong in zip(axes, (False, True), strict=True):
        points = by_kind[is_strong]
        counts = sorted(point.recorded.run.num_micro_batches for point in points)
        whole = points[-1].recorded.run.config.train.global_batch_size
        kept = f"global batch {whole}" if is_strong else plural(whole // points[-1].ranks, "sample") + " a rank"
        axis.set_title(f"{'strong' if is_strong else 'weak'} scaling: {kept}, {accumulation(counts)}", fontsize=10)
        _bars(axis, points)
    legend = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    style: dict[str, Any] = {"bbox_to_anchor": (0.5, 0.12), "ncols": len(legend), "fontsize": 8, "frameon": False}
    figure.legend(legend.values(), legend.keys(), loc="lower center", **style)
    config = points[0].recorded.run.config
    size = getattr(config.engine, "shard_size", None)
    sharded = f", replicas of {size} ranks" if size else ""
    lines = [f"Simulated: {config.model.name}, {run.device.name}, ZeRO stage {config.engine.zero_stage}{sharded}"]
    lines += [line[0].upper() + line[1:] for line in scale_assumptions(run, [*by_kind[False], *by_kind[True]], assumed)]
    figure.text(0.02, 0.01, textwrap.fill(". ".join(lines) + ".", 165), fontsize=7.5, va="bottom")
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    figure.savefig(path, dpi=110)


def _bars(axis: Axes, points: Sequence[ScalingPoint]) -> None:
    """Draws each step as a bar of its parts, in percent, and the efficiency above it."""
    names = [str(point.ranks) for point in points]
    bottom = [0.0] * len(points)
    for part, color in zip(points[0].parts, _COLORS, strict=True):
        shares = [100 * point.parts[part] / point.step.seconds for point in points]
        if any(shares):
            axis.bar(names, shares, bottom=bottom, label=part, color=color, width=0.65)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    for number, point in enumerate(points):
        step_s = point.step.seconds
        taken = f"{step_s:,.4g} s" if step_s > 2 else f"{1e3 * step_s:,.4g} ms"
        axis.text(number, 101, f"{taken}\n{point.efficiency:.1%}", ha="center", va="bottom", fontsize=8)
    axis.set(ylim=(0, 118), xlabel="ranks", ylabel="share of a step, %")
