"""The record of a rank's progress, as another process reads it."""

from __future__ import annotations

import mmap
import time

import pytest

from dtrain.distributed.progress import RECORD_BYTES, Phase, Progress, ProgressRecord
from dtrain.distributed.schedule import Collective, CollectiveSchedule
from dtrain.errors import CommunicationError


def recorded() -> tuple[Progress, memoryview]:
    """Returns a progress and the memory of its record."""
    progress, memory = Progress(), memoryview(bytearray(RECORD_BYTES))
    progress.move_to(memory)
    return progress, memory


def test_a_reader_sees_step_phase_and_the_wait() -> None:
    memory = memoryview(mmap.mmap(-1, RECORD_BYTES))
    progress = Progress()
    progress.begin(Phase.DATA, step=6)
    progress.move_to(memory)
    assert ProgressRecord.read(memory).step == 6
    progress.begin(Phase.FORWARD, step=7)
    progress.enter(41, "all_gather(blocks.7, 8 x float32)")
    record = ProgressRecord.read(memory)
    assert (record.step, record.phase, record.entered, record.is_waiting) == (7, Phase.FORWARD, 41, True)
    assert record.label == "all_gather(blocks.7, 8 x float32)"
    progress.leave(41)
    assert not ProgressRecord.read(memory).is_waiting


def test_every_phase_and_every_wait_changes_the_record() -> None:
    progress, memory = recorded()
    seen = {ProgressRecord.read(memory).num_changes}
    for number in range(1, 4):
        progress.begin(Phase.DATA)
        seen.add(ProgressRecord.read(memory).num_changes)
        progress.enter(number, "vote")
        seen.add(ProgressRecord.read(memory).num_changes)
        progress.leave(number)
    assert len(seen) == 7


def test_the_waits_of_another_thread_are_this_ones_while_it_waits_for_the_thread() -> None:
    (progress, memory), thread = recorded(), Progress()
    progress.begin(Phase.SAVE)
    progress.enter(100, "vote")
    progress.leave(100)
    with progress.following(thread) as update:
        thread.enter(7, "commit")
        update()
        record = ProgressRecord.read(memory)
        assert (record.is_waiting, record.entered, record.label) == (True, 7, "commit")
        update()  # a wait without an end is no progress
        assert ProgressRecord.read(memory) == record
        thread.leave(7)
        update()
        record = ProgressRecord.read(memory)
        assert not record.is_waiting
        thread.advance()
        update()
        assert ProgressRecord.read(memory).num_changes == record.num_changes + 1
        thread.enter(8, "commit")
        update()
        assert progress.is_waiting
    assert not progress.is_waiting


def test_more_labels_than_the_record_holds_replace_the_oldest() -> None:
    progress, memory = recorded()
    for number in range(1000):
        progress.enter(number, f"text of {number} bytes")
        assert ProgressRecord.read(memory).label == f"text of {number} bytes"
        progress.enter(number, "vote")
        assert ProgressRecord.read(memory).label == "vote"
    progress.enter(1, "é" * 100)
    assert ProgressRecord.read(memory).label.startswith("é" * 48)


def test_busy_time_is_without_the_waits() -> None:
    progress = Progress()
    progress.begin(Phase.BACKWARD)
    time.sleep(0.02)
    progress.enter(1, "reduce")
    time.sleep(0.1)
    progress.leave(1)
    progress.begin(Phase.UPDATE)
    assert 0.02 <= progress.busy_s[Phase.BACKWARD] < 0.1


def test_a_wait_that_fails_has_ended() -> None:
    schedule, memory = CollectiveSchedule(), memoryview(bytearray(RECORD_BYTES))
    schedule.progress.move_to(memory)
    message = r"rank 3: vote failed: another rank .*connection reset"
    with pytest.raises(CommunicationError, match=message), schedule.waiting(3, Collective(5, "vote")):
        raise RuntimeError("connection reset\nand more")
    assert not ProgressRecord.read(memory).is_waiting
