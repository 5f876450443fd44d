"""A run at several numbers of ranks: a step, its start, its memory and a checkpoint at each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtrain.config.engines import Native
from dtrain.planning.memory.plan import MemoryPlan, memory_of
from dtrain.planning.planned_run import PlannedRun, RecordedRun
from dtrain.planning.time.network import Fabric
from dtrain.planning.time.prediction import Assumptions, Prediction, predict
from dtrain.planning.time.replay import Replay


@dataclass(frozen=True)
class ScalingPoint:
    """The run on some ranks.

    Attributes:
        prediction: of a step.
        memory: of a rank.
        write_s: seconds of a checkpoint.
        nodes: of the job.
        efficiency: samples a second of a rank, divided by those of a rank on the fewest ranks.
    """

    prediction: Prediction
    memory: MemoryPlan
    write_s: float
    nodes: int
    efficiency: float = 1.0

    @property
    def recorded(self) -> RecordedRun:
        return self.prediction.recorded

    @property
    def step(self) -> Replay:
        return self.prediction.step

    @property
    def ranks(self) -> int:
        return self.recorded.run.num_ranks


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
        point = ScalingPoint(prediction, memory_of(recorded), write_s, -(-count // per_node))
        first = found[0] if found else point
        each = prediction.targets_per_s / count
        found.append(replace(point, efficiency=each / (first.prediction.targets_per_s / first.ranks)))
    return found


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
