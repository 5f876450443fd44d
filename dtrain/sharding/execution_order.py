"""Parameter groups with sharded replicas, and the order in which a pass over the model uses them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from dtrain.parameters.groups import ParamGroup
from dtrain.sharding.replicas import ShardedReplica


class ShardedGroup:
    """The replicas of one parameter group, sharded or unsharded.

    Args:
        group: parameters of the group.
        replicas: flat buffers of the group.
    """

    def __init__(self, group: ParamGroup, replicas: Sequence[ShardedReplica]) -> None:
        self.name = group.name
        self.parameters = dict(group.parameters)
        self.replicas = replicas
        self.calls = 0  # forwards of its unit that are running
        self.num_missing_gradients = 0  # in this micro-batch
        self.is_started = False
        self.is_ready = False

    @property
    def is_open(self) -> bool:
        """Whether the forward may read the parameters.

        A unit's may be read only while its own forward runs, even if prefetch or a previous use has unsharded them.
        """
        return self.is_ready and (not self.name or self.calls > 0)

    def start_unshard(self) -> None:
        if not self.is_started:
            self.is_started = True
            for replica in self.replicas:
                replica.start_unshard()

    def finish_unshard(self) -> None:
        self.start_unshard()  # if no prefetch has
        if not self.is_ready:
            self.is_ready = True
            for replica in self.replicas:
                replica.finish_unshard()

    def reshard(self) -> None:
        self.is_started = self.is_ready = False
        for replica in self.replicas:
            replica.reshard()


class ExecutionOrder:
    """The order in which a pass over the model uses the groups, expected to be that of the last pass."""

    def __init__(self, expected: Sequence[ShardedGroup]) -> None:
        self._expected = list(expected)
        self._used: list[ShardedGroup] = []
        self._index = -1  # in the expected order

    @property
    def current(self) -> ShardedGroup | None:
        return self._used[-1] if self._used else None

    @property
    def is_at_end(self) -> bool:
        return bool(self._used) and self._index == len(self._expected) - 1

    def begin(self) -> None:
        self._used, self._index = [], -1

    def use(self, group: ShardedGroup) -> None:
        self._used.append(group)
        with suppress(ValueError):  # the pass takes another order
            self._index = self._expected.index(group, self._index + 1)

    def following(self, count: int) -> list[ShardedGroup]:
        """Returns the next ``count`` groups after the current one; none if the pass takes another order."""
        if self._used and (self._index < 0 or self._expected[self._index] is not self._used[-1]):
            return []
        # a group may be used several times in a pass, but is unsharded once
        ahead = dict.fromkeys(group for group in self._expected[self._index + 1 :] if group is not self.current)
        return list(ahead)[:count]

    def end(self) -> None:
        """Ends the pass, which is what the next one is expected to be."""
        self._expected = list(self._used)

    def reverse(self) -> ExecutionOrder:
        """Returns the order of the pass reversed, as backward is expected to use the groups."""
        return ExecutionOrder(self._used[::-1])
