from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from dtrain.redaction.printable import printable
from dtrain.telemetry.live_view import LiveView, sparkline
from dtrain.telemetry.metrics import StepMetrics
from dtrain.telemetry.progress import RunProgress, Saved, Skip
from dtrain.telemetry.texts import clean, compact, duration, span
from tests.helpers.run_folders import STEP

NOW = 1_000_000.0


def run() -> RunProgress:
    progress = RunProgress(200)
    for number in range(1, 13):
        progress.add(vars(replace(STEP, step=10 * number, loss=5 - 3 * (1 - 0.8**number), tokens=5120 * number)))
    progress.add({"step": 100, "val_loss": 2.6, "val_loss_ema": 2.75})
    skipped = replace(STEP, step=121, applied=False, skipped_steps=3, loss_scale=4096.0, reason="overflow")
    times = {"slowest_rank": 3, "busy_slowest_ms": 301.0, "busy_median_ms": 270.0}
    progress.add({**vars(skipped), "culprit": "'layers.0.mlp' on rank 1", **times})
    return progress


def drawn(view: LiveView, width: int, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=file, width=width, color_system=None).print(view)
    file.flush()
    return file.buffer.getvalue().decode(encoding).splitlines()


SKIPPED = "step 121 skipped: overflow, culprit: 'layers.0.mlp' on rank 1"
VIEW = LiveView(run(), "runs/mine", NOW, Saved(100, NOW - 130.0))
WIDE = """\
╭─ runs/mine ──────────────────────────────────────────────────────────────────────────────────────────────────────────╮
│ ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━──────────────────────────────────  step 121/200  60 %  ETA 0:24 │
│ loss 2.2062  █▆▅▄▃▃▂▂▂▁▁▁  2.2062 to 4.4000                                                                          │
│ lr        2.00e-03   grad_norm   1.02       loss_scale 4096       tokens 5.12k      tokens/s 45.2k                   │
│ step time 310 ms     peak memory 3.00 GiB   skipped    3                                                             │
│ val_loss     2.6000 at step 100          val_loss_ema 2.7500 at step 100   checkpoint step 100, 2 min ago            │
│ slowest rank 3, 301 ms (median 270 ms)                                                                               │
│ step 121 skipped: overflow, culprit: 'layers.0.mlp' on rank 1                                                        │
╰──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────╯
"""
NARROW = """\
+- runs/mine ------------------------------------------------------------------+
| ############################------------------  step 121/200  60 %  ETA 0:24 |
| loss 2.2062  #+=-,,...___  2.2062 to 4.4000                                  |
| lr          2.00e-03   grad_norm 1.02       loss_scale 4096                  |
| tokens      5.12k      tokens/s  45.2k      step time  310 ms                |
| peak memory 3.00 GiB   skipped   3                                           |
| val_loss   2.6000 at step 100    val_loss_ema 2.7500 at step 100             |
| checkpoint step 100, 2 min ago   slowest rank 3, 301 ms (median 270 ms)      |
| step 121 skipped: overflow, culprit: 'layers.0.mlp' on rank 1                |
+------------------------------------------------------------------------------+
"""


@pytest.mark.parametrize(("width", "encoding", "golden"), [(120, "utf-8", WIDE), (80, "latin-1", NARROW)])
def test_golden(width: int, encoding: str, golden: str) -> None:
    assert "\n".join(drawn(VIEW, width, encoding)) + "\n" == golden


def test_plain_lines_for_a_file() -> None:
    status = replace(VIEW, status="stopped", is_running=False)
    lines = [f"{name}: {value}" for name, value in status.plain(ascii_only=True)]
    assert lines[:3] == ["run: runs/mine", "state: stopped", "step: 121/200 60 %"]
    assert lines[3] == "loss: 2.2062  #+=-,,...___  2.2062 to 4.4000"
    assert lines[-2:] == ["slowest rank: 3, 301 ms (median 270 ms)", f"last skip: {SKIPPED}"]


