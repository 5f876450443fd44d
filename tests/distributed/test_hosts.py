"""Runs on two hosts, each with its own network, memory and processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.cluster import Cluster, ranks_on
from tests.helpers.hosts import Host, Hosts, unsupported_reason
from tests.helpers.launch import SMALL, record_of, summary, train

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason() or "hosts can be made"),
]

SETTINGS = (*SMALL, "engine.reproducible=true", "train.steps=3", "train.save_every=2", "train.eval_every=0")
ANYWHERE = {"00000000", "00000000000000000000000000000000"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Hosts(2, tmp_path_factory.mktemp("shared")) as hosts:
        yield Cluster(hosts)


def sharing_memory(host: Host) -> set[int]:
    """Returns the processes of ``host`` that map memory of dtrain for several ranks."""
    found = set()
    for pid in host.processes():
        with suppress(OSError):  # it has ended since
            if "/memfd:dtrain (deleted)" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8"):
                found.add(pid)
    return found


def addresses(host: Host) -> list[str]:
    """Returns the addresses on which processes of ``host`` listen."""
    return [item.split(":")[0] for item in host.listening()]


@pytest.mark.exhaustive
def test_replicas_on_two_hosts(cluster: Cluster, tmp_path: Path) -> None:
    """Each host holds a replica: its ranks share memory, and the replicas reach each other by the network."""
    settings = (*SETTINGS, "train.global_batch_size=4", "engine.shard_size=2", cluster.data)
    run_dir = cluster.folder() / "run"
    ranks = cluster.ranks(*settings, f"run_dir={run_dir}", per_host=2)
    for host in cluster.hosts:
        ranks[0].wait_until(lambda host=host: len(sharing_memory(host)) == 2)  # type: ignore[misc]
        assert set(addresses(host)) == {host.address_in_proc}
    for rank in ranks:
        assert rank.wait() == 0, rank.output
    without = [setting for setting in settings if "shard_size" not in setting]  # reproducible: the same bits
    assert train(tmp_path / "run", *without, world=4) == [0] * 4
    assert record_of(run_dir) == record_of(tmp_path / "run")


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "sbatch"])
def test_two_hosts_have_the_bits_of_one(cluster: Cluster, tmp_path: Path, launcher: str) -> None:
    run_dir = cluster.folder() / "run"
    seen: list[set[str]] = [set(), set()]
    ranks: list[set[int]] = [set(), set()]
    with cluster.shells():
        jobs = getattr(cluster, launcher)(*SETTINGS, cluster.data, f"run_dir={run_dir}")

        def has_ended() -> bool:
            time.sleep(0.2)  # each look reads all of /proc
            for host, where, here in zip(cluster.hosts, seen, ranks, strict=True):
                where |= set(addresses(host))
                here |= ranks_on(host, jobs)
            return (run_dir / "summary.json").exists()

        jobs[0].wait_until(has_ended)
        for job in jobs:
            assert job.wait() == 0, job.output
            assert job.gone()
    assert ranks == [{0}, {1}]
    assert summary(run_dir)["world_size"] == 2
    for number, (host, where) in enumerate(zip(cluster.hosts, seen, strict=True)):
        # torchrun's rendezvous, and the store of its agent on the host of rank 0
        assert bool(where & ANYWHERE) == (launcher == "torchrun" and number == 0), where
        assert where - ANYWHERE == {host.address_in_proc}
    assert train(tmp_path / "run", *SETTINGS, cluster.data, world=2) == [0, 0]
    assert record_of(run_dir) == record_of(tmp_path / "run")
