"""When the host of a rank waits for its device. Tensors on ``meta`` have no values, so every read raises."""

from __future__ import annotations

import pytest
import torch

from dtrain.distributed.single_rank import SingleRank

NO_VALUES = SingleRank(torch.device("meta"))


def test_a_single_rank_exchanges_text_without_its_device() -> None:
    assert NO_VALUES.exchange_text("a save") == ["a save"]


def test_a_barrier_stops_the_host() -> None:
    """A collective of NCCL is only queued, and rank 0 may still write what the others must wait for."""
    with pytest.raises(NotImplementedError, match="meta"):
        NO_VALUES.barrier()
