"""A single rank: when its host waits for the device, and gradients in private memory."""

from __future__ import annotations

from collections import deque
from unittest import mock

import pytest
import torch

from dtrain.distributed.communicator import GradientExchange, GradientHandle, GradientSend
from dtrain.distributed.transport import gradient_buffers
from dtrain.distributed.transport.single_rank import SingleRank


def sends(*numels: int) -> list[GradientSend]:
    return [GradientSend(f"g{i}", numel, torch.float32, ((0, numel - 1),)) for i, numel in enumerate(numels)]


def exchange(limit: int, *numels: int) -> GradientExchange:
    with mock.patch.object(gradient_buffers, "MAX_BYTES_IN_FLIGHT", limit):
        made = SingleRank(torch.device("cpu")).gradient_exchange(sends(*numels), 0)
    made.begin(torch.tensor(0.5))
    return made


@pytest.mark.parametrize(
    ("limit", "numels", "in_flight"),
    [
        (0, (10, 10, 10), [1, 2, 2, 2, 2, 2, 2]),  # two always overlap
        (1000, (10, 10, 10), [1, 2, 3, 4, 4, 4, 4]),  # at most a micro-batch before the next send
        (80, (10, 10, 10), [1, 2, 3, 3, 3, 3, 3]),
        (80, (10, 20, 10), [1, 2, 2, 2, 3, 2, 2]),  # before the second of a cycle there are two of 10
    ],
)
def test_number_in_flight_depends_on_the_sizes_alone(limit: int, numels: tuple[int, ...], in_flight: list[int]) -> None:
    made = exchange(limit, *numels)
    handles: deque[GradientHandle] = deque()
    found = []
    for number in range(len(in_flight)):
        index = number % len(numels)
        made.open(index)
        while handles and handles[0].number <= made.finish_first():
            handles.popleft().release()
        handles.append(made.send(index))
        assert handles[-1].number == number
        found.append(len(handles))
    assert found == in_flight


def test_a_buffer_is_reused_once_it_is_released_and_its_padding_stays_zero() -> None:
    made = exchange(0, 10, 10)
    first = made.open(0)
    first[:9].fill_(1)
    handle = made.send(0)
    assert made.open(1).data_ptr() != first.data_ptr()
    (shard,), weights = handle.wait()
    assert shard.tolist() == [1.0] * 9 + [0.0]
    assert weights.tolist() == [0.5]
    assert made.idle() == []
    handle.release()
    assert [buffer.data_ptr() for buffer in made.idle()] == [first.data_ptr()]
    assert made.open(0).data_ptr() == first.data_ptr()


def test_a_single_rank_records_like_several() -> None:
    comm = SingleRank(torch.device("cpu"))
    made = comm.gradient_exchange(sends(10), 0)
    reductions: list[str] = []
    comm.schedule.on_reduction = lambda label, tensor: reductions.append(label)
    made.begin(torch.ones(()))
    made.open(0)
    made.send(0)
    assert comm.schedule.log == ["all_to_all_single(g0, 10 x float32)"]
    assert reductions == ["g0"]
    assert comm.schedule.num_issued == 1
    before = comm.schedule.hash
    comm.schedule.begin_step()
    assert comm.schedule.log == []
    assert comm.schedule.hash == before


def test_text_needs_no_device_and_a_barrier_stops_the_host() -> None:
    """Tensors on ``meta`` have no values, so every read raises.

    A collective of NCCL is only queued, and rank 0 may still write what the others must wait for.
    """
    no_values = SingleRank(torch.device("meta"))
    assert no_values.exchange_text("a save") == ["a save"]
    with pytest.raises(NotImplementedError, match="meta"):
        no_values.barrier()
