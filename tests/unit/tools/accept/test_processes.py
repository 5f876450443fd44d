"""The command with real processes: parts that fail, hang, or crash, the command killed, and one real small run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain.__main__ import main
from dtrain.config.tool_schema import AcceptConfig
from dtrain.tools.accept import run as accept_run
from dtrain.tools.accept.run import accept
from tests.unit.tools.accept.fake_parts import BROKEN, GOOD, SLOW, make_parts

pytestmark = pytest.mark.processes

COMMAND = """
import sys
from pathlib import Path
from dtrain.config.tool_schema import AcceptConfig
from dtrain.tools.accept import run
from dtrain.tools.accept.part import Part
run._MACHINE = "fake_machine"
parts = [Part(key, key, 5.0, name) for key, name in (("a", "good"), ("b", "slow"))]
run.accept(AcceptConfig(minutes=5), "dtrain accept", Path("out"), parts)
"""


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_failed_and_late_parts_do_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_run, "_GRACE_S", -3.0)  # of 5 s, so that a part has 4.5 s
    crash = "import os\ndef run(request): os.abort()"
    parts = make_parts(tmp_path / "modules", monkeypatch, broken=BROKEN, slow=SLOW, crash=crash, good=GOOD)
    acceptance = accept(AcceptConfig(minutes=0.01), "dtrain accept", tmp_path / "out", parts)
    broken, slow, crashed, good = acceptance.parts
    assert broken.failures == ["failed: ended with exit code 1: ValueError: no such kernel"]
    assert broken.results == slow.results == {"first": 1.0}
    assert "ValueError: no such" in broken.log_tail
    assert slow.status == "late"
    assert slow.error.endswith("s, so it was killed")
    assert slow.seconds < 10
    wait_for(lambda: is_gone(int((tmp_path / "out/b/child").read_text())))
    assert crashed.error.startswith("was ended by SIGABRT")
    assert good.status == "done"
    assert good.results["seconds"] == 5.0


def test_killed_in_the_middle_and_started_again_it_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_parts(tmp_path / "modules", monkeypatch, good=GOOD, slow=SLOW)
    path = os.pathsep.join([str(tmp_path / "modules"), str(Path(__file__).parents[4])])

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", COMMAND], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})

    command = start()
    child = tmp_path / "out/b/child"
    partial = tmp_path / "out/b/partial.json"
    wait_for(partial.exists)
    command.send_signal(signal.SIGKILL)
    command.wait()
    wait_for(lambda: is_gone(int(child.read_text())))  # what the part had started ends too
    first = json.loads((tmp_path / "out/accept.json").read_text())
    assert [part["status"] for part in first["parts"]] == ["done"]
    assert "- b: b: not started yet" in (tmp_path / "out/accept.md").read_text()
    assert start().wait() == 0
    content = json.loads((tmp_path / "out/accept.json").read_text())
    assert [part["status"] for part in content["parts"]] == ["done", "done"]
    assert content["parts"][0] == first["parts"][0]
    assert content["parts"][1]["results"] == {"again": True}  # from its partial results
    assert (tmp_path / "out/a/runs").read_text() == "x"


def test_the_rates_of_this_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accept", "minutes=0.5", "parts=b", "device=cpu", f"out={tmp_path / 'out'}"]) == 0
    content = json.loads((tmp_path / "out/accept.json").read_text())
    (part,) = content["parts"]
    rows = part["results"]["matmuls"]
    assert list(dict.fromkeys(row["format"] for row in rows)) == ["bf16", "fp8", "fp32"]
    assert all(row["tflops"] > 0 for row in rows)
    assert [row["name"] for row in part["results"]["copies"]] == ["copy, read + write", "triad, 2 reads + write"]
    assert "**1 of 7 parts finished; nothing failed.**" in capsys.readouterr().out
