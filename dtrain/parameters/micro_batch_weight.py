"""The weight of a micro-batch in the global mean."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Weight:
    """The weight of a micro-batch: ``value`` 0-dim FP32 on the device, and whether the host knows that it is one.

    Then a pass over memory is saved; to ask a device would cost more than the pass.
    """

    value: Tensor
    is_one: bool = False

    @staticmethod
    def of_ranks(row: Tensor) -> list[Weight]:
        """From ``row`` [world_size]; the host looks at values that lie on its side only."""
        if row.device.type != "cpu":
            return [Weight(value) for value in row.unbind()]
        return [Weight(value, number == 1.0) for value, number in zip(row.unbind(), row.tolist(), strict=True)]
