"""The stopwatches around the parts of the vote."""

from __future__ import annotations

import time

import pytest
import torch

from dtrain.tools.bench.training.vote_timing import Stopwatch

CPU = torch.device("cpu")


def test_stopwatch_sums_the_calls_of_one_method() -> None:
    class Sleeper:
        def sleep(self, seconds: float, *, result: str) -> str:
            time.sleep(seconds)
            return result

    timed, other = Sleeper(), Sleeper()
    stopwatch = Stopwatch(timed, "sleep", CPU)
    assert [timed.sleep(0.002, result="a"), timed.sleep(0.003, result="b")] == ["a", "b"]
    other.sleep(0.0, result="not timed")
    assert 5.0 <= stopwatch.take() < 1000
    timed.sleep(0.001, result="c")
    assert 1.0 <= stopwatch.take() < 1000
    with pytest.raises(AssertionError, match="was not called"):
        stopwatch.take()
    with pytest.raises(AttributeError):
        Stopwatch(timed, "slep", CPU)


def test_stopwatch_within_another_counts_only_calls_inside_it() -> None:
    class Nested:
        def inner(self) -> None:
            time.sleep(0.002)

        def outer(self) -> None:
            self.inner()

    nested = Nested()
    outer = Stopwatch(nested, "outer", CPU)
    inner = Stopwatch(nested, "inner", CPU, outer)
    nested.inner()
    with pytest.raises(AssertionError, match="was not called"):
        inner.take()
    nested.outer()
    nested.inner()
    assert 2.0 <= inner.take() < outer.take()
