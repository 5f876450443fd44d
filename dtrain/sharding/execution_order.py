"""Parameter groups whose full replicas come and go, and the order in which a pass over the model uses them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from dtrain.parameters.groups import ParamGroup
from dtrain.sharding.replicas import ShardedReplica


class ShardedGroup:
    """The full replicas of one parameter group.

    Args:
        group: its parameters.
        replicas: its flat buffers.
    """

    def __init__(self, group: ParamGroup, replicas: Sequence[ShardedReplica]) -> None:
        self.name = group.name
        self.parameters = dict(group.parameters)
        self.replicas = replicas
        self.calls = 0  # forwards of its unit that are under way
        self.gradients_to_come = 0  # in this micro-batch
        self.is_started = False
        self.is_ready = False

    @property
    def is_open(self) -> bool:
        """Whether the forward may read the parameters: of a unit only while its own forward runs, always alike."""
        return self.is_ready and (not self.name or self.calls > 0)

    def start_unshard(self) -> None:
        """Starts the gather, once."""
        if not self.is_started:
            self.is_started = True
            for replica in self.replicas:
                replica.start_unshard()

    def finish_unshard(self) -> None:
        """Waits for the gather: from here the parameters have their values."""
        self.start_unshard()
        if not self.is_ready:
            self.is_ready = True
            for replica in self.replicas:
                replica.finish_unshard()

    def reshard(self) -> None:
        """Back to the shards."""
        self.is_started = self.is_ready = False
        for replica in self.replicas:
            replica.reshard()


class ExecutionOrder:
    """The order in which a pass over the model uses the groups; the last pass foretells the next."""

    def __init__(self, expected: Sequence[ShardedGroup]) -> None:
        self._expected = list(expected)
        self._used: list[ShardedGroup] = []
        self._place = -1  # in what is expected

    @property
    def current(self) -> ShardedGroup | None:
        """The group that was used last."""
        return self._used[-1] if self._used else None

    @property
    def is_at_end(self) -> bool:
        """Whether no other group is expected."""
        return bool(self._used) and self._place == len(self._expected) - 1

    def begin(self) -> None:
        """Opens a pass."""
        self._used, self._place = [], -1

    def use(self, group: ShardedGroup) -> None:
        """Notes the next group."""
        self._used.append(group)
        with suppress(ValueError):  # where the pass takes another course
            self._place = self._expected.index(group, self._place + 1)

    def following(self, count: int) -> list[ShardedGroup]:
        """The next ``count`` groups, without the current one; none where the pass takes another course."""
        if self._used and (self._place < 0 or self._expected[self._place] is not self._used[-1]):
            return []
        ahead = dict.fromkeys(group for group in self._expected[self._place + 1 :] if group is not self.current)
        return list(ahead)[:count]

    def end(self) -> None:
        """Closes the pass."""
        self._expected = list(self._used)

    def reverse(self) -> ExecutionOrder:
        """The pass in the other direction."""
        return ExecutionOrder(self._used[::-1])
