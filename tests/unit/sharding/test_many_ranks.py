"""The gradients of 1,024 ranks are received as one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.many_ranks import sent_gradient


class _Operations(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def _operations(work: Callable[[], None]) -> int:
    with _Operations() as counted:
        work()
    return counted.number


def _of_a_micro_batch(ranks: int) -> list[int]:
    with sent_gradient(ranks) as work:
        for one in work:  # the first buffer is cut
            one()
        return [_operations(one) for one in work]


@pytest.mark.parametrize("ranks", [1024])
def test_a_micro_batch_takes_as_many_operations_for_any_number_of_ranks(ranks: int) -> None:
    assert _of_a_micro_batch(ranks) == _of_a_micro_batch(2)
