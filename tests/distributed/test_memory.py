"""Memory: live storages against ``engine.memory()``, both against the ZeRO formula, and what a load takes."""

from __future__ import annotations

import gc
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.distributed.transport.host_memory import HostMemory
from dtrain.parameters.taken_gradient import TakenGradient
from tests.helpers.net import Net
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

DIM, BLOCKS = 256, 4


class Stack(nn.Module):
    """Blocks of equal size with a norm each; large enough that padding is small."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
            for _ in range(BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean()


def live_storages(engine: Any) -> dict[int, int]:
    """Returns the bytes of every storage of a live tensor, by address, without what ``gc.freeze`` has excluded.

    The memory of other ranks is theirs, although views of it are kept to be read again. Nor does that count which the
    groups of stage 3 take in turn.
    """
    comm = engine.comm
    found = {}
    with engine.states.reads:
        for item in gc.get_objects():
            # a taken gradient has no memory
            if issubclass(type(item), torch.Tensor) and not item.is_meta and type(item) is not TakenGradient:
                storage = item.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    for storage in comm.memory.foreign if isinstance(comm, HostMemory) else []:
        found.pop(storage.data_ptr(), None)
    for kept in engine.sharded.replicas[0].pool.free:
        found.pop(kept.data_ptr())
    return found


def measure(build: Callable[[], nn.Module], stage: int, precision: Any) -> tuple[int, dict[str, int], dict[str, int]]:
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()  # objects that exist already are neither searched nor counted
    engine: Any = dtrain.initialize(build(), precision=precision, zero_stage=stage, seed=0)
    for _ in range(2):
        engine.backward(engine(torch.randn(4, DIM)))
        engine.step()
    gc.collect()
    return sum(live_storages(engine).values()), engine.memory(), engine.memory_formula()


def measure_all(rank: int, world: int, precision: str) -> list[tuple[int, dict[str, int], dict[str, int]]]:
    return [measure(Stack, stage, precision) for stage in range(4)]


exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=exhaustive) for world in (1, 4))])
def test_state_bytes_follow_the_formula(world: int, precision: str) -> None:
    for found in run_ranks(world, measure_all, precision, fresh=True):
        for stage, (live, reported, formula) in enumerate(found):
            where = f"stage {stage}: {reported} against {formula}, live {live}"
            expected = sum(formula.values())
            states = sum(reported[kind] for kind in formula)
            # padding: each of the small FP32 buffers fills up to world x 1,024 elements
            assert expected <= states <= 1.03 * expected, where
            # a model this small may be in flight as a whole, sent and received in the replica dtype
            sent = formula["master"] * (world if stage else 1) / (2 if precision == "bf16" else 1)
            assert reported["unreduced_grad"] <= (2.2 * sent if stage >= 2 and world > 1 else 0), where
            assert reported["unsharded"] == 0, where
            # losses, inputs and scalars of the test itself are small change
            assert abs(live - sum(reported.values())) < 16 * 1024, where


def shares_storage(rank: int, world: int, precision: str) -> None:
    for stage in range(4):
        engine: Any = dtrain.initialize(Stack(), precision=precision, zero_stage=stage, seed=0)
        fp32 = [buffer for buffer in engine.sharded.buffers if buffer.layout.dtype == torch.float32]
        for buffer in fp32:
            for local in buffer.replica.local:
                assert (local.data_ptr(), local.numel()) == (buffer.master.data_ptr(), buffer.master.numel()), stage
        if stage < 3 or world == 1:
            storages = {buffer.master.untyped_storage().data_ptr() for buffer in fp32}
            for name, parameter in engine.module.named_parameters():
                assert parameter.dtype != torch.float32 or parameter.untyped_storage().data_ptr() in storages, name
                assert parameter.data_ptr() % 64 == 0, f"'{name}' has another alignment"


@pytest.mark.parametrize(("world", "precision"), [(1, "bf16"), (2, "bf16"), (2, "fp32")])
def test_fp32_replicas_are_the_masters_at_every_stage(world: int, precision: str) -> None:
    run_ranks(world, shares_storage, precision)


def lies_in_heap(num_bytes: int) -> bool:
    """Whether malloc takes ``num_bytes`` from its heap; what it maps goes back to the system when it is freed."""
    address = torch.empty(num_bytes, dtype=torch.uint8).data_ptr()
    lines = Path("/proc/self/maps").read_text().splitlines()
    # several, because what a forked process adds to its heap is not merged with what it has inherited
    heap = [line.split()[0].split("-") for line in lines if line.endswith("[heap]")]
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in heap)


def heap_before_and_after(rank: int, world: int) -> list[bool]:
    before = lies_in_heap(12 * 2**20)  # freed, it raises malloc's threshold to its own size
    dtrain.initialize(nn.Linear(4, 4))
    return [before, lies_in_heap(28 * 2**20)]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_memory_that_a_step_frees_is_kept_for_the_next() -> None:
    assert run_ranks(1, heap_before_and_after, fresh=True) == [[False, True]]


BOUND = 48 << 20  # bytes that a load may take beside the state that it fills, however large a tensor is


def large(world: int) -> nn.Module:
    """Has one trained weight of which each rank holds more than a load may take, and one frozen weight as large."""
    trained, frozen = (torch.arange(ranks * 13_000_000, dtype=torch.float32) for ranks in (world, 1))
    return Net(lambda net, x: x, trained=nn.Parameter(trained), frozen=nn.Parameter(frozen, requires_grad=False))


def resident(what: str) -> int:
    """Resident bytes: ``RSS`` now, or ``HWM``, the maximum since the last reset."""
    found = re.search(rf"Vm{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def save(rank: int, world: int, folder: Path, loading: int) -> None:
    dtrain.initialize(large(loading), zero_stage=2, precision="fp32").save(folder)


def load(rank: int, world: int, folder: Path, engine: str) -> tuple[int, float]:
    """Returns the bytes that a load took beside the existing state, and the last weight of this rank."""
    # BF16, so that the frozen weight, saved in FP32, is cast
    running: Any = dtrain.initialize(large(world), engine=engine, zero_stage=2, precision="bf16")
    shards = [shard for kind in ("master", "exp_avg", "exp_avg_sq") for shard in running.states.local_shards(kind)]
    for shard in shards:
        shard.data.fill_(0.5)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    before = resident("RSS")
    running.load(folder)
    return resident("HWM") - before, shards[0].data[-1].item()


@pytest.mark.parametrize(
    ("saved", "loaded", "engines"), [(2, 1, ["native"]), pytest.param(1, 2, ["native", "fsdp2"], marks=exhaustive)]
)
def test_a_load_on_more_and_on_fewer_ranks(tmp_path: Path, saved: int, loaded: int, engines: list[str]) -> None:
    run_ranks(saved, save, tmp_path, loaded, fresh=True)
    for engine in engines:
        taken, last = zip(*run_ranks(loaded, load, tmp_path, engine, fresh=True), strict=True)
        assert max(taken) <= BOUND, f"{engine} on {loaded}: {[size >> 20 for size in taken]} MiB"
        assert last[-1] == torch.tensor(loaded * 13_000_000 - 1, dtype=torch.float32)
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()  # pytest keeps the folders of its last runs
