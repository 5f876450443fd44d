from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.checkpoint import Retention, Snapshot, list_checkpoints, save
from dtrain.checkpoint.format.integrity import verify_checkpoint
from dtrain.checkpoint.format.manifest import Manifest
from dtrain.checkpoint.retention import find_expired
from dtrain.errors import CheckpointError
from tests.helpers.checkpoints import ALONE

LOSSES: dict[int, float | None] = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: 2.0, 60: 5.0}


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(), [50, 60]),
        (Retention(1), [60]),
        (Retention(1, keep_every=20), [20, 40, 60]),
        (Retention(1, keep_best=2), [20, 50, 60]),  # the newer of equal losses
        (Retention(1, keep_best=9), [10, 20, 40, 50, 60]),  # a checkpoint without a loss is not among the best
        (Retention(2, keep_every=30, keep_best=1), [20, 30, 50, 60]),
    ],
)
def test_rules_on_examples(retention: Retention, kept: list[int]) -> None:
    assert [step for step in LOSSES if step not in retention.expired(LOSSES)] == kept


runs = st.dictionaries(st.integers(0, 400), st.none() | st.floats(-5, 5), max_size=12)
rules = st.builds(Retention, st.integers(1, 4), st.sampled_from([0, 1, 5, 50]), st.integers(0, 3))


@settings(max_examples=50)
@given(runs, rules)
def test_each_rule_alone_keeps_what_it_names(losses: dict[int, float | None], rule: Retention) -> None:
    expired = rule.expired(losses)
    kept = set(losses) - set(expired)
    assert expired == sorted(set(losses) - kept)
    assert set(sorted(losses)[-rule.keep_last :]) <= kept
    assert not rule.keep_every or {step for step in losses if step % rule.keep_every == 0} <= kept
    scored = [loss for loss in losses.values() if loss is not None]
    best = [loss for step in kept if (loss := losses[step]) is not None]
    assert sorted(best)[: rule.keep_best] == sorted(scored)[: rule.keep_best]
    # and what is kept is kept by one of them: without it, the same again
    for step in kept:
        alone = Retention(rule.keep_last), Retention(1, rule.keep_every), Retention(1, 0, rule.keep_best)
        assert any(step not in other.expired(losses) for other in alone)


@pytest.mark.parametrize("values", [{"keep_last": 0}, {"keep_every": -1}, {"keep_best": -1}])
def test_numbers_out_of_range_are_refused(values: dict[str, int]) -> None:
    ((name, value),) = values.items()
    with pytest.raises(CheckpointError, match=f"{name}={value}"):
        Retention(**values)


def _save(directory: Path, step: int, retention: Retention, **metrics: float) -> None:
    save(directory, Snapshot(step, (), {"metrics": metrics}), ALONE, retention=retention)


def test_a_save_deletes_what_no_rule_keeps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rule = Retention(keep_last=2, keep_every=100, keep_best=1)
    for step, loss in [(100, 4.0), (130, 1.0), (160, 2.0), (190, 3.0)]:
        _save(tmp_path, step, rule, val_loss=loss)
    _save(tmp_path, 210, rule, train_loss=0.5)
    names = [item.path.name for item in list_checkpoints(tmp_path)]
    assert names == ["step-00000100", "step-00000130", "step-00000190", "step-00000210"]
    (tmp_path / "step-00000210" / "r0000.safetensors").unlink()
    with caplog.at_level(logging.WARNING, "dtrain"):
        found = find_expired(tmp_path, Retention(1))
    assert [path.name for path in found] == ["step-00000100", "step-00000130"], "190 is the newest that is whole"
    assert "step-00000210 is damaged: r0000.safetensors" in caplog.text
    found = find_expired(tmp_path, Retention(1), newest=tmp_path / "step-00000100")
    assert [path.name for path in found] == ["step-00000130"]
    _save(tmp_path, 45, Retention(1))
    names = [item.path.name for item in list_checkpoints(tmp_path)]
    assert names == ["step-00000045", "step-00000190", "step-00000210"], "what it has just saved stays"


def test_unreadable_checkpoint_does_not_stop_retention(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """It stays and does not count, and older ones are still deleted."""
    for step in (1, 2, 3, 4):
        _save(tmp_path, step, Retention(keep_last=9))

    def failing(path: Path, *, fast: bool) -> Manifest:
        if path.name == "step-00000002":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return verify_checkpoint(path, fast=fast)

    monkeypatch.setattr("dtrain.checkpoint.retention.verify_checkpoint", failing)
    _save(tmp_path, 5, Retention(keep_last=2))
    assert "step-00000002 cannot be read: Input/output error (errno 5)" in caplog.text
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000002", "step-00000004", "step-00000005"]
