"""Digests of two versions: what differs is named, and a repeated training differs in nothing."""

from __future__ import annotations

import pytest

from tests.measure.bits import Case, differing, trained_all


def test_what_differs_is_named() -> None:
    one = {"a": {"loss": "1", "master:w": "1", "master:v": "1"}, "b": {"loss": "1"}}
    other = {"a": {"loss": "1", "master:w": "2"}, "c": {}}
    assert list(differing(one, other)) == ["a: master (2)", "b: only in the first file", "c: only in the second file"]


@pytest.mark.processes
def test_a_repeated_training_has_equal_bits_and_a_skip_changes_them() -> None:
    plain, skipped = (Case("native", 0, ranks=1, words=words, accumulation=1) for words in ("", "skipped"))
    first, second = (trained_all([plain, skipped]) for _ in range(2))
    assert not list(differing(first, second))
    assert first[str(plain)] != first[str(skipped)]
    assert first[str(skipped)]["trained, rank 0, reason"] == "['None', 'nonfinite_loss', 'None']"
