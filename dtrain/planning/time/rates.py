"""Seconds of recorded operations on a device that is not here, by its published rates and bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from dtrain.errors import ConfigError
from dtrain.planning.devices import Device
from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.record.products import is_product, products
from dtrain.planning.record.recorder import UPDATE, RecordedCall, RecordedStep
from dtrain.planning.time.replay import RankTrace

_CPU_RATE, _CPU_BANDWIDTH = 50e9, 10e9
"""Stand-ins for a CPU, whose rates are not published: only the proportions between operations count."""


@dataclass(frozen=True)
class Rates:
    """Rates of a device.

    Attributes:
        device: see above.
        efficiency: share of the published rate that products reach.
        tf32: whether FP32 products use TF32.
    """

    device: Device
    efficiency: float = 1.0
    tf32: bool = False

    @staticmethod
    def of(run: PlannedRun, efficiency: float = 1.0) -> Rates:
        """Returns the rates of the device of ``run``."""
        return Rates(run.device, efficiency, run.is_tf32)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second; raises ``ConfigError`` if it is not published."""
        found = _CPU_BANDWIDTH if self.device.type == "cpu" else self.device.bandwidth
        if found is None:
            raise ConfigError(f"the bandwidth of {self.device.name} is not known; take another device")
        return found

    def product_s(self, call: RecordedCall) -> float:
        """Returns the seconds of a product: the longer of its FLOPs at the rate and its bytes at the bandwidth.

        Raises:
            ConfigError: the rate of the format is not published.
        """
        return sum(
            max(product.flops / (self.efficiency * self._rate(product.format)), product.nbytes / self.bandwidth)
            for product in products([call], tf32=self.tf32)
        )

    def _rate(self, format_name: str) -> float:
        rate = _CPU_RATE if self.device.type == "cpu" else self.device.rate(format_name)
        if rate is None:
            name = self.device.name
            raise ConfigError(f"no rate of {name} in {format_name} is published; take another precision")
        return rate

    def work(self, step: RecordedStep, states: Mapping[str, int]) -> Work:
        """Returns the seconds of the operations of ``step``; ``states`` are those of ``engine.memory()``.

        The update is one pass over the states, whatever operations it has.
        """
        seconds, is_of_products = [], []
        for call in step.calls:
            is_of_products.append(is_product(call.signature))
            seconds.append(self.product_s(call) if is_of_products[-1] else moved_bytes(call) / self.bandwidth)
        update = update_bytes(states) / self.bandwidth
        listed = sum(taken for taken, call in zip(seconds, step.calls, strict=True) if call.part == UPDATE)
        parts = {True: 0.0, False: 0.0}
        for number, call in enumerate(step.calls):
            if call.part == UPDATE:
                seconds[number] *= update / listed
            else:
                parts[is_of_products[number]] += seconds[number]
        return Work(step, seconds, Parts(parts[True], parts[False], update))


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
class Work:
    """A recorded step, and the seconds of each of its calls."""

    step: RecordedStep
    seconds: list[float]
    parts: Parts

    def trace(self, factor: float = 1.0) -> RankTrace:
        """Returns what the rank does if transfers take no time, each operation ``factor`` times as long."""
        step = self.step
        events: list[tuple[int, float, int, bool]] = [
            (call.at, factor * taken, -1, False) for call, taken in zip(step.calls, self.seconds, strict=True)
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
        return RankTrace(now, moments, {number: one.transfer for number, one in step.transfers.items()})


def moved_bytes(call: RecordedCall) -> int:
    """Returns the bytes that a call reads and writes; none if its result is a view, or is not written."""
    func = call.signature.func
    if getattr(func, "is_view", False) or call.signature.name.startswith(("empty", "new_empty")):
        return 0
    read = sum(tensor.nbytes for tensor in call.signature.tensors)
    return read + sum(output.nbytes for output in call.outputs)


def update_bytes(states: Mapping[str, int]) -> int:
    """Returns what an update reads and writes, in one pass over all; ``states`` are those of ``engine.memory()``."""
    return 2 * sum(states.get(kind, 0) for kind in ("main_grad", "master", "moments")) + states.get("compute", 0)
