"""Computes the seconds of recorded operations from a GPU's published rates and bandwidth.

A CPU has stand-in rates, of which only the proportions count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from dtrain.errors import ConfigError
from dtrain.planning.devices import Device
from dtrain.planning.record.products import is_product, products
from dtrain.planning.record.recorder import OTHER, UPDATE, RecordedCall, RecordedStep
from dtrain.planning.time.replay import RankTrace

_CPU_RATE, _CPU_BANDWIDTH = 50e9, 10e9
"""Stand-ins for a CPU, whose rates are not published: only the proportions between operations count."""


@dataclass(frozen=True)
class Parts:
    """Seconds of a rank's operations in a step, each alone.

    Attributes:
        products, others: of forward and backward.
        update: gradients, masters and states, each read and written at the bandwidth.
    """

    products: float
    others: float
    update: float

    @property
    def total(self) -> float:
        return self.products + self.others + self.update


@dataclass(frozen=True)
class Rates:
    """Rates of a device; each method raises ``ConfigError`` if one that it needs is not published.

    Attributes:
        efficiency: share of the published rate that products reach.
        tf32: whether FP32 products use TF32.
    """

    device: Device
    efficiency: float = 1.0
    tf32: bool = False

    @cached_property
    def _bandwidth(self) -> float:
        found = _CPU_BANDWIDTH if self.device.type == "cpu" else self.device.bandwidth
        if found is None:
            raise ConfigError(f"the bandwidth of {self.device.name} is not known; take another device")
        return found

    def price(self, step: RecordedStep, states: Mapping[str, int]) -> tuple[RankTrace, Parts]:
        """Returns what a rank does in ``step`` if transfers take no time, and the seconds of its parts.

        The update is one pass over the ``states``, bytes of ``engine.memory()``, whatever operations it has.
        """
        seconds: list[float] = []
        sums: defaultdict[str, float] = defaultdict(float)
        for call in step.calls:
            multiplies = is_product(call.signature)
            seconds.append(self._product_s(call) if multiplies else moved_bytes(call) / self._bandwidth)
            sums[UPDATE if call.part == UPDATE else "products" if multiplies else OTHER] += seconds[-1]
        update = update_bytes(states) / self._bandwidth
        events = [
            (call.at, taken * update / sums[UPDATE] if call.part == UPDATE else taken, -1, False)
            for call, taken in zip(step.calls, seconds, strict=True)
        ]
        for number, recorded in step.transfers.items():
            events.append((recorded.started, 0.0, number, False))
            if recorded.waited is not None and recorded.waited <= step.end:
                events.append((recorded.waited, 0.0, number, True))
        now, moments = 0.0, []
        for _, taken, number, is_wait in sorted(events):
            now += taken
            if number >= 0:
                moments.append((now, number, is_wait))
        trace = RankTrace(now, moments, {number: one.transfer for number, one in step.transfers.items()})
        return trace, Parts(sums["products"], sums[OTHER], update)

    def _product_s(self, call: RecordedCall) -> float:
        """Returns the longer of a product's FLOPs at the rate and its bytes at the bandwidth."""
        return sum(
            max(product.flops / (self.efficiency * self._rate(product.format)), product.nbytes / self._bandwidth)
            for product in products([call], tf32=self.tf32)
        )

    def _rate(self, format_name: str) -> float:
        rate = _CPU_RATE if self.device.type == "cpu" else self.device.rate(format_name)
        if rate is None:
            name = self.device.name
            raise ConfigError(f"no rate of {name} in {format_name} is published; take another precision")
        return rate


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