def test_what_a_file_names_cannot_draw() -> None:
    progress = RunProgress(None)
    progress.skip = Skip(1, "[red]x[/red]", clean("a\x1b[2J\nb\u202e") + " 模型" * 20)
    lines = drawn(LiveView(progress, clean("[bold]r\x07"), NOW), 40)
    assert "[bold]r\ufffd" in lines[0]
    assert "step 1 skipped: [red]x[/red]" in lines[2]
    assert "a\ufffd[2J b\ufffd" in "".join(lines)
    assert {cell_len(line) for line in lines} == {40}


def test_a_view_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveView, "figures", lambda self: 1 / 0)
    assert drawn(VIEW, 80) == ["step 121; the view failed: ZeroDivisionError: division by zero"]


floats = st.floats() | st.floats(0, 1e6)
TEXT = st.none() | st.text(max_size=80)
METRICS = st.builds(
    StepMetrics,
    step=st.integers(0, 1 << 60), loss=floats, lr=floats, grad_norm=floats, loss_scale=floats, applied=st.booleans(),
    skipped_steps=st.integers(0), tokens=st.integers(0), tokens_per_s=floats, step_ms=floats, data_wait_ms=floats,
    peak_memory=st.integers(0), reason=TEXT, culprit=TEXT, slowest_rank=st.none() | st.integers(0),
    busy_slowest_ms=st.none() | floats, busy_median_ms=st.none() | floats,
)  # fmt: skip


@settings(max_examples=15)
@given(
    st.lists(METRICS, max_size=12),
    st.none() | st.integers(0, 1 << 60),
    st.integers(12, 220),
    st.sampled_from(["utf-8", "ascii", "cp1252"]),
    st.tuples(TEXT, TEXT, st.floats(allow_nan=False, allow_infinity=False)),
)
def test_any_run_fits_into_any_width(
    lines: list[StepMetrics], total: int | None, width: int, encoding: str, texts: tuple[str | None, str | None, float]
) -> None:
    progress = RunProgress(total)
    for line in lines:
        progress.add(vars(line))
        progress.add({"step": line.step, "val_loss": line.loss})
    name, status, saved_at = texts
    view = LiveView(progress, clean(name), NOW, Saved(7, saved_at), clean(status), "red")
    shown = drawn(view, width, encoding)
    assert not any("the view failed" in line for line in shown)
    assert {cell_len(line) for line in shown} == {width}
    for name, value in view.plain(ascii_only=True):
        assert printable(value) == value, name


def test_sparkline() -> None:
    assert sparkline([], "_#") == ""
    assert sparkline([2.0, 2.0], "_-#") == "__"
    assert sparkline([1.0, 2.0, 3.0], "_-#") == "_-#"
    assert sparkline([-1e308, 0.0, 1e308], "_-#") == "_-#"


def test_times_and_numbers_are_short() -> None:
    durations = {-3: "0:00", 42: "0:42", 83: "1:23", 3723: "1:02:03", 359_999: "99:59:59", 444_000: "5 d 3 h"}
    assert {seconds: duration(seconds) for seconds in durations} == durations
    spans = {-3: "0 s", 59: "59 s", 60: "1 min", 7300: "2 h", 86400 * 5: "5 d"}
    assert {seconds: span(seconds) for seconds in spans} == spans
    numbers = {None: "", 0: "0", 950: "950", 45_210: "45.2k", 124_400_000: "124M", 8.03e9: "8.03G"}
    assert {number: compact(number) for number in numbers} == numbers


def test_a_text_of_a_file_is_one_short_line_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printable("def f():\n\tpass\x1b[2J\r\x9b é") == "def f():\n\tpass\ufffd[2J\ufffd\ufffd é"
    monkeypatch.setenv("MY_SERVICE_TOKEN", "c4nary-token-1")
    assert clean("a\n\tb with c4nary-token-1") == "a b with ***"
    assert clean(3) == ""
    assert len(clean("x" * 900)) == 303
