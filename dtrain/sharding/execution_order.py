"""The order in which a pass over the model uses its parameter groups."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from dtrain.sharding.group import ParameterGroup


class ExecutionOrder:
    """The order in which a pass over the model uses the groups: ``used``, expected to be that of the last pass."""

    def __init__(self, expected: Sequence[ParameterGroup]) -> None:
        self._expected = list(expected)
        self.used: list[ParameterGroup] = []
        self._index = -1  # in the expected order

    @property
    def current(self) -> ParameterGroup | None:
        return self.used[-1] if self.used else None

    def begin(self) -> None:
        self.used, self._index = [], -1

    def use(self, group: ParameterGroup) -> None:
        self.used.append(group)
        if group in self._expected[self._index + 1 :]:  # else the pass takes another order
            self._index = self._expected.index(group, self._index + 1)

    def following(self, count: int) -> list[ParameterGroup]:
        """Returns the next ``count`` groups after the current one; none if the pass takes another order."""
        if self.used and (self._index < 0 or self._expected[self._index] is not self.used[-1]):
            return []
        ahead: list[ParameterGroup] = []
        for group in islice(self._expected, self._index + 1, None):
            if len(ahead) == count:
                break
            # a group may be used several times in a pass, but is unsharded once
            if group is not self.current and group not in ahead:
                ahead.append(group)
        return ahead

    def end(self) -> None:
        """Ends the pass, which is what the next one is expected to be."""
        self._expected = list(self.used)
