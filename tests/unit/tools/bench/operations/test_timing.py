"""Operations are timed round by round."""

from __future__ import annotations

import torch

from dtrain.tools.bench.operations.timing import Operation, time_rounds


def test_operations_alternate_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    operations = {name: Operation(lambda name=name: calls.append(name), 8) for name in "ab"}
    timings = time_rounds(operations, 2, torch.device("cpu"))
    assert calls == list("ababab")
    assert [(timing.case, timing.nbytes, len(timing.ms)) for timing in timings] == [("a", 8, 2), ("b", 8, 2)]
