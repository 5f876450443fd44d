"""Runs on two hosts, each with its own network, memory and processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.cluster import Cluster
from tests.helpers.hosts import Host, Hosts, unsupported_reason
from tests.helpers.launch import SMALL, record_of, train

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason() or "hosts can be made"),
]

SETTINGS = (*SMALL, "engine.reproducible=true", "train.steps=3", "train.save_every=2", "train.eval_every=0")


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


def test_replicas_on_two_hosts(cluster: Cluster, tmp_path: Path) -> None:
    """Each host holds a replica: its ranks share memory, and the replicas reach each other by the network."""
    settings = (*SETTINGS, "train.global_batch_size=4", "engine.shard_size=2", cluster.data)
    run_dir = cluster.folder() / "run"
    ranks = cluster.ranks(*settings, f"run_dir={run_dir}", per_host=2)
    for host in cluster.hosts:
        ranks[0].wait_until(lambda host=host: len(sharing_memory(host)) == 2)  # type: ignore[misc]
        assert host.listening() == {host.address_in_proc}
    for rank in ranks:
        assert rank.wait() == 0, rank.output
    without = [setting for setting in settings if "shard_size" not in setting]  # reproducible: the same bits
    assert train(tmp_path / "run", *without, world=4) == [0] * 4
    assert record_of(run_dir) == record_of(tmp_path / "run")
