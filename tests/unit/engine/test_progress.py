"""The phases that an engine records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dtrain.distributed.progress import RECORD_BYTES, Phase, ProgressRecord
from tests.helpers.one_rank import X, loss_of, start


def test_an_engine_records_its_step_and_phase(tmp_path: Path) -> None:
    engine = start()
    memory = memoryview(bytearray(RECORD_BYTES))
    engine.progress.move_to(memory)
    seen: list[tuple[int, Phase]] = []

    def look(*_: Any) -> None:
        record = ProgressRecord.read(memory)
        seen.append((record.step, record.phase))

    engine.module.register_forward_hook(look)
    next(engine.module.parameters()).register_hook(look)
    look()
    for _ in range(2):
        engine.backward(loss_of(engine))
        look()
        engine.step()
        look()
    with engine.eval():
        engine(X)
    engine.save(tmp_path)
    look()
    expected = [(0, Phase.START)]
    for step in range(2):
        expected += [(step, Phase.FORWARD), (step, Phase.BACKWARD), (step, Phase.DATA), (step + 1, Phase.DATA)]
    assert seen == [*expected, (2, Phase.EVALUATION), (2, Phase.DATA)]
    assert all(engine.progress.busy_s[phase] > 0 for phase in (Phase.UPDATE, Phase.EVALUATION, Phase.SAVE))
