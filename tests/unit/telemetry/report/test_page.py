"""The page of a report; ``python -m tests.unit.telemetry.report.test_page`` writes ``golden.html`` again."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import subprocess
import tempfile
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image

from dtrain.__main__ import main
from dtrain.errors import ConfigError
from dtrain.telemetry.report.curves import Curve, chart, number, thin
from dtrain.telemetry.report.page import page
from dtrain.telemetry.report.read import Run
from tests.helpers.run_folders import make_run, training_line

GOLDEN = Path(__file__).parent / "golden.html"
HOSTILE = "<script>alert('x')</script> \"q\" 'é' & \x1b[31m"
_VOID = {"meta", "img"}


class _Balanced(HTMLParser):
    """Collects the text, and checks that tags are closed in their order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.attributes = list[str](), set[str](), list[tuple[str, str | None]]()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in _VOID or self.open.pop() == tag


def require_safe(text: str) -> None:
    """Asserts that the page is well formed, runs nothing and loads nothing."""
    parsed = _Balanced(text)
    assert not parsed.tags & {"script", "iframe", "object", "embed", "link", "base", "form"}
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name in ("href", "srcset")]
    pictures = [value or "" for name, value in parsed.attributes if name == "src"]
    assert all(re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/]+=*", picture) for picture in pictures)
    assert not re.search(r"https?:|url\(|@import", text)
    assert len(text) < 2_000_000


def page_of(*paths: Path) -> str:
    text = page([Run.open(path) for path in paths])
    require_safe(text)
    return text


def golden_page(folder: Path) -> str:
    return page([Run.open(make_run(folder / "golden", sample_txt="def f(x):\n    return <x>\n"))])


def test_the_same_files_give_the_golden_bytes(tmp_path: Path) -> None:
    text = golden_page(tmp_path)
    require_safe(text)
    assert text == GOLDEN.read_text(encoding="utf-8"), "run python -m tests.unit.telemetry.report.test_page"


def change_config(run: Path, **options: str) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    for group, option in options.items():
        config[group]["name"] = option
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def test_options_are_shown_that_differ_from_the_default(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    change_config(run, engine="ddp", schedule="wsd")
    assert re.findall(r"<td>(\w+)\.name</td><td>(\w+)</td>", page_of(run)) == [("engine", "ddp"), ("schedule", "wsd")]


def test_runs_that_differ_in_their_seed_are_a_band(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"seed{seed}", seed=seed) for seed in range(3)]
    text = page_of(*runs, make_run(tmp_path / "other", lr=3e-3))
    assert "seed0 (seeds 0, 1, 2)" in text
    assert "mean of 3 seeds" in text
    assert text.count("<polygon") >= 4
    assert "<td>seed</td><td>0</td><td>1</td><td>2</td><td>0</td>" in text
    assert "<td>optim.lr</td><td>0.001</td><td>0.001</td><td>0.001</td><td>0.003</td>" in text


