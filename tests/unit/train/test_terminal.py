"""A run in a real terminal: the live view, log lines above it, and a clean terminal however the run ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.terminal import Terminal

pytestmark = pytest.mark.processes

_MODEL = """
from pathlib import Path
from tests.helpers import canaries

def build(config, vocab_size):
    model = canaries.build(config, vocab_size)  # the first step overflows

    def fail_when_asked(*_):
        if Path("fail").exists():
            raise RuntimeError("planted")

    model.register_forward_pre_hook(fail_when_asked)
    return model
"""
_OVERRIDES = [
    "experiment=smoke",
    "precision=fp32",
    "model.factory=mine:build",
    "model.hidden_dim=16",
    "train.steps=100000",
    "train.log_every=1",
    "train.eval_every=0",
    "launch.threads_per_rank=1",
    "supervise.enabled=false",
    "run_dir=mine",
]


@pytest.mark.parametrize("end", ["ctrl-c", pytest.param("error", marks=pytest.mark.exhaustive)])
def test_a_run_draws_its_state_and_leaves_a_clean_terminal(tmp_path: Path, end: str) -> None:
    (tmp_path / "mine.py").write_text(_MODEL)
    with Terminal("train", *_OVERRIDES, cwd=tmp_path) as terminal:
        terminal.wait_for("ETA")
        lines = list(terminal.screen.lines)
        if end == "ctrl-c":
            terminal.press_ctrl_c()
        else:
            (tmp_path / "fail").touch()
        code = terminal.wait()
    top = max(number for number, line in enumerate(lines) if line.startswith("╭─ "))
    skip = next(number for number, line in enumerate(lines) if "skipped: overflow" in line)
    assert skip < top, "a warning stands above the view"
    view = "\n".join(lines[top:])
    assert "/100000  0 %  ETA " in view
    assert "│ loss " in view
    assert "step 1 skipped: overflow, culprit: " in view
    assert "GiB" in view
    assert {len(line) for line in lines[top:] if line} == {80}

    after = "\n".join(terminal.screen.lines)
    assert code == (75 if end == "ctrl-c" else 1), after
    assert ("stopped at step" if end == "ctrl-c" else "RuntimeError: planted") in after
    assert not set("╭│╰━") & set(after), "the view is erased"
    assert terminal.screen.cursor_shown
