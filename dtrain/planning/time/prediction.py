"""Predicts a rank's step from the engine's recorded schedule, at published rates or with a measured computation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

from dtrain.config.engines import Native
from dtrain.errors import ConfigError, nearest
from dtrain.planning.planned_run import PlannedRun, RecordedSteps
from dtrain.planning.record.products import MatrixProduct, products
from dtrain.planning.record.ranks import NCCL, Transfer
from dtrain.planning.record.recorder import UPDATE, RecordedCall, RecordedStep, TensorSpec
from dtrain.planning.time.network import FABRICS, Fabric, Link, Network
from dtrain.planning.time.replay import RankTrace, Replay, Share, replay

NO_NETWORK = ""
"""Network whose transfers take no time."""
ENGINE, RING, RING_FP32 = "engine", "ring", "ring-fp32"
"""Ways to reduce gradients: as the engine does, or by a ring reduce-scatter of their dtype, or of FP32."""

_CPU_RATE, _CPU_BANDWIDTH = 50e9, 10e9
"""Stand-ins for a CPU, whose rates are not published: only the proportions between operations count."""

Pricing = Callable[[RecordedCall, MatrixProduct | None, float], float]
"""Returns the seconds of a call, which is perhaps a product, from those by published rates."""


@dataclass(frozen=True)
class Assumptions:
    """Assumed values of a prediction, keys of ``dtrain plan scale``; ``plan time`` takes all but ``write_gbps``.

    ``step_ms`` is a measured computation of a rank, and replaces the published rates.
    """

    network: str = "ib-400g"
    efficiency: float = 0.7
    step_ms: float | None = None
    overlap_slowdown: float = 1.189
    spread: float = 0.015
    gradients: str = ENGINE
    write_gbps: float = 10.0

    def links(self, run: PlannedRun, *, has_rates: bool = True) -> Fabric | Network:
        """Returns the network of ``run``, by its name or from the results of ``dtrain bench collectives``.

        Raises:
            ConfigError: the network does not fit the run, or the rates that a CPU does not have are needed.
        """
        if has_rates and run.device.type == "cpu" and self.step_ms is None:
            raise ConfigError(
                "no rates of a CPU are published; give device=h100-80gb or another GPU, or step_ms=, the computation "
                "of a rank in a step, which dtrain plan time measures"
            )
        if self.network == NO_NETWORK:
            return Network(2, *[Link(0.0, 0.0, 2)] * 2)
        if self.network not in FABRICS and Path(self.network).is_file():
            return Network.read(Path(self.network), run.transport)
        if self.network not in FABRICS:
            near = nearest(self.network, FABRICS)
            raise ConfigError(f"network={self.network} is neither a file nor a known network{near}")
        if run.transport != NCCL:
            raise ConfigError(
                f"network={self.network} connects GPUs, and the ranks are CPUs; give the file of dtrain bench "
                "collectives bench.out=FILE"
            )
        return FABRICS[self.network]

    def compute_factor(self, ranks: int) -> float:
        """Returns the computation time of the slowest of ``ranks``, divided by their mean.

        The largest of n normal values is about the quantile (n - 0.375) / (n + 0.25) (Blom 1958).
        """
        return 1 + self.spread * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


class Parts(NamedTuple):
    """Seconds of a rank's operations in a step, each alone: those of forward and backward, and the update."""

    products: float
    others: float
    update: float

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True)
class Prediction:
    """A step as it is expected of the slowest rank, and the seconds of the transfers while the engine is built."""

    priced: PricedRun
    assumed: Assumptions
    step: Replay
    startup_s: float

    @cached_property
    def ring(self) -> Replay | None:
        """The step if gradients went by a ring reduce-scatter of FP32; None: no gradient goes by all-to-all."""
        if not self.recorded.sends or self.assumed.gradients != ENGINE:
            return None
        return self.priced.predict(replace(self.assumed, gradients=RING_FP32)).step

    @property
    def recorded(self) -> RecordedSteps:
        return self.priced.recorded

    @property
    def targets_per_s(self) -> float:
        """Targets of all ranks that count in the loss, in a second."""
        config = self.recorded.run.config
        samples: int = config.train.global_batch_size
        return samples * config.targets_per_sample / self.step.seconds


