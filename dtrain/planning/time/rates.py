"""Computes the seconds of recorded operations from a GPU's published rates and bandwidth.

A CPU has stand-in rates, of which only the proportions count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from dtrain.errors import ConfigError
from dtrain.planning.planned_run import RecordedSteps
from dtrain.planning.record.products import MatrixProduct, products
from dtrain.planning.record.recorder import UPDATE, RecordedCall, RecordedStep
from dtrain.planning.time.replay import RankTrace

_CPU_RATE, _CPU_BANDWIDTH = 50e9, 10e9
"""Stand-ins for a CPU, whose rates are not published: only the proportions between operations count."""


class Parts(NamedTuple):
    """Seconds of a rank's operations in a step, each alone: those of forward and backward, and the update."""

    products: float
    others: float
    update: float

    @property
    def total(self) -> float:
        return sum(self)


def price(step: RecordedStep, recorded: RecordedSteps, efficiency: float) -> tuple[RankTrace, Parts]:
    """Returns what a rank does in ``step`` if transfers take no time, and the seconds of its parts.

    A product takes the longer of its FLOPs, at a share ``efficiency`` of the rate, and its bytes; all else its bytes.
    The update is one pass over the states, whatever operations it has.

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
    for call in step.calls:
        found = products([call], tf32=run.is_tf32)
        taken = sum(map(seconds_of, found)) if found else moved_bytes(call) / bandwidth
        timed.append((call, taken))
        sums[UPDATE if call.part == UPDATE else "products" if found else "others"] += taken
    update = sum(map(update_bytes, recorded.memory)) / bandwidth
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
    read = sum(tensor.nbytes for tensor in call.signature.tensors)
    return read + sum(output.nbytes for output in call.outputs)


def update_bytes(states: Mapping[str, int]) -> int:
    """Returns what an update reads and writes, in one pass over all; ``states`` are those of ``engine.memory()``."""
    return 2 * sum(states.get(kind, 0) for kind in ("main_grad", "master", "moments")) + states.get("compute", 0)
