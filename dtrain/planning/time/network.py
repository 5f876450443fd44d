"""Seconds of collectives: on a network that was measured, or on one that need not be here.

What ``dtrain bench collectives`` has measured is fitted by a latency and a bandwidth. NCCL on a network that is not
here is modeled by published ones (sources: docs/results/scaling/README.md). ``n`` ranks on ``m`` nodes, ``n / m`` of a
collective on each, receive ``b`` bytes each:

- All-gather, reduce-scatter: a ring of ``n - 1`` steps, ``m - 1`` of them between nodes (Thakur, Rabenseifner, Gropp
  2005, sections 4.1 and 4.2). A ring crosses each boundary of nodes once, through all NICs of its ranks there:
  ``latency + b / min(NVLink, ranks on a node x NIC)``. Of NCCL's protocols Simple has the bandwidth and LL the latency;
  the faster is taken.
- All-reduce: twice that.
- All-to-all: ``n - 1`` pairs (pairwise exchange). Nothing can be aggregated: what leaves a node goes
  through the rank's own NIC.
- Broadcast: a ring in which chunks follow each other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

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
        """Fits bytes and seconds, of two sizes or more, by least squares of the relative error; no part is below 0."""
        rows = np.array([(1 / seconds, nbytes / seconds) for nbytes, seconds in points])  # times (a, b) should be 1
        latency, per_byte = np.linalg.lstsq(rows, np.ones(len(rows)))[0].tolist()
        alone = (rows.sum(0) / (rows * rows).sum(0)).tolist()  # each part without the other
        if latency < 0:
            latency, per_byte = 0.0, alone[1]
        elif per_byte < 0:
            latency, per_byte = alone[0], 0.0
        return Link(latency, per_byte, world_size)

    def seconds(self, transfer: Transfer) -> float:
        """Returns the time of ``transfer``; in a ring latency is in proportion to the ranks that a rank hears of."""
        return self.latency * (transfer.world_size - 1) / (self.world_size - 1) + self.per_byte * transfer.nbytes


@dataclass(frozen=True)
class Network:
    """The time of collectives, as ``num_ranks`` ranks have measured it: of those that move bytes, and of sums."""

    num_ranks: int
    gather: Link
    reduce: Link

    @staticmethod
    def read(path: Path, transport: str) -> Network:
        """Reads the results of ``dtrain bench collectives bench.out=PATH`` through ``transport``.

        Raises:
            ConfigError: the file cannot be read, or it has no such transport, or fewer than two ranks or sizes.
        """
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
            ranks = int(results["config"]["bench"]["ranks"])
            timings = results["timings"] if results["suite"] == "collectives" else []
            links = {name: _points(timings, _CASES[transport], name) for name in (_GATHER, _REDUCE)}
        except (OSError, ValueError, KeyError, TypeError) as error:
            expected = "a result of dtrain bench collectives bench.out=FILE"
            raise ConfigError(f"network={path} is no {expected[2:]}: {type(error).__name__}: {error}") from None
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


# -- networks that need not be here ------------------------------------------------------------------------------------

_US = 1e-6
_BASE, _LL_BASE = 8.4 * _US, 6.6 * _US
_LL_HOP, _LL_NODE_HOP = 2.0 * _US, 2.7 * _US
_LL_BANDWIDTH, _LL_NODE_BANDWIDTH = 87.7e9, 20e9
"""Limits of LL inside a node and between nodes; it has at most half of Simple's bandwidth, too."""


@dataclass(frozen=True)
class Fabric:
    """A network of GPUs.

    Attributes:
        inside: bytes a second that a GPU receives from others of its node, as NCCL reaches it.
        nic: the same from other nodes, through the GPU's own NIC or its share of one; None: there is one node.
        hop: seconds of a step of a ring inside a node.
        node_hop: seconds of a step between nodes.
        pair: seconds for each other rank of an all-to-all.
        line: its links, for people.
    """

    name: str
    ranks_per_node: int
    inside: float
    nic: float | None
    hop: float
    node_hop: float
    pair: float
    line: str

    def seconds(self, transfer: Transfer) -> float:
        """Returns the time of ``transfer``, of consecutive ranks or every ``stride``-th."""
        size, nbytes = transfer.world_size, transfer.nbytes
        per_node = min(size, max(1, self.ranks_per_node // transfer.stride))
        if size == 1:
            return 0.0
        if transfer.op.startswith("all_to_all"):
            outside = nbytes * (size - per_node) / (size - 1)
            taken = max((nbytes - outside) / self.inside, outside / self._nic(size) if outside else 0.0)
            return _BASE + (size - 1) * self.pair + taken
        nodes, rounds = -(-size // per_node), 2 if transfer.op == "all_reduce_max" else 1
        inside, between = rounds * (size - nodes), rounds * (nodes - 1)
        bandwidth, limit = self.inside, _LL_BANDWIDTH
        if nodes > 1:
            bandwidth, limit = min(self.inside, per_node * self._nic(size)), _LL_NODE_BANDWIDTH
        simple = _BASE + inside * self.hop + between * self.node_hop + nbytes / bandwidth
        # a network whose steps are slower than InfiniBand's is slower with LL too
        ll_hop = max(_LL_NODE_HOP, self.node_hop * _LL_NODE_HOP / (14 * _US))
        low = _LL_BASE + inside * _LL_HOP + between * ll_hop + nbytes / min(bandwidth / 2, limit)
        return min(simple, low)

    def _nic(self, size: int) -> float:
        if self.nic is None:
            raise ConfigError(
                f"network={self.name} is one node of {self.ranks_per_node} ranks, and {size} ranks "
                f"communicate; take one of {', '.join(name for name, f in FABRICS.items() if f.nic is not None)}"
            )
        return self.nic


_HOPPER, _AMPERE = 360e9, 235e9
_INFINIBAND = (6 * _US, 14 * _US, 3.4 * _US)  # NCCL's constants of Simple on hosts of AMD; the pairs are measured
_EFA, _TCP, _NVLINK = (10 * _US, 10 * _US, 3.4 * _US), (6 * _US, 30 * _US, 10 * _US), (3.4 * _US,) * 3
FABRICS = {
    fabric.name: fabric
    for fabric in (
        Fabric("ib-400g", 8, _HOPPER, 47e9, *_INFINIBAND, "8 GPUs a node, NVLink 4, a 400 Gb/s NIC a GPU"),
        Fabric("ib-200g", 8, _AMPERE, 24e9, *_INFINIBAND, "8 GPUs a node, NVLink 3, a 200 Gb/s NIC a GPU"),
        Fabric("efa", 8, _HOPPER, 42e9, *_EFA, "AWS p5: 8 GPUs a node, NVLink 4, 4 x 100 Gb/s a GPU"),
        Fabric("ethernet", 8, _AMPERE, 7e9 / 8, *_TCP, "8 GPUs a node, NVLink 3, TCP, 100 Gb/s a node"),
        Fabric("nvlink", 8, _HOPPER, None, *_NVLINK, "one node of 8 GPUs, NVLink 4"),
    )
}
"""Networks by name."""
