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
from dtrain.tools.processes import kill_group, run_ranks
from tests.helpers.launch import is_gone
from tests.helpers.warm_ranks import ForkedRank

pytestmark = pytest.mark.processes

RANK = """
import os, signal, sys, time
from dtrain.tools.processes import open_result, read_job
job, result = read_job().strip(), open_result()
print("output of a library")
if job == "die":
    os.kill(os.getpid(), signal.SIGTERM)
if job == "fail":
    result.write("the reason")
    result.close()
    sys.exit(3)
if job == "wait":
    open("waiting", "w").write(str(os.getpid()))
    time.sleep(60)
result.write(job.upper())
"""
STARTER = "from pathlib import Path; from dtrain.tools.processes import run_ranks; "
STARTER += "run_ranks('own_rank', ['wait'], threads=1, folder=Path('logs'))"


@pytest.fixture(autouse=True)
def own_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rank.py").write_text(RANK, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])]))
    monkeypatch.chdir(tmp_path)


def test_results_come_by_rank_and_output_of_libraries_goes_to_the_log(tmp_path: Path) -> None:
    assert run_ranks("own_rank", ["a", "b"], threads=1, folder=tmp_path / "logs") == ["A", "B"]
    assert (tmp_path / "logs/1.log").read_text() == "output of a library\n"


def test_a_forked_rank_leads_its_group_from_the_start(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        rank = ForkedRank("own_rank", threads=1, stdout=log, stderr=log)
    assert os.getpgid(rank.pid) == rank.pid
    kill_group(cast("subprocess.Popen[str]", rank))
    assert rank.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("job", "reason"), [("fail", "rank 1 ended with exit code 3: the reason"), ("die", "rank 1 was ended by SIGTERM")]
)
def test_the_rank_that_failed_is_named_and_the_others_are_ended(job: str, reason: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match=reason):
        run_ranks("own_rank", ["wait", job], threads=1, folder=tmp_path / "logs")
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
