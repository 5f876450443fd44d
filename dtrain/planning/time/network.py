"""Seconds of a collective by a latency and a bandwidth, fitted to what ``dtrain bench collectives`` has measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dtrain.errors import ConfigError
from dtrain.planning.record.ranks import HOST, NCCL, SOCKETS, Transfer

_GATHER, _REDUCE = "all_gather", "reduce_scatter"
"""Collectives of the benchmark that are taken: one that only moves bytes, and one that adds them up."""


_CASES = {HOST: "shared memory", SOCKETS: "sockets", NCCL: "nccl"}
"""The benchmark's case of each transport."""


@dataclass(frozen=True)
class Link:
    """A collective of ``world_size`` ranks takes ``latency`` seconds and ``per_byte`` for each byte received."""

    latency: float
    per_byte: float
    world_size: int

    @staticmethod
    def fit(points: Sequence[tuple[int, float]], world_size: int) -> Link:
        """Fits bytes and seconds by least squares of the relative error; neither part is below 0.

        Args:
            points: two or more sizes.
            world_size: number of ranks that measured.
        """
        # t = a + b n, weighted by 1 / t: minimize the sum of (a / t + b n / t - 1)^2
        u = [1 / seconds for _, seconds in points]
        v = [nbytes / seconds for nbytes, seconds in points]
        uu, uv, vv = sum(x * x for x in u), sum(x * y for x, y in zip(u, v, strict=True)), sum(y * y for y in v)
        determinant = uu * vv - uv * uv
        latency = (sum(u) * vv - sum(v) * uv) / determinant if determinant > 0 else 0.0
        per_byte = (sum(v) * uu - sum(u) * uv) / determinant if determinant > 0 else sum(v) / vv
        if latency < 0:
            latency, per_byte = 0.0, sum(v) / vv
        elif per_byte < 0:
            latency, per_byte = sum(u) / uu, 0.0
        return Link(latency, per_byte, world_size)

    def seconds(self, transfer: Transfer) -> float:
        """Returns the time of ``transfer``; in a ring latency is in proportion to the ranks that a rank hears of."""
        return self.latency * (transfer.world_size - 1) / (self.world_size - 1) + self.per_byte * transfer.nbytes


@dataclass(frozen=True)
class Network:
    """What collectives take between ranks.

    Attributes:
        num_ranks: that have measured it.
        gather: of all that only moves bytes.
        reduce: of sums, which the receiver forms.
    """

    num_ranks: int
    gather: Link
    reduce: Link

    @staticmethod
    def free() -> Network:
        """Returns a network whose collectives take no time."""
        link = Link(0.0, 0.0, 2)
        return Network(2, link, link)

    @staticmethod
    def read(path: Path, transport: str) -> Network:
        """Reads the results of ``dtrain bench collectives bench.out=PATH``.

        Args:
            transport: one of :mod:`dtrain.planning.record.ranks`.

        Raises:
            ConfigError: the file cannot be read, or it has no such transport, or fewer than two ranks or sizes.
        """
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
            ranks = int(results["config"]["bench"]["ranks"])
            timings = results["timings"] if results["suite"] == "collectives" else []
            links = {name: _points(timings, _CASES[transport], name) for name in (_GATHER, _REDUCE)}
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"network={path} is no result of dtrain bench collectives bench.out=FILE: {reason}"
            ) from None
        if ranks < 2 or any(len({nbytes for nbytes, _ in points}) < 2 for points in links.values()):
            raise ConfigError(
                f"network={path} does not tell latency from bandwidth: expected all_gather and reduce_scatter through "
                f"{_CASES[transport]}, of two sizes, by two ranks or more; run dtrain bench collectives on such ranks"
            )
        return Network(ranks, Link.fit(links[_GATHER], ranks), Link.fit(links[_REDUCE], ranks))

    def seconds(self, transfer: Transfer) -> float:
        link = self.reduce if transfer.op.startswith(_REDUCE) else self.gather
        return link.seconds(transfer)


def _points(timings: Sequence[Any], case: str, name: str) -> list[tuple[int, float]]:
    return [
        (int(timing["nbytes"]), median(timing["ms"]) / 1e3)
        for timing in timings
        if timing["case"] == case and timing["workload"].startswith(name)
    ]
