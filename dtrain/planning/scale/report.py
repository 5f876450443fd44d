"""Prints what ``dtrain plan scale`` has found, and the limits that bind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from dtrain.config.engines import Native
from dtrain.planning.memory.plan import FITS
from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.scale.points import ScalingPoint
from dtrain.planning.time.prediction import Assumptions, assumptions
from dtrain.planning.time.replay import GRADIENTS, PURPOSES, REPLICAS, VOTE, WEIGHTS
from dtrain.tools.tables import Column, Table, plural, show
from dtrain.train.receipt import bytes_range, bytes_text

_BINDS = 0.01
"""Part of a step, or of the elements, from which a limit is named."""


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def show_points(run: PlannedRun, points: Sequence[ScalingPoint], assumed: Assumptions, *, is_strong: bool) -> None:
    """Prints the tables, the assumptions, and the limits that bind."""
    purposes = [purpose for purpose in PURPOSES if any(point.step.total(purpose).nbytes for point in points)]
    steps: list[Column[ScalingPoint]] = [
        ("ranks", lambda point: f"{point.ranks:,}"),
        ("step ms", lambda point: _ms(point.step.seconds)),
        ("compute", lambda point: _ms(point.step.compute)),
        ("slowed by transfers", lambda point: _ms(point.step.slowed)),
        *(
            (f"wait: {purpose}", lambda point, purpose=purpose: _ms(point.step.total(purpose).exposed))
            for purpose in purposes
        ),
        ("efficiency", lambda point: f"{point.efficiency:.1%}"),
        (f"{run.unit}/s", lambda point: f"{point.prediction.targets_per_s:,.0f}"),
    ]
    others: list[Column[ScalingPoint]] = [
        ("ranks", lambda point: f"{point.ranks:,}"),
        ("memory of a rank", lambda point: bytes_range(point.memory.low, point.memory.high)),
        ("checkpoint", lambda point: bytes_text(point.recorded.saved[1])),
        ("checkpoint of a rank", lambda point: bytes_text(point.recorded.saved[0])),
        ("written in s", lambda point: f"{point.write_s:.3g}"),
        ("start: transfers s", lambda point: f"{point.prediction.startup_s:.3g}"),
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
    """Yields a sentence if ``point`` does not fit, or is not ``run`` as it is configured, and for each limit."""
    size = getattr(run.config.engine, "shard_size", None)
    if size is not None and size > point.ranks:
        yield f"one replica, because engine.shard_size={size} is more; dtrain train would refuse it"
    memory = point.memory
    if memory.fit != FITS:
        fit = "does not fit" if memory.low > memory.device.memory else "may not fit"
        yield (
            f"{fit} on {memory.device.name} ({bytes_text(memory.device.memory)} for a rank): "
            f"{bytes_range(memory.low, memory.high)}; dtrain plan memory proposes changes"
        )
    yield from limits(point)


def limits(point: ScalingPoint) -> Iterator[str]:
    """Yields a sentence for each limit that takes 1 % of the step, or of the elements."""
    step, ring = point.step, point.prediction.ring
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
    vote = step.total(VOTE).seconds
    if vote > _BINDS * step.seconds:
        share = vote / step.seconds
        yield f"the vote's gather takes {_ms(vote)} ms, {share:.1%} of the step, and overlaps with nothing"
    weights = step.total(WEIGHTS).seconds
    busy = step.total().seconds
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
    found = ["larger micro-batches", *(["more of them a step"] if engine.zero_stage < 3 else [])]
    if isinstance(engine, Native) and engine.zero_stage and point.nodes > 1 and engine.shard_size is None:
        found.append("engine.shard_size")
    return " or ".join(found) if len(found) < 3 else ", ".join(found[:-1]) + f", or {found[-1]}"


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
        "targets_per_s": point.prediction.targets_per_s,
        "efficiency": point.efficiency,
        "transfers": [
            {"purpose": purpose, "axis": axis, **asdict(share)} for (purpose, axis), share in step.shares.items()
        ],
        "ring_step_s": None if point.prediction.ring is None else point.prediction.ring.seconds,
        "memory_bytes": [point.memory.low, point.memory.high],
        "checkpoint_bytes": point.recorded.saved[1],
        "checkpoint_rank_bytes": point.recorded.saved[0],
        "write_s": point.write_s,
        "startup_s": point.prediction.startup_s,
        "elements": {buffer.name: [buffer.used, buffer.numel] for buffer in point.recorded.buffers},
        "limits": list(remarks(run, point)),
    }
