"""A step of one rank among many: the engine's own schedule, on a clock that published rates advance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

import torch

from dtrain.config.engines import Native
from dtrain.engine.adapters.native import NativeEngine
from dtrain.errors import ConfigError
from dtrain.planning.ranks import NCCL
from dtrain.planning.replay import Replay, Share, replay
from dtrain.planning.timeline import RankTrace, Timeline, Transfer
from dtrain.planning.virtual_clock import OperationClock, VirtualClock, update_bytes
from dtrain.train.planned import AtUpdate, PlannedRun

_MOST_TRACED = 3  # micro-batches; the others of a step are like the last of these


@dataclass(frozen=True)
class Buffer:
    """A flat buffer: its elements, and those of them that are a parameter's."""

    name: str
    numel: int
    used: int


@dataclass(frozen=True)
class Traced:
    """The operations of a rank, before transfers take time.

    Attributes:
        traces: steps of some micro-batches, by their number; ascending.
        count: micro-batches of a step of the run.
        startup: transfers while the engine is built.
        sends: bytes of an element of the gradients that are sent unreduced, by label.
        states: bytes of ``engine.memory()``.
        buffers: of the trained parameters.
        saved: bytes of the rank's part of a checkpoint, and of the whole.
        shard_ranks: ranks that share the states.
    """

    run: PlannedRun
    traces: dict[int, RankTrace]
    count: int
    startup: Sequence[Transfer]
    sends: Mapping[str, int]
    states: dict[str, int]
    buffers: Sequence[Buffer]
    saved: tuple[int, int]
    shard_ranks: int


def trace_run(run: PlannedRun, efficiency: float, step_ms: float | None) -> Traced:
    """Returns what a rank of ``run`` does.

    Args:
        run: on any device; on a CPU only ``step_ms`` gives times.
        efficiency: share of the published rates that products reach.
        step_ms: measured computation of one rank in a step, of which the rates give only the proportions.

    Raises:
        ConfigError: a CPU without ``step_ms``, or a GPU without published rates.
    """
    if run.device.type == "cpu" and step_ms is None:
        raise ConfigError(
            "no rates of a CPU are published; give device=h100-80gb or another GPU, or step_ms=, the computation of a "
            "rank in a step, which dtrain plan time measures"
        )
    train = run.config.train
    count = train.global_batch_size // (train.micro_batch_size * run.num_ranks)
    clock = VirtualClock()
    timeline = Timeline(torch.device("cpu"), clock)
    with run.engine(timeline=timeline) as (engine, step):
        startup = list(timeline.trace().transfers.values())
        bandwidth = run.device.bandwidth or 1e10
        update = update_bytes(engine.memory()) / bandwidth
        tf32 = run.config.precision.name == "tf32"
        with OperationClock(engine.module, run.device, clock, efficiency, tf32=tf32):
            least = min(count, 2)
            # in which what stays is allocated, and the order is learned
            micro_s, update_s = _timed(step, clock, least, 1.0, 1.0)
            micro_s /= least
            factor = 1.0 if step_ms is None else step_ms / 1e3 / (count * micro_s + update)
            traces = {}
            for number in range(least, min(count, _MOST_TRACED) + 1):
                timeline.restart()
                _timed(step, clock, number, factor, factor * update / update_s)
                traces[number] = timeline.trace()
        sizes = [
            Buffer(layout.name, layout.numel, sum(slot.stop - slot.start for slot in layout.slots))
            for layout in engine.sharded.layouts
        ]
        shard_ranks = engine.states.mesh.shard.world_size
        exchange = engine.sharded.reducer.exchange
        sends = {send.label: send.dtype.itemsize for send in getattr(exchange, "sends", ())}
        return Traced(run, traces, count, startup, sends, engine.memory(), sizes, _saved(engine), shard_ranks)


def _saved(engine: NativeEngine) -> tuple[int, int]:
    """Returns the bytes that rank 0 saves, and those of all ranks, if these have as many for each parameter."""
    own = {kind: list(engine.states.owned_shards(kind)) for kind in engine.states.saved_dtypes}
    nbytes = sum(shard.nbytes for shards in own.values() for shard in shards)
    elements = max(sum(shard.data.numel() for shard in shards) for shards in own.values())
    whole = sum(slot.spec.numel for layout in engine.sharded.layouts for slot in layout.slots)
    return nbytes, round(nbytes * whole / elements)


def _timed(
    step: Callable[..., object], clock: VirtualClock, count: int, factor: float, update_factor: float
) -> tuple[float, float]:
    """Trains a step of ``count`` micro-batches; returns the seconds of forward and backward, and of the update."""
    middle = 0.0

    def begin_update() -> None:
        nonlocal middle
        middle, clock.factor = clock.now, update_factor

    begin, clock.factor = clock.now, factor
    step(count, AtUpdate(begin_update))
    return middle - begin, clock.now - middle


def simulate_step(
    traced: Traced, seconds_of: Callable[[Transfer], float], *, compute_factor: float = 1.0, slowdown: float = 1.0
) -> Replay:
    """Returns the step of a rank whose transfers take ``seconds_of``.

    The slowest rank computes longer by ``compute_factor``. On a GPU, transfers overlap with the computation, which they
    slow by ``slowdown``.
    """
    overlaps = traced.run.transport == NCCL
    slowdown = slowdown if overlaps else 1.0
    found = [
        replay(trace, seconds_of, overlaps=overlaps, compute_factor=compute_factor, slowdown=slowdown)
        for trace in traced.traces.values()
    ]
    return found[0] if len(found) == 1 else _extended(found[-2], found[-1], traced.count - max(traced.traces))


def _extended(shorter: Replay, longer: Replay, more: int) -> Replay:
    """Returns ``longer`` with ``more`` micro-batches, each of which adds what the last one added."""

    def add(last: float, first: float) -> float:
        return last + more * (last - first)

    shares = {}
    for key, share in longer.shares.items():
        before = shorter.shares.get(key, Share())
        count, nbytes, seconds, exposed = map(add, astuple(share), astuple(before))
        shares[key] = Share(round(count), round(nbytes), seconds, max(0.0, exposed))
    return Replay(
        add(longer.seconds, shorter.seconds),
        add(longer.compute, shorter.compute),
        add(longer.slowed, shorter.slowed),
        shares,
        {label: max(0.0, add(seconds, shorter.waits.get(label, 0.0))) for label, seconds in longer.waits.items()},
    )


def with_ranks(run: PlannedRun, ranks: int, global_batch_size: int) -> PlannedRun:
    """Returns ``run`` on ``ranks`` ranks; as many as a replica has, or fewer, are one replica.

    Raises:
        ConfigError: replicas of ``engine.shard_size`` ranks do not make up ``ranks``.
    """
    config = run.config
    engine = config.engine
    if isinstance(engine, Native):
        if engine.shard_size is not None and engine.shard_size >= ranks:
            config = replace(config, engine=replace(engine, shard_size=None))
        else:
            engine.check_ranks(ranks)
    config = replace(config, train=replace(config.train, global_batch_size=global_batch_size))
    return replace(run, config=config, num_ranks=ranks)
