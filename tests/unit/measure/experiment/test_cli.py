from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import get_type_hints

import pytest

from dtrain.__main__ import main
from dtrain.config.dump import from_plain
from dtrain.measure.experiment import accumulation, cli
from dtrain.measure.experiment.cli import ExperimentRecord
from dtrain.measure.record import read_record
from dtrain.tools.tables import Table

exhaustive = pytest.mark.exhaustive


def test_writes_a_table_a_json_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulation, "run", partial(accumulation.run, longest=64, trials=4))
    out = tmp_path / "new" / "folder"
    assert main(["experiment", "accumulation", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "| worst case   | fp16" in shown
    assert "The paper: " in shown
    assert (out / "experiment-accumulation.png").read_bytes().startswith(b"\x89PNG")
    file = out / "experiment-accumulation.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["command"] == "dtrain experiment accumulation"
    assert record["host"]["torch"]
    assert record["result"]["lengths"] == [2, 4, 8, 16, 32, 64]
    assert main(["experiment", "formats", "--from", str(file), "--out", str(out)]) == 2
    assert "is a result of 'accumulation'" in capsys.readouterr().err


DOCS = Path(__file__).parents[4] / "docs"
RESULTS = DOCS / "results" / "experiments"
PAGE = (DOCS / "experiments.md").read_text(encoding="utf-8")


def stored_tables(name: str) -> list[Table]:
    record = read_record(RESULTS / f"experiment-{name}.json", ExperimentRecord, "experiment")
    assert record.experiment == name
    experiment = cli.load(name)
    tables: list[Table] = experiment.tables(from_plain(get_type_hints(experiment.run)["return"], record.result))
    return tables


@pytest.mark.parametrize("name", cli.EXPERIMENTS)
def test_page_has_command_picture_and_the_tables_of_the_stored_results(name: str) -> None:
    assert f"```bash\ndtrain experiment {name}\n```" in PAGE
    assert re.search(rf"^  {name} +{re.escape(cli.EXPERIMENTS[name])}$", PAGE, re.MULTILINE)
    assert f"](pictures/experiment-{name}.png)" in PAGE
    assert (DOCS / "pictures" / f"experiment-{name}.png").is_file()
    assert all(table.markdown() in PAGE for table in stored_tables(name))


@pytest.mark.parametrize(
    "name", ["loss-scaling", *(pytest.param(n, marks=exhaustive) for n in cli.EXPERIMENTS if n != "loss-scaling")]
)
def test_stored_results_are_shown_and_drawn(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = RESULTS / f"experiment-{name}.json"
    assert main(["experiment", name, "--from", str(file), "--out", str(tmp_path)]) == 0
    (picture,) = tmp_path.iterdir()
    assert (picture.name, picture.stat().st_size > 20_000) == (f"experiment-{name}.png", True)
    shown = capsys.readouterr().out
    assert all(table.markdown() in shown for table in stored_tables(name))
