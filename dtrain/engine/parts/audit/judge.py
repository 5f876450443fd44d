"""Names what is corrupt from the evidence of all ranks: a pure function, so every rank names the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.errors import Corruption
from dtrain.parameters.model_states import MASTER

Key = tuple[str, str]
"""Kind and name of a tensor."""

_RECORD = "not the bits that its last update wrote"
_CAST = "not the cast of its master"
_FLAG = "has_record"
_CONSTANT = "changed, though nothing has written to it"


@dataclass(frozen=True)
class RankFindings:
    """The findings of one rank.

    Attributes:
        states: masters and optimizer states that differ from the record of their update.
        casts: compute weights that differ from the cast of this rank's master.
        shards: frozen shards that differ from their first values.
        constants: frozen parameters and buffers that differ from their first values.
        intervals: (kind, name, first element, fingerprint) of masters and states that other replicas hold with other
            bits.
        has_record: whether there is a record of an update.
    """

    states: tuple[Key, ...] = ()
    casts: tuple[Key, ...] = ()
    shards: tuple[Key, ...] = ()
    constants: tuple[Key, ...] = ()
    intervals: tuple[tuple[str, str, int, int], ...] = ()
    has_record: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RankFindings:
        """Returns the evidence that another rank has sent as JSON."""
        lists = {name: tuple(map(tuple, values[name])) for name in values if name != _FLAG}
        return cls(**lists, has_record=values[_FLAG])


@dataclass(frozen=True)
class Copies:
    """The copies of one tensor, or of an interval of it, that several ranks hold.

    Attributes:
        kind, name: of the tensor.
        fingerprints: of the copies, by rank.
        owner: the rank whose master the others are copies of; None if each has a master of its own.
        is_master: whether the owner's copy is its master.
    """

    kind: str
    name: str
    fingerprints: Mapping[int, int]
    owner: int | None = None
    is_master: bool = False


def judge(evidence: Sequence[RankFindings], copies: Sequence[Copies]) -> list[Corruption]:
    """Returns the corruptions: first what a rank's own evidence proves, then what copies that differ show.

    Args:
        evidence: of each rank.
        copies: what several ranks hold.
    """
    found = list(_local(evidence))
    for item in copies:
        if len(set(item.fingerprints.values())) > 1:
            found += _among(item, evidence)
    return list(dict.fromkeys(found))


def _local(evidence: Sequence[RankFindings]) -> Iterator[Corruption]:
    # what changed on all ranks was written, by a program that no counter shows
    everywhere = set.intersection(*(set(own.constants) for own in evidence))
    for rank, own in enumerate(evidence):
        for kind, name in own.states:
            yield Corruption((rank,), name, kind, _RECORD)
        for kind, name in own.casts:
            if (MASTER, name) not in own.states:  # else the replica is right, and the master was reported
                yield Corruption((rank,), name, kind if own.has_record else f"{kind} or {MASTER}", _CAST)
        for kind, name in own.shards:
            yield Corruption((rank,), name, kind, _CONSTANT)
        for kind, name in own.constants:
            if (kind, name) not in everywhere:
                yield Corruption((rank,), name, kind, _CONSTANT)


def _among(item: Copies, evidence: Sequence[RankFindings]) -> Iterator[Corruption]:
    key = (MASTER if item.owner is not None else item.kind, item.name)
    # a rank whose own evidence explains its bits is named already
    reported = {rank for rank, own in enumerate(evidence) if key in own.states}
    if item.owner is not None:
        reported |= {rank for rank, own in enumerate(evidence) if (item.kind, item.name) in own.casts}
    elif item.kind == MASTER:  # without a record, what is wrong may be the master of a replica that is not its cast
        casts = (() if own.has_record else own.casts for own in evidence)
        reported |= {rank for rank, keys in enumerate(casts) if any(name == item.name for _, name in keys)}
    owner = item.owner
    spread = item.fingerprints[owner] if owner is not None and owner in reported else None  # gathered after the fault
    values = {rank: value for rank, value in item.fingerprints.items() if rank not in reported and value != spread}
    if len(set(values.values())) < 2:
        return
    if owner in values and (evidence[owner].has_record or not item.is_master):
        truth, reason = values[owner], f"not the bits of rank {owner}, which owns it"
    else:
        truth, count = Counter(values.values()).most_common(1)[0]
        reason = "not the bits of the other ranks"
        if 2 * count <= len(values):
            kind = f"{item.kind} or {MASTER}" if item.is_master else item.kind
            yield Corruption(tuple(values), item.name, kind, "their copies differ, without a majority")
            return
    for rank, value in values.items():
        if value != truth:
            yield Corruption((rank,), item.name, MASTER if item.is_master and rank == owner else item.kind, reason)
