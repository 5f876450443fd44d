"""Hosts that are killed or lose their network: the others end, each names the host, and the run resumes elsewhere (P9).

The hosts are namespaces of one machine, so their ranks reach each other by the network alone.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.cluster import Cluster, HostRank
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.hosts import Host, Hosts, unsupported_reason
from tests.helpers.launch import SMALL, curve, record_of, train
from tests.helpers.short_lease import FACTORY

pytestmark = pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason() or "hosts can be made")

EXHAUSTIVE = pytest.mark.exhaustive
CRASH_S = 2.0
LIMIT_S = 3.0
SLACK_S = 8.0  # of a busy machine
SETTINGS = (
    *SMALL,
    FACTORY,
    "engine.reproducible=true",
    "train.save_every=2",
    "train.eval_every=0",
    f"supervise.limit_s={LIMIT_S}",
    "supervise.restarts=0",  # it is killed on purpose, often without a newer checkpoint
)
ENDLESS = "train.steps=100000"


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


def last_step(run_dir: Path) -> int:
    return max((line["step"] for line in curve(run_dir)), default=0)


def end_host(cluster: Cluster, victim: int, *, vanishes: bool) -> None:
    """Kills a host. One that vanishes loses its network first, so that no connection of it is closed."""
    if vanishes:
        cluster.hosts[victim].unplug()
    cluster.hosts[victim].kill()


def assert_ended(jobs: Sequence[HostRank], limit_s: float, named: str) -> float:
    """Asserts that all ``jobs`` end within the limit, failed, name ``named`` and leave nothing; returns the time."""
    began = time.monotonic()
    for job in jobs:
        assert job.wait(limit_s + SLACK_S) not in (0, 75), job.output
    seconds = time.monotonic() - began
    for job in jobs:
        assert re.search(rf"^dtrain: .*{named}", job.output, re.M), job.output
        deadline = time.monotonic() + SLACK_S
        while job.host.processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not job.host.processes()
    return seconds


@pytest.mark.parametrize(
    ("victim", "vanishes"), [(1, True), *(pytest.param(*case, marks=EXHAUSTIVE) for case in ((0, True), (2, False)))]
)
def test_every_other_host_names_it(cluster: Cluster, faults: FaultCounts, victim: int, *, vanishes: bool) -> None:
    run_dir = cluster.folder() / "run"
    jobs = cluster.ranks(*SETTINGS, ENDLESS, cluster.data, f"run_dir={run_dir}")
    jobs[0].wait_until(lambda: last_step(run_dir) > 2)
    end_host(cluster, victim, vanishes=vanishes)
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
    run_dir = cluster.folder() / "run"
    jobs = cluster.ranks(*SETTINGS, ENDLESS, cluster.data, f"run_dir={run_dir}")
    jobs[0].wait_until(lambda: last_step(run_dir) > 2)
    (rank,) = (pid for pid in cluster.hosts[2].processes() if not is_watcher(pid))
    os.kill(rank, signal.SIGSTOP)
    assert_ended(jobs, LIMIT_S, r"rank 2 is stopped \(SIGSTOP\)")
    assert all(re.search(r"^dtrain: on host2: rank 2 is stopped", job.output, re.M) for job in jobs[:2])
    faults.passed("P9", 1)


def watcher_is_connected(host: Host) -> bool:
    """Whether the watcher of ``host`` is connected to another host; before, only ``launch.timeout_s`` ends ranks."""
    connected = {line[9] for line in host.sockets() if line[3] == "01"}
    for pid in host.processes():
        with suppress(OSError):  # it has ended since
            files = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
            if is_watcher(pid):
                return any(f"socket:[{inode}]" in files for inode in connected)
    return False


PLACES = ("start", "step", "save")


@EXHAUSTIVE
def test_kills_at_random_instants(cluster: Cluster, faults: FaultCounts, tmp_path: Path) -> None:
    """A run on two hosts, each time killed on one of them, and then finished on one host, by two ranks and by one."""
    rng = random.Random(seed := 301)
    count = faults.count(ci=3, full=20)
    # a constant rate, so that the number of steps, which the last run sets, changes no step
    settings = (*SETTINGS, "train.global_batch_size=2", "schedule=constant", cluster.data)
    run_dir = cluster.folder() / "run"
    slowest_ms = {True: 0, False: 0}
    for number in range(count):
        vanishes, victim, place = number % 2 == 0, rng.randrange(2), PLACES[number % 3]
        cluster.hosts.start()
        jobs = cluster.ranks(*settings, ENDLESS, f"run_dir={run_dir}", num_hosts=2)
        _wait_for(place, jobs, run_dir, rng)
        end_host(cluster, victim, vanishes=vanishes)
        seconds = assert_ended([jobs[1 - victim]], LIMIT_S if vanishes else CRASH_S, f"host{victim}")
        slowest_ms[vanishes] = max(slowest_ms[vanishes], round(1000 * seconds))
    to_end = (*settings, f"train.steps={last_step(run_dir) + 4}")
    shutil.copytree(run_dir, tmp_path / "fewer")
    assert train(tmp_path / "whole", *to_end, world=2) == [0, 0]
    whole = record_of(tmp_path / "whole")
    assert train(run_dir, *to_end, world=2) == [0, 0]
    assert record_of(run_dir) == whole
    assert train(tmp_path / "fewer", *to_end, world=1) == [0]
    assert record_of(tmp_path / "fewer").tensors == whole.tensors
    figures = {"slowest_crash_ms": slowest_ms[False], "slowest_vanished_ms": slowest_ms[True], "resumed_equal": 2}
    faults.passed("P9", count, seed=seed, **figures)


def _wait_for(place: str, jobs: Sequence[HostRank], run_dir: Path, rng: random.Random) -> None:
    """Waits until a run is at ``place``, and then for a random time."""
    if place == "start":
        jobs[0].wait_until(lambda: all(watcher_is_connected(job.host) for job in jobs))
        time.sleep(rng.uniform(0, 0.5))
        return
    before = last_step(run_dir)
    checkpoints = run_dir / "checkpoints"
    jobs[0].wait_until(lambda: last_step(run_dir) > before)
    time.sleep(rng.uniform(0, 0.5))
    if place == "save":
        jobs[0].wait_until(lambda: any(".tmp-" in path.name for path in checkpoints.iterdir() if path.is_dir()))