def test_a_killed_run_and_an_older_one(tmp_path: Path) -> None:
    killed = make_run(tmp_path / "killed")
    (killed / "summary.json").unlink()
    with (killed / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 41, "loss": 1.')
    assert "unfinished · 40 of 200 steps" in page_of(killed)
    (older := tmp_path / "older").mkdir()
    lines = [f'{{"step": {step}, "loss": 1.0, "applied": true}}\n' for step in (1, 2)]
    (older / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    assert "<h2>Loss</h2>" in page_of(older)
    (older / "metrics.jsonl").write_text("", encoding="utf-8")
    assert "unfinished" in page_of(older)


@pytest.mark.parametrize("content", ["", '{"rows": 3, "modules": 4, "val_metrics": [1]}', "[" * 100_000])
def test_damaged_files_are_left_out(tmp_path: Path, content: str) -> None:
    for name in ("summary.json", "config.yaml", "memory.json", "precision.json", "environment.json"):
        run = make_run(tmp_path / name)
        (run / name).write_text(content, encoding="utf-8")
        assert "<h2>Loss</h2>" in page_of(run), name


def test_texts_of_a_run_are_escaped_and_secrets_blanked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a<b>&'c", name=HOSTILE, sample_txt=f"{HOSTILE} api_key=sk-abcdefghijklmnopqrstuvwx1234")
    reason = "token=hf_abcdefghijklmnopqrstuvwxyz123456"
    skipped = {**training_line(7), "step": 41, "culprit": HOSTILE, "reason": reason}
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(skipped) + "\n")
    text = page_of(run, make_run(tmp_path / "other")) + page_of(run)
    assert "&lt;script&gt;" in text
    assert not re.search(r"<script|hf_abcdef|sk-abcdef", text)


def test_metrics_and_picture_of_a_run_without_tokens(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", sample_txt="48 of 50 validation samples right")
    change_config(run, data="glyphs")
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for step in (30, 48):
            line = {"step": step, "val_loss": 1.0, "val_accuracy": step / 50, "val_accuracy_ema": step / 100}
            file.write(json.dumps({**line, HOSTILE: 1.0}) + "\n")
    picture = b"\x89PNG\r\n\x1a\n rest"
    (run / "sample.png").write_bytes(picture)
    text = page_of(run)
    assert text.count("<h2>Accuracy</h2>") == 1
    for shown in (
        *("run val_accuracy: 0.96 at step 48", "run val_accuracy_ema: 0.48 at step 48"),
        *("<b>0.96</b><span>accuracy</span>", "<h2>Samples per second</h2>", "<span>samples / s</span>"),
    ):
        assert shown in text
    assert f'src="data:image/png;base64,{base64.b64encode(picture).decode()}"' in text
    for other in (b"GIF89a", b"", picture + bytes(4_000_000)):
        (run / "sample.png").write_bytes(other)
        assert "<img" not in page_of(run)
        assert "sample.png is left out: it is no readable PNG of at most 4 MB" in page_of(run)
    (run / "sample.png").unlink()
    assert "left out" not in page_of(run)


def test_one_run_has_its_page_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}/report.html\n"
    first = (run / "report.html").read_bytes()
    assert main(["report", str(run), f"out={tmp_path}/again.html", "verify=true"]) == 0
    assert (tmp_path / "again.html").read_bytes() == first  # it has no checkpoint
    assert main(["report", str(run), f"out={tmp_path}/missing/page.html"]) == 2
    assert "missing is no folder; make it, or name another file" in capsys.readouterr().err


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder; expected a run directory"):
        Run.open(tmp_path / "none")
    make_run(tmp_path / "sweep" / "1")
    with pytest.raises(ConfigError, match=r"is no run directory: .*; a sweep's runs lie inside: .*sweep/1"):
        Run.open(tmp_path / "sweep")


def test_many_lines_are_read_in_time(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    line = json.dumps(training_line(1)).removeprefix('{"step": 1')
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {n}{line}\n' for n in range(1, 20_001)), encoding="utf-8")
    start = time.process_time()
    text = page_of(run)
    assert time.process_time() - start < 3
    assert len(text) < 400_000


numbers = st.floats(-1e6, 1e6)


@given(st.lists(numbers, min_size=1, max_size=400), st.integers(1, 40))
def test_the_extremes_of_each_column_remain(values: list[float], columns: int) -> None:
    steps = [float(step) for step in range(len(values))]
    kept = thin(steps, values, 0.0, steps[-1], columns)
    assert set(kept) <= set(zip(steps, values, strict=True))
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert len(kept) <= max(4 * columns, 2 * columns)
    assert (kept[0], kept[-1]) == ((steps[0], values[0]), (steps[-1], values[-1]))
    assert {min(values), max(values)} <= {value for _, value in kept}


@given(st.dictionaries(st.integers(0, 10**6), numbers, min_size=1, max_size=50), st.booleans())
def test_any_finite_curve_is_drawn(values: dict[int, float], log: bool) -> None:
    points = sorted(values.items())
    svg = chart("x", [Curve("c", 0, [s for s, _ in points], [v for _, v in points])], log=log, marks=[3])
    drawable = [value for _, value in points if value > 0 or not log]
    assert bool(svg) == bool(drawable)
    assert "nan" not in svg
    assert "inf" not in svg


def test_no_points_are_no_chart() -> None:
    assert chart("x", []) == chart("x", [Curve("c", 0, [], [])]) == ""


@pytest.mark.parametrize(
    ("values", "ticks"),
    [((0.5, 3.1), "1 2 3"), ((0.07, 1.2), "0.1 0.2 0.5 1"), ((1e-4, 1e3), "0.0001 0.01 1 100")],
)
def test_ticks_of_a_logarithmic_axis_are_round(values: tuple[float, float], ticks: str) -> None:
    svg = chart("x", [Curve("c", 0, [1, 2], values)], log=True)
    assert re.findall(r'text-anchor="end">([^<]*)<', svg) == ticks.split()


def test_numbers() -> None:
    assert [number(value) for value in (0, 0.00012, 1.23456, 12345.0, 2.5e6, 1e-9)] == [
        "0", "0.00012", "1.235", "12.35k", "2.5M", "1e-09",
    ]  # fmt: skip
    assert number(math.pi * 1e9) == "3.142G"


@pytest.mark.exhaustive
@pytest.mark.processes
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    (tmp_path / "report.html").write_text(page_of(make_run(tmp_path / "run")), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += ["--enable-logging=stderr", "--window-size=1280,1600", f"--user-data-dir={tmp_path}/profile"]
    command = [browser, *flags, f"--screenshot={tmp_path}/page.png", f"file://{tmp_path}/report.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    pixels = (255 * image.imread(tmp_path / "page.png")[..., :3]).astype(np.uint8)
    colors, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_counts=True)
    assert pixels.shape[:2] == (1600, 1280)
    assert len(colors) > 100
    assert counts.max() < 0.9 * pixels[..., 0].size


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        GOLDEN.write_text(golden_page(Path(scratch)), encoding="utf-8")