@dataclass(frozen=True)
class PricedRun:
    """A recorded run with the seconds of its operations.

    The traces are those of the steps after the first, in which the engine learns; the parts are of all micro-batches.
    """

    recorded: RecordedSteps
    traces: Sequence[RankTrace]
    parts: Parts

    @staticmethod
    def of(recorded: RecordedSteps, efficiency: float = 1.0, change: Pricing = lambda *priced: priced[-1]) -> PricedRun:
        """Returns ``recorded`` with the seconds of its operations; one more micro-batch costs what the last one did.

        ``efficiency`` is the share of the published rates that products reach; ``change`` prices a call otherwise.

        Raises:
            ConfigError: a rate of the device is not published.
        """
        priced = (price(step, recorded, efficiency, change) for step in recorded.steps[1:])
        traces, parts = zip(*priced, strict=True)
        return PricedRun(recorded, traces, Parts(*map(partial(_extended, recorded.num_more), parts[-1], parts[0])))

    def predict(self, assumed: Assumptions) -> Prediction:
        """Returns the step of the run; raises as ``Assumptions.links``."""
        recorded, run = self.recorded, self.recorded.run
        links = assumed.links(run)
        overlaps = run.transport == NCCL  # else the rank itself moves the bytes
        factor = 1.0 if assumed.step_ms is None else assumed.step_ms / 1e3 / self.parts.total

        def seconds_of(transfer: Transfer) -> float:
            if assumed.gradients != ENGINE:
                transfer = _as_ring(transfer, recorded.sends, fp32=assumed.gradients == RING_FP32)
            return links.seconds(transfer)

        found = [
            replay(
                trace,
                seconds_of,
                overlaps=overlaps,
                compute_factor=factor * assumed.compute_factor(run.num_ranks),
                slowdown=assumed.overlap_slowdown if overlaps else 1.0,
            )
            for trace in self.traces
        ]
        step = _extended_replay(recorded.num_more, found[-1], found[0])
        return Prediction(self, assumed, step, sum(map(links.seconds, recorded.startup)))


def price(step: RecordedStep, recorded: RecordedSteps, efficiency: float, change: Pricing) -> tuple[RankTrace, Parts]:
    """Returns what a rank does in ``step`` if transfers take no time, and the seconds of its parts.

    A product takes the longer of its FLOPs, at a share ``efficiency`` of the rate, and its bytes; all else its bytes.
    ``change`` prices it otherwise. The update is one pass over the states, whatever operations it has.

    Raises:
        ConfigError: a rate that is needed is not published.
    """
    run, is_cpu = recorded.run, recorded.run.device.type == "cpu"
    name, bandwidth = run.device.name, _CPU_BANDWIDTH if is_cpu else run.device.bandwidth
    if bandwidth is None:
        raise ConfigError(f"the bandwidth of {name} is not known; take another device")

    def seconds_of(product: MatrixProduct) -> float:
        rate = _CPU_RATE if is_cpu else run.device.rate(product.format)
        if rate is None:
            raise ConfigError(f"no rate of {name} in {product.format} is published; take another precision")
        return max(product.flops / (efficiency * rate), product.nbytes / bandwidth)

    timed: list[tuple[RecordedCall, float]] = []
    sums: defaultdict[str, float] = defaultdict(float)
    found = defaultdict(list)
    for product in products(step.calls, tf32=run.config.precision.name == "tf32"):
        found[product.call.at].append(product)
    for call in step.calls:
        multiplied = found[call.at]
        taken = sum(map(seconds_of, multiplied)) if multiplied else moved_bytes(call) / bandwidth
        taken = change(call, multiplied[0] if multiplied else None, taken)
        timed.append((call, taken))
        sums[UPDATE if call.part == UPDATE else "products" if multiplied else "others"] += taken
    states = Counter(recorded.memory[0]) + Counter(recorded.memory[1])
    update = (2 * (states["main_grad"] + states["master"] + states["moments"]) + states["compute"]) / bandwidth
    work = [(call.at, taken * update / sums[UPDATE] if call.part == UPDATE else taken) for call, taken in timed]
    events = [(at, taken, -1, False) for at, taken in work]
    for number, one in step.transfers.items():
        events.append((one.started, 0.0, number, False))
        if one.waited is not None and one.waited <= step.end:
            events.append((one.waited, 0.0, number, True))
    now, moments = 0.0, []
    for _, taken, number, is_wait in sorted(events):
        now += taken
        if number >= 0:
            moments.append((now, number, is_wait))
    trace = RankTrace(now, moments, {number: one.transfer for number, one in step.transfers.items()})
    return trace, Parts(sums["products"], sums["others"], update)


