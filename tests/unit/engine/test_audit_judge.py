"""Which rank the evidence of all ranks names: by its own record, by the owner, by the majority, or a pair."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from dtrain.engine.parts.audit.judge import Copies, RankFindings, judge

COMPUTE = "compute replica"
CLEAN, RECORDED = RankFindings(), RankFindings(has_record=True)
BAD_MASTER = RankFindings(states=(("master", "w"),), has_record=True)
BAD_BOTH = RankFindings((("master", "w"),), ((COMPUTE, "w"),), has_record=True)
BAD_CAST = RankFindings(casts=((COMPUTE, "w"),), has_record=True)


def named(findings: list[RankFindings], *copies: Copies) -> list[tuple[tuple[int, ...], str]]:
    found = judge(findings, copies)
    assert all(item.tensor == "w" for item in found)
    return [(item.ranks, item.kind) for item in found]


def master(*fingerprints: int) -> Copies:
    return Copies("master", "w", dict(enumerate(fingerprints)))


def replica(*fingerprints: int, is_master: bool = False) -> Copies:
    return Copies(COMPUTE, "w", dict(enumerate(fingerprints)), owner=0, is_master=is_master)


@pytest.mark.parametrize(
    ("findings", "copies", "want"),
    [
        # its record names the rank, with two copies too
        ([RECORDED, BAD_MASTER], master(1, 2), [((1,), "master")]),
        # a flipped master has an old replica, which is right
        ([BAD_BOTH, RECORDED], replica(1, 1), [((0,), "master")]),
        ([BAD_CAST, RECORDED], replica(2, 1), [((0,), COMPUTE)]),
        # the owner's replica is proven by its master, or by the record of that
        ([CLEAN, CLEAN], replica(1, 2), [((1,), COMPUTE)]),
        ([RECORDED, RECORDED], replica(1, 2, is_master=True), [((1,), COMPUTE)]),
        # one rank has gathered the flipped bit of the owner, the others had gathered before
        ([BAD_MASTER, RECORDED, RECORDED], replica(2, 2, 1, is_master=True), [((0,), "master")]),
        # without a record: the majority, else all that differ
        ([CLEAN] * 3, master(1, 2, 1), [((1,), "master")]),
        ([CLEAN] * 3, replica(2, 1, 1, is_master=True), [((0,), "master")]),
        ([CLEAN] * 3, replica(1, 1, 2, is_master=True), [((2,), COMPUTE)]),
        ([CLEAN] * 2, master(1, 2), [((0, 1), "master")]),
        ([CLEAN] * 2, replica(1, 2, is_master=True), [((0, 1), f"{COMPUTE} or master")]),
        ([RECORDED] * 3, master(1, 2, 3), [((0, 1, 2), "master")]),
        # one rank is named by its record, another one diverged before that
        ([BAD_MASTER, *[RECORDED] * 3], master(5, 1, 1, 2), [((0,), "master"), ((3,), "master")]),
        # ranks 1 and 3 of 2 replicas hold the same interval: their records name the rank, else the pair is named
        ([*[RECORDED] * 3, BAD_MASTER], Copies("master", "w", {1: 1, 3: 2}), [((3,), "master")]),
        ([RECORDED] * 4, Copies("master", "w", {1: 1, 3: 2}), [((1, 3), "master")]),
        ([RECORDED] * 6, Copies("master", "w", {1: 1, 3: 2, 5: 1}), [((3,), "master")]),
        # each replica gathers its own masters
        ([RECORDED] * 4, Copies(COMPUTE, "w", {2: 1, 3: 2}, owner=3), [((2,), COMPUTE)]),
        # without a record the rank whose replica is not the cast of its master
        ([CLEAN, RankFindings(casts=((COMPUTE, "w"),))], master(1, 2), [((1,), f"{COMPUTE} or master")]),
        # without a record a replica that is not the cast may be right, and its master wrong
        ([RankFindings(casts=((COMPUTE, "w"),)), CLEAN], replica(1, 2), [((0,), f"{COMPUTE} or master")]),
    ],
)
def test_who_is_named(findings: list[RankFindings], copies: Copies, want: list[tuple[tuple[int, ...], str]]) -> None:
    assert named(findings, copies) == want


def test_what_changed_on_all_ranks_was_written() -> None:
    written = RankFindings(constants=(("buffer", "w"),))
    assert named([written, written]) == []
    assert named([RECORDED] * 3, master(1, 1, 1), replica(2, 2, 2)) == [], "nothing differs"
    assert named([written, CLEAN]) == [((0,), "buffer")]
    assert named([RankFindings(shards=(("frozen", "w"),)), CLEAN]) == [((0,), "frozen")]


def test_findings_survive_json() -> None:
    findings = replace(BAD_MASTER, intervals=(("master", "w", 5, -7),))
    assert RankFindings.from_dict(json.loads(json.dumps(asdict(findings)))) == findings
