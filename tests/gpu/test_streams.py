"""Tests the waits of [Note: streams] in ``distributed.communicator`` on a GPU, with NCCL of one rank.

``make_communicator`` gives a single rank no collective, so these tests make the communicator of several themselves.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.distributed.communicator import Handle
from dtrain.distributed.transport.choose import make_communicator
from dtrain.distributed.transport.process_group import ProcessGroup, all_gather_single, reduce_scatter_single
from dtrain.engine.vote.readback import Readback
from dtrain.engine.vote.record import upload
from dtrain.train.validation import to_device
from tests.gpu.device import DEVICE, needs_gpu

pytestmark = [needs_gpu("streams"), pytest.mark.usefixtures("one_rank_of_nccl")]
NUMEL = 1 << 22
SLEEP = 1_000_000_000
"""Clock cycles, about half a second."""


def gather(output: Tensor, shard: Tensor) -> Handle:
    assert dist.group.WORLD is not None
    return ProcessGroup(dist.group.WORLD, DEVICE, make_communicator).all_gather(output, shard, label="test")


def filled(value: float) -> Tensor:
    return torch.full((NUMEL,), value, device=DEVICE)


@pytest.fixture(autouse=True)
def _idle() -> None:
    """Nothing is queued, and no memory is cached that another test has freed."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def test_a_wait_stops_the_stream_and_not_the_host() -> None:
    shard, output, copied = filled(1.0), filled(0.0), filled(0.0)
    for cycles in (1, SLEEP):  # the first time loads the kernels
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda._sleep(cycles)
        shard.add_(1.0)
        gather(output, shard).wait()
        copied.copy_(output)
        elapsed = time.perf_counter() - start
    assert elapsed < 0.2, "the host waited for a collective"
    assert bool((copied == 3.0).all())


def test_memory_of_a_collective_in_flight_is_given_to_nobody() -> None:
    shard, output = filled(3.0), filled(0.0)
    address = shard.data_ptr()
    torch.cuda._sleep(SLEEP)
    pending = gather(output, shard)
    del shard
    other = filled(4.0)
    assert other.data_ptr() != address, "the memory of an input in flight was given away"
    before = torch.cuda.memory_allocated()
    pending.wait()
    assert torch.cuda.memory_allocated() == before - 4 * NUMEL, "the wait has not freed the input"
    assert bool((output == 3.0).all())


def test_an_unshard_into_memory_whose_last_use_is_queued() -> None:
    shard, old = filled(6.0), filled(7.0)
    address = old.data_ptr()
    torch.cuda._sleep(SLEEP)
    used = old * 2
    del old
    new = torch.empty(NUMEL, device=DEVICE)
    assert new.data_ptr() == address
    gather(new, shard).wait()
    assert bool((used == 14.0).all())
    assert bool((new == 6.0).all())


def test_collectives_with_and_without_a_handle_keep_their_order() -> None:
    output, rows, total = filled(0.0), torch.empty(4, device=DEVICE), filled(1.0)
    torch.cuda._sleep(SLEEP)
    first = gather(output, filled(8.0))
    dist.all_reduce(total)  # on the current stream, as the vote's gather
    all_gather_single(rows, torch.arange(4.0, device=DEVICE))
    second = gather(output, filled(9.0))
    first.wait()
    second.wait()
    assert bool((output == 9.0).all())
    assert bool((total == 1.0).all())
    assert rows.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64])
def test_every_dtype_that_is_sent(dtype: torch.dtype) -> None:
    values = torch.arange(64, device=DEVICE).to(dtype)
    output = torch.zeros_like(values)
    gather(output, values).wait()
    assert torch.equal(output.view(torch.uint8), values.view(torch.uint8))
    view = torch.uint8 if dtype.itemsize == 1 else dtype  # as all_gather does
    received = torch.zeros_like(values).view(view)
    dist.all_to_all_single(received, values.view(view), async_op=True).wait()
    assert torch.equal(received.view(torch.uint8), values.view(torch.uint8))


def test_a_shard_may_lie_in_the_buffer_that_is_gathered_or_reduced() -> None:
    flat = filled(2.0)
    dist.all_reduce(flat, async_op=True).wait()
    reduce_scatter_single(flat, flat, async_op=True).wait()
    gather(flat, flat).wait()
    assert bool((flat == 2.0).all())


def test_decisions_and_records_cross_without_a_wait() -> None:
    readback = Readback(DEVICE)
    values = torch.arange(8, device=DEVICE)
    pinned = [torch.empty(2, dtype=torch.int64, pin_memory=True) for _ in range(256)]
    readback.post(values)()
    to_device({"tokens": torch.arange(1 << 20)}, DEVICE)
    torch.cuda.synchronize()
    del pinned  # only the allocation of pinned memory may wait; torch keeps what was freed
    start = time.perf_counter()
    torch.cuda._sleep(SLEEP)
    records = [upload([number, 2 * number], DEVICE) for number in range(200)]  # each frees its pinned memory at once
    values += 1
    read = readback.post(values)
    values.zero_()  # queued after the copy
    batch = to_device({"tokens": torch.arange(1 << 20)}, DEVICE)
    assert time.perf_counter() - start < 0.2, "the host waited for the device"
    assert read().tolist() == list(range(1, 9))
    assert [record.tolist() for record in records] == [[number, 2 * number] for number in range(200)]
    assert torch.equal(batch["tokens"].cpu(), torch.arange(1 << 20))


_FAILS = """
import torch, torch.distributed as dist
from dtrain.distributed.startup.setup import disconnect, ensure_process_group
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
ensure_process_group(device)
x = torch.ones(1 << 20, device=device)
dist.all_reduce(x)
torch.cuda.synchronize()
torch.cuda._sleep(1_000_000_000)
work = dist.all_reduce(x, async_op=True)  # nobody waits for it
disconnect(failed=True)
assert not dist.is_initialized()
print("left")
"""


def test_a_failed_rank_leaves_at_once() -> None:
    """In a process of its own, which it might take with it."""
    done = subprocess.run([sys.executable, "-c", _FAILS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "left"), done.stderr[-2000:]
