"""A run in a real terminal: the live view, log lines above it, and a clean terminal however the run ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.terminal import Terminal

pytestmark = pytest.mark.processes

_OVERRIDES = [
    *(
        "experiment=smoke",
        "precision=fp32",
        "model.factory=tests.helpers.canaries:build",
        "model.hidden_dim=16",
        "run_dir=mine",
    ),
    *("train.steps=100000", "train.log_every=1", "train.eval_every=0"),
    *("launch.threads_per_rank=1", "supervise.enabled=false"),
]


def test_a_run_draws_its_state_and_leaves_a_clean_terminal(tmp_path: Path) -> None:
    with Terminal("train", *_OVERRIDES, cwd=tmp_path) as terminal:
        terminal.wait_for("ETA")
        lines = list(terminal.screen.lines)
        terminal.press_ctrl_c()
        code = terminal.wait()
    top = max(number for number, line in enumerate(lines) if line.startswith("╭─ "))
    skip = next(number for number, line in enumerate(lines) if "skipped: overflow" in line)
    assert skip < top, "a warning stands above the view"
    view = "\n".join(lines[top:])
    assert re.search(r"/100000  \d %  ETA ", view)  # a fast machine has taken a thousand steps by now
    for text in ("│ loss ", "step 1 skipped: overflow, culprit: ", "GiB"):
        assert text in view
    assert {len(line) for line in lines[top:] if line} == {80}

    after = "\n".join(terminal.screen.lines)
    assert code == 75, after
    assert "stopped at step" in after
    assert not set("╭│╰━") & set(after), "the view is erased"
    assert terminal.screen.cursor_shown
