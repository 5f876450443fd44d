"""Scheduling of the parts, and what is kept of them: without processes, which ``test_processes`` starts."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.config.tool_schema import AcceptConfig
from dtrain.errors import AcceptError, ConfigError
from dtrain.tools.accept import run as accept_run
from dtrain.tools.accept.part import PARTS, Part, PartRequest, load_partial, save_partial
from dtrain.tools.accept.processes import Ended
from dtrain.tools.accept.run import LONGEST_S, Acceptance, accept, choose_parts, limit_s, share_s
from tests.unit.tools.accept.fake_parts import SECTION

MACHINE: dict[str, Any] = {
    "host": {"torch": "2.11"}, "host_summary": "a host", "device": "cuda", "name": "NVIDIA H100 80GB HBM3",
    "memory_gib": 79.6, "small": False, "capability": "9.0", "cuda": "13.0", "nccl": "2.28",
    "peak_tflops": {"bf16": 989.4, "fp64": None}, "packages": {"triton": "3.6.0"},
}  # fmt: skip
TITLES = {"First": 6.0, "Second": 1.0, "Third": 3.0}
FAKE = [Part(key, title, TITLES[title], "fake_part") for key, title in zip("abc", TITLES, strict=True)]


class Processes:
    """Stands for ``run_process``: each part ends as told."""

    def __init__(self) -> None:
        self.machine = dict(MACHINE)
        self.ends: dict[str, Ended] = {}
        self.requests: dict[str, PartRequest] = {}
        self.seconds = 0.0
        self.now = 0.0

    def run(self, module: str, job: str, *, limit_s: float, threads: int, log: Path) -> Ended:
        values = json.loads(job)
        if values["module"] == accept_run._MACHINE:
            return Ended(json.dumps(self.machine), 1.0)
        request = PartRequest(**values["request"])
        key = Path(request.directory).name
        self.requests[key] = request
        self.now += self.seconds
        save_partial(request, {"first": 1.0})
        return self.ends.get(key, Ended(json.dumps({"conclusions": [f"{key} is fast"]}), 2.0))


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    fake = Processes()
    monkeypatch.setattr(accept_run, "run_process", fake.run)
    monkeypatch.setattr(accept_run.time, "monotonic", lambda: fake.now)
    (tmp_path / "fake_part.py").write_text(SECTION, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return fake


def run(folder: Path, **keys: Any) -> Acceptance:
    return accept(AcceptConfig(**keys), "dtrain accept", folder, FAKE)


def statuses(acceptance: Acceptance) -> dict[str, str]:
    return {record.key: record.status for record in acceptance.parts}


# -- choice and time ---------------------------------------------------------------------------------------------------


def test_the_table_is_in_order_of_value_and_takes_25_minutes() -> None:
    assert "".join(part.key for part in PARTS) == "abcdefg"
    assert sum(part.minutes for part in PARTS) == 25
    assert max(part.minutes for part in PARTS) <= 9


def test_parts_are_chosen_by_letter_in_order_of_value() -> None:
    assert choose_parts(None, PARTS) == list(PARTS)
    assert [part.key for part in choose_parts(["c", "a"], PARTS)] == ["a", "c"]
    with pytest.raises(ConfigError, match=r"parts=\[a,x\]: 'x' is no part; the parts are a \(Training"):
        choose_parts(["a", "x"], PARTS)
    with pytest.raises(ConfigError, match="names no part"):
        choose_parts([], PARTS)


def test_a_part_gets_its_share_of_the_time_that_is_left() -> None:
    assert share_s(FAKE, 100) == 60
    assert share_s(FAKE[1:], 100) == 25  # the first took nothing
    assert share_s(FAKE[2:], 10) == 10
    assert share_s(FAKE[2:], -50) == 5  # the others were late; the last gets little, but is not forgotten
    assert share_s(FAKE[:1], 3600) == 480
    assert [limit_s(share) for share in (10, 100, 480)] == [45, 180, LONGEST_S]
    assert LONGEST_S == 9 * 60


def test_unused_time_goes_to_the_parts_that_follow(tmp_path: Path, processes: Processes) -> None:
    processes.seconds = 6.0
    run(tmp_path / "out", minutes=10 / 6)
    assert {key: request.seconds for key, request in processes.requests.items()} == {"a": 60, "b": 23.5, "c": 88}


# -- results -----------------------------------------------------------------------------------------------------------


def test_results_and_page_have_every_part(tmp_path: Path, processes: Processes) -> None:
    folder = tmp_path / "out"
    acceptance = run(folder)
    assert statuses(acceptance) == {"a": "done", "b": "done", "c": "done"}
    assert acceptance.not_run == {}
    content = json.loads((folder / "accept.json").read_text())
    assert content["machine"]["name"] == "NVIDIA H100 80GB HBM3"
    assert content["parts"][0]["results"] == {"conclusions": ["a is fast"]}
    page = (folder / "accept.md").read_text()
    assert page.startswith("# Acceptance of NVIDIA H100 80GB HBM3\n")
    assert "compute capability 9.0, CUDA 13.0, NCCL 2.28, triton 3.6.0" in page
    assert "bf16 989.4." in page
    assert "**3 of 3 parts finished; nothing failed.**" in page
    assert "- b: b is fast" in page
    assert "## c. Third\n\nsection of ['conclusions']" in page
    assert processes.requests["b"] == replace(
        processes.requests["b"], device="cuda", small=False, directory=str(folder / "b"), keep_trace=False
    )


@pytest.mark.parametrize("is_late", [False, True])
def test_a_part_that_fails_does_not_stop_the_others(tmp_path: Path, processes: Processes, is_late: bool) -> None:
    processes.ends["a"] = Ended("", 3.0, "its end", is_late, ["Traceback", "last line"])
    acceptance = run(tmp_path / "out")
    status = "late" if is_late else "failed"
    assert statuses(acceptance) == {"a": status, "b": "done", "c": "done"}
    assert acceptance.parts[0].failures == [f"{status}: its end"]
    assert acceptance.parts[0].results == {"first": 1.0}
    page = (tmp_path / "out/accept.md").read_text()
    assert "**2 of 3 parts finished; 1 thing did not work:**" in page
    assert f"- a: {status}: its end" in page
    assert "```text\nTraceback\nlast line\n```" in page
    assert "Partial results:\n\nsection of ['first']" in page


def test_what_a_part_found_wrong_is_a_failure_and_what_it_left_out_is_listed(
    tmp_path: Path, processes: Processes
) -> None:
    found = {"failures": ["ddp deviates"], "left_out": {"x": "no time", "y": "no time", "z": "not installed"}}
    processes.ends["b"] = Ended(json.dumps(found), 1.0)
    acceptance = run(tmp_path / "out", parts=["b"])
    assert acceptance.parts[0].failures == ["ddp deviates"]
    page = (tmp_path / "out/accept.md").read_text()
    assert "- b: ddp deviates" in page
    assert "- a: First: not chosen\n- c: Third: not chosen\n- b: x; y: no time\n- b: z: not installed\n" in page


def test_a_section_that_cannot_be_written_costs_no_other(tmp_path: Path, processes: Processes) -> None:
    (tmp_path / "fake_part.py").write_text("def section(results): return results['missing']", encoding="utf-8")
    importlib.reload(importlib.import_module("fake_part"))
    run(tmp_path / "out", parts=["b"])
    assert "The section cannot be written (KeyError: 'missing')" in (tmp_path / "out/accept.md").read_text()


# -- started again -----------------------------------------------------------------------------------------------------


def test_only_parts_that_are_not_finished_run_again_and_get_their_share(tmp_path: Path, processes: Processes) -> None:
    processes.ends["b"] = Ended("", 1.0, "its end")
    run(tmp_path / "out", minutes=10 / 6)
    processes.requests.clear()
    del processes.ends["b"]
    acceptance = run(tmp_path / "out", minutes=10 / 6)
    assert {key: request.seconds for key, request in processes.requests.items()} == {"b": 10}
    assert statuses(acceptance) == {"a": "done", "b": "done", "c": "done"}


def test_parts_chosen_one_after_the_other_make_one_page(tmp_path: Path, processes: Processes) -> None:
    processes.ends["a"] = Ended("", 1.0, "its end")
    assert run(tmp_path / "out", parts=["a"]).not_run == {"b": "not chosen", "c": "not chosen"}
    acceptance = run(tmp_path / "out", parts=["c"])
    assert statuses(acceptance) == {"a": "failed", "c": "done"}


def test_results_of_another_machine_or_version_are_not_reused(
    tmp_path: Path, processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    processes.ends["b"] = Ended("", 1.0, "its end")
    run(tmp_path / "out")
    processes.requests.clear()
    processes.machine["host"] = {"torch": "2.13"}

    def run_b(module: str, job: str, **options: Any) -> Ended:
        request = json.loads(job)["request"]
        if Path(request["directory"]).name == "b":
            assert load_partial(PartRequest(**request)) == {}  # its cases are of the other version
        return processes.run(module, job, **options)

    accept_run.run_process = run_b  # type: ignore[attr-defined] # the fixture restores it
    run(tmp_path / "out")
    assert sorted(processes.requests) == ["a", "b", "c"]


def test_cases_of_a_part_that_was_killed_are_there_when_it_starts_again(tmp_path: Path, processes: Processes) -> None:
    processes.ends["a"] = Ended("", 1.0, "its end", True)
    run(tmp_path / "out", parts=["a"])
    found = {}

    def look(module: str, job: str, **options: Any) -> Ended:
        values = json.loads(job)
        if values["module"] == "fake_part":
            found.update(load_partial(PartRequest(**values["request"])))
        return processes.run(module, job, **options)

    accept_run.run_process = look  # type: ignore[attr-defined] # the fixture restores it
    run(tmp_path / "out", parts=["a"])
    assert found == {"first": 1.0}


# -- refused -----------------------------------------------------------------------------------------------------------


def test_a_machine_that_cannot_be_described_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Ended("", 1.0, "ended with exit code 1: no CUDA device")
    monkeypatch.setattr(accept_run, "run_process", lambda *_, **__: ended)
    with pytest.raises(AcceptError, match="cannot be described: the process ended with exit code 1: no CUDA device"):
        run(tmp_path / "out")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"out=.*file/out cannot be created: Not a directory"):
        run(tmp_path / "file/out")


def test_the_document_has_the_parts_and_their_minutes() -> None:
    text = (Path(__file__).parents[4] / "docs/accept.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert [(row[0], float(row[-1])) for row in rows if row[0] in "abcdefg"] == [
        (part.key, part.minutes) for part in PARTS
    ]
