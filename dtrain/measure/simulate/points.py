"""A run at several numbers of ranks: a step, its start, its memory and a checkpoint at each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

from dtrain.errors import ConfigError
from dtrain.measure.simulate.step import Traced, simulate_step, trace_run, with_ranks
from dtrain.planning.fabric import FABRICS, Fabric, find_fabric
from dtrain.planning.network import Network
from dtrain.planning.ranks import NCCL
from dtrain.planning.replay import Replay
from dtrain.planning.timeline import Transfer
from dtrain.train.memory.plan import MemoryPlan, plan_memory
from dtrain.train.planned import PlannedRun

ENGINE, RING, RING_FP32 = "engine", "ring", "ring-fp32"
"""Ways to reduce gradients: as the engine does, or by a ring reduce-scatter of their dtype, or of FP32."""
_MEMORY_RANKS = 8
"""Ranks on which activations and buffers are planned: what depends on more ranks are the states."""


@dataclass(frozen=True)
class Assumptions:
    """Values of a simulation that no run has measured; the keys of ``dtrain simulate``."""

    network: str = "ib-400g"
    efficiency: float = 0.7
    step_ms: float | None = None
    overlap_slowdown: float = 1.189
    spread: float = 0.015
    gradients: str = ENGINE
    write_gbps: float = 10.0

    def links(self, transport: str) -> Fabric | Network:
        """Returns the network, by its name or from the results of ``dtrain bench collectives``."""
        if self.network not in FABRICS and Path(self.network).is_file():
            return Network.read(Path(self.network), transport)
        found = find_fabric(self.network)
        if transport != NCCL:
            raise ConfigError(
                f"network={self.network} connects GPUs, and the ranks are CPUs; give the file of dtrain bench "
                "collectives bench.out=FILE"
            )
        return found

    def compute_factor(self, ranks: int) -> float:
        """Returns by which the slowest of ``ranks`` computes longer than their mean.

        The largest of n normal values is about the quantile (n - 0.375) / (n + 0.25) (Blom 1958).
        """
        return 1 + self.spread * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


@dataclass(frozen=True)
class ScalingPoint:
    """The run on some ranks.

    Attributes:
        traced: what a rank does.
        step: with transfers.
        ring: the step if gradients went by a ring reduce-scatter of FP32; None: no gradient goes by all-to-all.
        efficiency: samples a second of a rank, divided by those of a rank on the fewest ranks.
        memory: of a rank.
        startup_s: seconds of the transfers while the engine is built.
        write_s: seconds of a checkpoint.
        nodes: of the job.
    """

    traced: Traced
    step: Replay
    ring: Replay | None
    efficiency: float
    memory: MemoryPlan
    startup_s: float
    write_s: float
    nodes: int

    @property
    def ranks(self) -> int:
        return self.traced.run.num_ranks

    @property
    def targets_per_s(self) -> float:
        config = self.traced.run.config
        samples: int = config.train.global_batch_size
        return samples * config.targets_per_sample / self.step.seconds


def as_ring(transfer: Transfer, sends: Mapping[str, int], *, fp32: bool) -> Transfer:
    """Returns ``transfer`` as a reduce-scatter, widened first if ``fp32``, if it is the all-to-all of a gradient."""
    if transfer.op != "all_to_all_single" or transfer.label not in sends:
        return transfer
    factor = 4 // sends[transfer.label] if fp32 else 1
    return replace(transfer, op="reduce_scatter_sum", nbytes=factor * transfer.nbytes)


def simulate(run: PlannedRun, ranks: Sequence[int], assumed: Assumptions, *, is_strong: bool) -> list[ScalingPoint]:
    """Returns ``run``, which is on the first of ``ranks``, at each of them; they ascend.

    If ``is_strong``, the global batch stays, at least a micro-batch for each of the most ranks; else that of each rank.

    Raises:
        ConfigError: a number of ranks or the network does not fit the run.
    """
    assumed.links(run.transport)  # a network that does not fit is an error before anything is traced
    micro, own = run.config.train.micro_batch_size, run.config.train.global_batch_size // run.num_ranks
    whole = -(-run.config.train.global_batch_size // (micro * ranks[-1])) * micro * ranks[-1]
    found: list[ScalingPoint] = []
    base: float | None = None
    for count in ranks:
        size = -(-whole // (micro * count)) * micro * count if is_strong else own * count
        traced = trace_run(with_ranks(run, count, size), assumed.efficiency, assumed.step_ms)
        point = _point(traced, assumed)
        each = point.targets_per_s / count
        base = base or each
        found.append(replace(point, efficiency=each / base))
    return found


def _point(traced: Traced, assumed: Assumptions) -> ScalingPoint:
    run = traced.run
    links = assumed.links(run.transport)
    seconds_of: Callable[[Transfer], float] = links.seconds
    compute_factor = assumed.compute_factor(run.num_ranks)

    def step(of: Callable[[Transfer], float]) -> Replay:
        return simulate_step(traced, of, compute_factor=compute_factor, slowdown=assumed.overlap_slowdown)

    def ring(*, fp32: bool) -> Replay:
        return step(lambda transfer: seconds_of(as_ring(transfer, traced.sends, fp32=fp32)))

    chosen = step(seconds_of) if assumed.gradients == ENGINE else ring(fp32=assumed.gradients == RING_FP32)
    in_fp32 = ring(fp32=True) if traced.sends and assumed.gradients == ENGINE else None
    per_node = links.ranks_per_node if isinstance(links, Fabric) else links.num_ranks
    writers = -(-traced.shard_ranks // per_node)  # one replica writes
    return ScalingPoint(
        traced,
        chosen,
        in_fp32,
        1.0,
        _memory(traced),
        sum(map(seconds_of, traced.startup)),
        traced.saved[1] / (writers * assumed.write_gbps * 1e9),
        -(-run.num_ranks // per_node),
    )


def _memory(traced: Traced) -> MemoryPlan:
    """Returns the plan on a few ranks, with the states of the ranks of ``traced``."""
    run = traced.run
    few = min(run.num_ranks, _MEMORY_RANKS)
    per_rank = run.config.train.global_batch_size // run.num_ranks
    plan = plan_memory(with_ranks(run, few, per_rank * few))
    if few == run.num_ranks:
        return plan
    states = {kind: nbytes for kind, nbytes in traced.states.items() if kind in plan.step.states}
    peak = {**plan.step.peak, **{kind: states[kind] for kind in plan.step.peak if kind in states}}
    return replace(plan, num_ranks=run.num_ranks, step=replace(plan.step, states=states, peak=peak))
