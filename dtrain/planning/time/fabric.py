"""Seconds of NCCL's collectives on networks that need not be here, by latencies and bandwidths that are published.

``n`` ranks on ``m`` nodes, ``n / m`` of a collective on each, receive ``b`` bytes each. Sources are in
docs/results/scaling/README.md:

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

from dataclasses import dataclass

from dtrain.errors import ConfigError, nearest
from dtrain.planning.record.ranks import Transfer

_US = 1e-6
_BASE, _LL_BASE = 8.4 * _US, 6.6 * _US
_LL_HOP, _LL_NODE_HOP = 2.0 * _US, 2.7 * _US
_LL_BANDWIDTH, _LL_NODE_BANDWIDTH = 87.7e9, 20e9
"""Limits of LL inside a node and between nodes; it has at most half of Simple's bandwidth, too."""


@dataclass(frozen=True)
class Group:
    """Ranks of one collective: ``size`` in all, of which ``per_node`` are on a node."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)


@dataclass(frozen=True)
class Fabric:
    """A network of GPUs.

    Attributes:
        name: such as ``ib-400g``.
        ranks_per_node: GPUs of a node.
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

    def group(self, transfer: Transfer) -> Group:
        """Returns the ranks of ``transfer``: consecutive ones, or every ``stride``-th."""
        size = transfer.world_size
        return Group(size, min(size, max(1, self.ranks_per_node // transfer.stride)))

    def seconds(self, transfer: Transfer) -> float:
        """Returns the time of ``transfer``."""
        group = self.group(transfer)
        if group.size == 1:
            return 0.0
        if transfer.op.startswith("all_to_all"):
            return self._all_to_all(transfer.nbytes, group)
        return self.ring(transfer.nbytes, group, 2 if transfer.op == "all_reduce_max" else 1)

    def ring(self, nbytes: int, group: Group, rounds: int = 1) -> float:
        """Returns the time of a ring of ``rounds`` times all ranks, in which a rank receives ``nbytes``."""
        inside, between = rounds * (group.size - group.nodes), rounds * (group.nodes - 1)
        bandwidth, limit = self.inside, _LL_BANDWIDTH
        if group.nodes > 1:
            bandwidth, limit = min(self.inside, group.per_node * self._nic(group)), _LL_NODE_BANDWIDTH
        simple = _BASE + inside * self.hop + between * self.node_hop + nbytes / bandwidth
        # a network whose steps are slower than InfiniBand's is slower with LL too
        ll_hop = max(_LL_NODE_HOP, self.node_hop * _LL_NODE_HOP / (14 * _US))
        low = _LL_BASE + inside * _LL_HOP + between * ll_hop + nbytes / min(bandwidth / 2, limit)
        return min(simple, low)

    def _all_to_all(self, nbytes: int, group: Group) -> float:
        others = group.size - 1
        outside = nbytes * (group.size - group.per_node) / others
        taken = (nbytes - outside) / self.inside
        if outside:
            taken = max(taken, outside / self._nic(group))
        return _BASE + others * self.pair + taken

    def _nic(self, group: Group) -> float:
        if self.nic is None:
            raise ConfigError(
                f"network={self.name} is one node of {self.ranks_per_node} ranks, and {group.size} ranks "
                f"communicate; take one of {', '.join(name for name, f in FABRICS.items() if f.nic is not None)}"
            )
        return self.nic


_HOPPER, _AMPERE = 360e9, 235e9
_INFINIBAND = (6 * _US, 14 * _US, 3.4 * _US)  # NCCL's constants of Simple on hosts of AMD; the pairs are measured
FABRICS = {
    fabric.name: fabric
    for fabric in (
        Fabric("ib-400g", 8, _HOPPER, 47e9, *_INFINIBAND, "8 GPUs a node, NVLink 4, a 400 Gb/s NIC a GPU"),
        Fabric("ib-200g", 8, _AMPERE, 24e9, *_INFINIBAND, "8 GPUs a node, NVLink 3, a 200 Gb/s NIC a GPU"),
        Fabric(
            "efa",
            8,
            _HOPPER,
            42e9,
            10 * _US,
            10 * _US,
            3.4 * _US,
            "AWS p5: 8 GPUs a node, NVLink 4, 4 x 100 Gb/s a GPU",
        ),
        Fabric(
            "ethernet",
            8,
            _AMPERE,
            7e9 / 8,
            6 * _US,
            30 * _US,
            10 * _US,
            "8 GPUs a node, NVLink 3, TCP, 100 Gb/s a node",
        ),
        Fabric("nvlink", 8, _HOPPER, None, 3.4 * _US, 3.4 * _US, 3.4 * _US, "one node of 8 GPUs, NVLink 4"),
    )
}
"""Networks by name."""


def find_fabric(name: str) -> Fabric:
    """Returns the network called ``name``.

    Raises:
        ConfigError: there is none.
    """
    if name not in FABRICS:
        raise ConfigError(f"network={name} is neither a file nor a known network{nearest(name, FABRICS)}")
    return FABRICS[name]
