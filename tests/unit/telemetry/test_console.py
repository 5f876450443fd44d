from __future__ import annotations

import io
import logging
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.distributed.logging import configure_logging, logger
from dtrain.telemetry.console import Console, format_step, memory_lines
from tests.helpers.run_folders import STEP


def test_a_step_is_one_line() -> None:
    assert format_step(STEP, 200) == "step 20/200  loss 3.2140  lr 2.00e-03  grad_norm 1.02  45.2k tok/s  310 ms"
    assert format_step(replace(STEP, data_wait_ms=15.4), 200).endswith("310 ms")
    assert format_step(replace(STEP, data_wait_ms=15.6), 200).endswith("310 ms  data_wait 16 ms"), "5 % of the step"
    assert "loss_scale 65536  skipped 3" in format_step(replace(STEP, loss_scale=65536.0, skipped_steps=3), 200)
    assert format_step(replace(STEP, float8_gradient_cosine=0.99943), 200).endswith("310 ms  float8 cosine 0.9994")
    skipped = replace(STEP, applied=False, loss=math.nan, reason="overflow", culprit="'head' on rank 1", loss_scale=8.0)
    assert format_step(skipped, 200) == "step 20/200  skipped: overflow  loss_scale 8  culprit: 'head' on rank 1"


def test_memory_against_the_formula() -> None:
    lines = memory_lines({"master": 2 << 20, "buffers": 1 << 20}, {"master": 1 << 20})
    assert lines[0].endswith("2.00 MiB  (ZeRO formula 1.00 MiB)")
    assert lines[1].endswith("1.00 MiB")
    assert lines[2].endswith("3.00 MiB  (ZeRO formula 1.00 MiB)")


def test_the_progress_line_gives_the_stream_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    configure_logging(0)
    console = Console(200, 10, tmp_path)
    console.step(STEP)
    console.validation(20, {"val_loss": 2.5})
    console.step(replace(STEP, step=21, applied=False, reason="overflow"))
    console.close(0)
    assert sys.stderr is terminal
    assert [h.stream for h in logger.handlers if isinstance(h, logging.StreamHandler)] == [terminal]
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert not [text for text in ("loss 3.2140", "val_loss 2.5000", "skipped: overflow") if text not in shown]


NOTEBOOK = {"TERM": "xterm-color", "CLICOLOR": "1", "PAGER": "cat", "GIT_PAGER": "cat"}  # what ipykernel sets


def test_a_command_of_a_notebook_prints_plain_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``!dtrain train`` runs on a pseudo-terminal, but a cell shows the codes that move its cursor."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    for name, value in NOTEBOOK.items():
        monkeypatch.setenv(name, value)
    configure_logging(0)
    console = Console(200, 0, tmp_path)
    console.step(STEP)
    console.close(0)
    assert stream.getvalue() == format_step(STEP, 200) + "\n"


def test_without_a_terminal_there_are_plain_lines_that_control_none(monkeypatch: Any, tmp_path: Path) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging(0)
    console = Console(200, 0, tmp_path)
    console.step(STEP)
    console.close(0)
    logger.info("the class '%s'\n\tis of the folder", "\x1b]0;title\x07\r\x9b2J")
    logged = "the class '\ufffd]0;title\ufffd\ufffd\ufffd2J'\n\tis of the folder\n"
    assert stream.getvalue() == format_step(STEP, 200) + "\n" + logged


def test_gradients_far_from_those_of_bf16_are_a_warning_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    console = Console(200, 0, tmp_path)
    with caplog.at_level(logging.WARNING, logger.name):
        for cosine in (math.nan, 0.91, 0.89, 0.5):
            console.step(replace(STEP, float8_gradient_cosine=cosine))
    console.close(0)
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("step 20: the gradients in FP8 and in BF16 have a cosine of 0.890, below 0.9: take")
    assert all(word in message for word in ("precision.float8.recipe", "precision.rules", "precision=bf16"))