def moved_bytes(call: RecordedCall) -> int:
    """Returns the bytes that a call reads and writes; none if its result is a view, or is not written."""
    func = call.signature.func
    # the schema of the unsafe view, which follows each product, does not say that it is one
    if getattr(func, "is_view", False) or call.signature.name.startswith(("empty", "new_empty", "_unsafe_view")):
        return 0
    values = pytree.tree_leaves((call.signature.args, call.signature.kwargs, call.outputs))
    return sum(value.nbytes for value in values if isinstance(value, TensorSpec))


def predict(run: PlannedRun, assumed: Assumptions) -> Prediction:
    """Returns the step of ``run``; raises as ``PricedRun.of`` and ``PricedRun.predict``."""
    assumed.links(run)  # a network that does not fit is an error before anything is recorded
    return PricedRun.of(run.record(for_time=True), assumed.efficiency).predict(assumed)


def _as_ring(transfer: Transfer, sends: Mapping[str, int], *, fp32: bool) -> Transfer:
    """Returns ``transfer`` as a reduce-scatter, widened first if ``fp32``, if it is the all-to-all of a gradient."""
    if transfer.op != "all_to_all_single" or transfer.label not in sends:
        return transfer
    factor = 4 // sends[transfer.label] if fp32 else 1
    return replace(transfer, op="reduce_scatter_sum", nbytes=factor * transfer.nbytes)


def _extended(more: int, longer: Any, shorter: Any) -> Any:
    """Returns ``longer`` with ``more`` micro-batches, each of which adds what the last one added; never below 0."""
    return max(longer + more * (longer - shorter), 0)


def _extended_replay(more: int, longer: Replay, shorter: Replay) -> Replay:
    extended = partial(_extended, more)
    times = ((step.seconds, step.compute, step.slowed) for step in (longer, shorter))
    seconds, compute, slowed = map(extended, *times)
    shares = {
        key: Share(*map(extended, astuple(share), astuple(shorter.shares.get(key, Share()))))
        for key, share in longer.shares.items()
    }
    waits = {label: extended(taken, shorter.waits.get(label, 0.0)) for label, taken in longer.waits.items()}
    return Replay(seconds, compute, slowed, shares, waits)


def assumptions(run: PlannedRun, assumed: Assumptions, micro_batches: Sequence[int] = ()) -> Iterator[str]:
    """Yields what predictions of ``run`` rest on, a sentence each; ``micro_batches``: of the steps of a rank."""
    counts = sorted(micro_batches or [run.num_micro_batches])
    fabric = FABRICS.get(assumed.network)
    text = f"network {assumed.network}" + ("" if fabric is None else f": {fabric.line}")
    yield f"nothing is measured; {text}; {accumulation(counts)}"
    rates = f"products at {assumed.efficiency:.0%} of the published rate, all else at the memory's bandwidth"
    if assumed.step_ms is not None:
        rates = f"a rank computes {assumed.step_ms:g} ms"
    yield (
        f"{rates}; {assumed.overlap_slowdown:g} times as long while a transfer runs; the speeds of ranks deviate by "
        f"{assumed.spread:.1%}"
    )
    engine = run.config.engine
    if not isinstance(engine, Native):
        scatters = "; for its reduce-scatters: gradients=ring-fp32" if engine.zero_stage else ""
        yield f"engine={engine.name} is predicted as native at the same stage{scatters}"
    if run.compiles_blocks:
        yield "the blocks are taken as uncompiled (model.compile): compiled ones read and write less between products"


def accumulation(counts: Sequence[int]) -> str:
    """Returns ascending numbers of micro-batches of a step, for people."""
    if counts[0] == counts[-1]:
        return f"{counts[0]} micro-batch{'es' if counts[0] > 1 else ''} a step"
    return f"{counts[0]} to {counts[-1]} micro-batches a step"
