"""Hosts that are killed or lose their network: the others end, and each names the host (P9).

The hosts are namespaces of one machine, so their ranks reach each other by the network alone.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.cluster import Cluster, HostRank
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.hosts import INTERFACE, Hosts, unsupported_reason
from tests.helpers.launch import SMALL, curve

pytestmark = pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason() or "hosts can be made")

EXHAUSTIVE = pytest.mark.exhaustive
CRASH_S, LIMIT_S = 2.0, 3.0
SLACK_S = 8.0  # of a busy machine
SETTINGS = (*SMALL, *("train.steps=100000", "train.save_every=2", "train.eval_every=0", f"supervise.limit_s={LIMIT_S}"))


@pytest.fixture(scope="module")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Hosts(3, tmp_path_factory.mktemp("shared")) as hosts:
        yield Cluster(hosts)


@pytest.fixture
def cluster(three_hosts: Cluster) -> Iterator[Cluster]:
    """Three hosts that are up; what a failed test leaves on them is ended with them."""
    three_hosts.hosts.start()
    yield three_hosts
    for host in three_hosts.hosts:
        if host.is_up and host.processes():
            host.kill()


def started(cluster: Cluster) -> list[HostRank]:
    """The ranks of a run that has trained some steps."""
    run_dir = cluster.folder() / "run"
    jobs = cluster.ranks(*SETTINGS, cluster.data, f"run_dir={run_dir}")
    jobs[0].wait_until(lambda: max((line["step"] for line in curve(run_dir)), default=0) > 2)
    return jobs


def assert_ended(jobs: Sequence[HostRank], limit_s: float, named: str) -> None:
    """Asserts that all ``jobs`` end within the limit, failed, name ``named`` and leave nothing."""
    for job in jobs:
        assert job.wait(limit_s + SLACK_S) not in (0, 75), job.output
    for job in jobs:
        assert re.search(rf"^dtrain: .*{named}", job.output, re.M), job.output
        deadline = time.monotonic() + SLACK_S
        while job.host.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not job.host.processes()


@pytest.mark.parametrize(
    ("victim", "vanishes"), [(1, True), *(pytest.param(*case, marks=EXHAUSTIVE) for case in ((0, True), (2, False)))]
)
def test_every_other_host_names_it(cluster: Cluster, faults: FaultCounts, victim: int, *, vanishes: bool) -> None:
    jobs = started(cluster)
    if vanishes:  # no connection of it is closed
        cluster.hosts[victim].unplug()
    cluster.hosts[victim].kill()
    silent, ended = rf"host{victim} \(rank {victim}\) sends no heartbeat", rf"rank {victim} on host{victim} has ended"
    others = [job for rank, job in enumerate(jobs) if rank != victim]
    assert_ended(others, *((LIMIT_S, silent) if vanishes else (CRASH_S, ended)))
    faults.passed("P9", 1)


def is_watcher(pid: int) -> bool:
    with suppress(OSError):  # it has ended since
        return b"dtrain.supervision.watcher" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@EXHAUSTIVE
def test_a_rank_that_hangs_is_named_on_every_host(cluster: Cluster, faults: FaultCounts) -> None:
    jobs = started(cluster)
    (rank,) = (pid for pid in cluster.hosts[2].processes() if not is_watcher(pid))
    os.kill(rank, signal.SIGSTOP)
    assert_ended(jobs, LIMIT_S, r"rank 2 is stopped \(SIGSTOP\)")
    assert all(re.search(r"^dtrain: on host2: rank 2 is stopped", job.output, re.M) for job in jobs[:2])
    faults.passed("P9", 1)


def test_the_network_of_a_killed_host_does_not_answer_for_the_next(cluster: Cluster) -> None:
    host = cluster.hosts[2]
    network = os.open(f"/proc/{host.init}/ns/net", os.O_RDONLY)  # keeps it, as a busy kernel does for a while
    try:
        host.kill()
        cluster.hosts.start()
        command = ["nsenter", f"--net=/proc/self/fd/{network}", "ip", "-o", "link"]
        links = subprocess.run(command, check=True, capture_output=True, text=True, pass_fds=[network]).stdout
        assert "lo:" in links
        assert INTERFACE not in links
    finally:
        os.close(network)
