"""A clock that advances by the time that operations would take on a device that is not here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dtrain.errors import ConfigError
from dtrain.planning.calls import CallRecorder, RecordedCall, TensorSpec
from dtrain.planning.devices import Device
from dtrain.planning.products import is_product, products
from dtrain.planning.timeline import Clock

_CPU_RATE, _CPU_BANDWIDTH = 50e9, 10e9
"""Stand-ins for a CPU, whose rates are not published: only the proportions between operations count."""


class VirtualClock(Clock):
    """Seconds that are added by hand.

    Attributes:
        now: seconds since the beginning.
        factor: by which what is added is multiplied.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.now = 0.0
        self.factor = 1.0

    def advance(self, seconds: float) -> None:
        self.now += self.factor * seconds

    def mark(self) -> float:
        return self.now


class OperationClock(CallRecorder):
    """Advances a clock by each operation inside: products at a share of the published rate, others at the bandwidth.

    A product takes the longer of its FLOPs and its bytes. No call is kept.
    """

    def __init__(self, model: nn.Module, device: Device, clock: VirtualClock, efficiency: float, *, tf32: bool) -> None:
        """Args:
        model, device: see above.
        clock: is advanced.
        efficiency: share of the published rate that products reach.
        tf32: whether FP32 products use TF32.

        Raises:
            ConfigError: the bandwidth of the device is not published.
        """
        super().__init__(model)
        self._device = device
        self._clock = clock
        self._efficiency = efficiency
        self._tf32 = tf32
        self._rates: dict[str, float] = {}
        self._bandwidth = _CPU_BANDWIDTH if device.type == "cpu" else device.bandwidth
        if self._bandwidth is None:
            raise ConfigError(f"the bandwidth of {device.name} is not known; take another device")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        while self.calls:
            self._clock.advance(self._seconds(self.calls.pop()))
        return result

    def _seconds(self, call: RecordedCall) -> float:
        assert self._bandwidth is not None
        if not is_product(call.signature):
            return moved_bytes(call) / self._bandwidth
        return sum(
            max(product.flops / (self._efficiency * self._rate(product.format)), product.nbytes / self._bandwidth)
            for product in products([call])
        )

    def _rate(self, format_name: str) -> float:
        name = "tf32" if self._tf32 and format_name == "fp32" else format_name
        if name not in self._rates:
            rate = _CPU_RATE if self._device.type == "cpu" else self._device.rate(name)
            if rate is None:
                raise ConfigError(f"no rate of {self._device.name} in {name} is published; take another precision")
            self._rates[name] = rate
        return self._rates[name]


def moved_bytes(call: RecordedCall) -> int:
    """Returns the bytes that a call reads and writes; none if its result is a view, or is not written."""
    func = call.signature.func
    if getattr(func, "is_view", False) or call.signature.name.startswith(("empty", "new_empty")):
        return 0
    read = sum(value.nbytes for value in call.signature.values if isinstance(value, TensorSpec))
    return read + sum(output.nbytes for output in call.outputs)


def update_bytes(states: Mapping[str, int]) -> int:
    """Returns what an update reads and writes, in one pass over all; ``states`` are those of ``engine.memory()``."""
    return 2 * sum(states.get(kind, 0) for kind in ("main_grad", "master", "moments")) + states.get("compute", 0)
