"""Records all that a step launches on the fake device, with the addresses and numbers that a CUDA graph would hold.

Memory from before the step has its address, memory that the step makes a number in the order of its use: in a graph
it comes from a pool. Two steps with equal streams are one graph.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from tests.fake.device import LOWEST_ADDRESS, FakeDevice, QuickMode
from tests.fake.launches import Launch


class StepStream(QuickMode):
    """Records operations and launches inside, in their order; ``before`` is an earlier part of the same step."""

    def __init__(self, device: FakeDevice, launches: list[Launch], before: StepStream | None = None) -> None:
        super().__init__()
        self.entries: list[tuple[Any, ...]] = []
        self._device, self._launches = device, launches
        # memory of the step, in the order in which it is used
        self._made: dict[int, int] = {} if before is None else before._made
        self._start = device.next_address if before is None else before._start
        self._num_launches = len(launches)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._add_launches()
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            given = pytree.tree_leaves((args, kwargs or {}))
            if any(isinstance(value, Tensor) and value.device.type == "cuda" for value in (*given, result)):
                self.entries.append((str(func), *map(self._encoded, given)))
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._add_launches()

    def _add_launches(self) -> None:
        for launch in self._launches[self._num_launches :]:
            self.entries.append((launch.kernel, launch.programs, *map(self._place, launch.values)))
        self._num_launches = len(self._launches)

    def _encoded(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value if isinstance(value, int | float | bool | None) else str(value)
        if value.device.type != "cuda":
            return "host"
        return str(value.dtype), tuple(value.shape), value.stride(), self._place(value.data_ptr())

    def _place(self, value: Any) -> Any:
        """Returns a number as it is, and an address from inside the step by the number of its memory."""
        if not isinstance(value, int) or not max(self._start, LOWEST_ADDRESS) <= value < self._device.next_address:
            return value
        start = self._device.start_of(value)
        return "new", self._made.setdefault(start, len(self._made)), value - start


def first_difference(one: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> str:
    """Returns the first entry in which two streams differ, or an empty string."""
    for number, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return f"entry {number}: {left} and {right}"
    return (
        "" if len(one) == len(other) else f"{len(one)} and {len(other)} entries, such as {max(one, other, key=len)[-1]}"
    )
