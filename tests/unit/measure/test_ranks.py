"""Ranks that dtrain starts by itself: their results, the reason of a failure, and that none outlives its starter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import pytest

from dtrain.errors import RankError
from dtrain.measure.ranks import Ranks, run_ranks
from dtrain.measure.worker import Rank
from dtrain.tools.processes import kill_group
from tests.helpers.launch import is_gone
from tests.helpers.warm_ranks import ForkedRank

pytestmark = pytest.mark.processes

OWN = """
import os, signal, time
import torch.distributed as dist

def once(rank):
    print("output of a library")
    if rank.job == ["die", rank.rank]:
        os.kill(os.getpid(), signal.SIGTERM)
    if rank.job == ["fail", rank.rank]:
        raise ValueError("the reason")
    if rank.job != "done":
        open("waiting", "w").write(str(os.getpid()))
        time.sleep(60)
    return rank.rank, dist.is_initialized()

def served(rank):
    request = yield "ready"
    while True:
        request = yield request * rank.rank
"""
STARTER = (
    "from pathlib import Path; from dtrain.measure.ranks import run_ranks; from dtrain.measure.worker import Rank; "
    "run_ranks('own:once', Rank(), folder=Path('logs'))"
)


@pytest.fixture(autouse=True)
def own_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])]))
    monkeypatch.chdir(tmp_path)


def test_results_come_by_rank_and_output_of_libraries_goes_to_the_log(tmp_path: Path) -> None:
    ranks = Rank("done", ranks=2, device="cpu")
    assert run_ranks("own:once", ranks, folder=tmp_path / "logs") == [[0, True], [1, True]]
    assert (tmp_path / "logs/1.log").read_text() == "output of a library\n"
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["0.log", "1.log"], "logs alone stay"


def test_ranks_answer_requests_until_the_end_and_one_without_an_answer_is_named(tmp_path: Path) -> None:
    with Ranks("own:served", Rank(ranks=2, device=None), folder=tmp_path) as ranks:
        assert ranks.results() == ["ready", "ready"]
        assert [ranks.request(number) for number in (3, 4)] == [[0, 3], [0, 4]]
        with pytest.raises(RankError, match=r"rank [01] .*TypeError: "):
            ranks.request(None)
    with pytest.raises(RankError, match="rank 0 has no result after 1 s: it hangs"):
        run_ranks("own:once", Rank(device=None), folder=tmp_path, limit_s=1.0)


def test_a_forked_rank_leads_its_group_from_the_start(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        rank = ForkedRank("dtrain.measure.worker", "own:once", threads=1, stdout=log, stderr=log)
    assert os.getpgid(rank.pid) == rank.pid
    kill_group(cast("subprocess.Popen[str]", rank))
    assert rank.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("job", "reason"),
    [("fail", "rank 1 ended with exit code 1: ValueError: the reason"), ("die", "rank 1 was ended by SIGTERM")],
)
def test_the_rank_that_failed_is_named_and_the_others_are_ended(job: str, reason: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match=reason):
        run_ranks("own:once", Rank([job, 1], ranks=2, device="cpu"), folder=tmp_path / "logs")
    assert time.monotonic() - begin < 50


def test_no_rank_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER])
    waiting = tmp_path / "waiting"
    while not (waiting.exists() and waiting.read_text()):
        assert starter.poll() is None
        time.sleep(0.02)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    deadline = time.monotonic() + 20
    while not is_gone(waiting.read_text()):
        assert time.monotonic() < deadline, "the rank is still there"
        time.sleep(0.02)
