"""The engine on one GPU: NCCL of one rank, every stage and precision against the oracle, checkpoints, memory."""

from __future__ import annotations

import copy
import errno
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import dtrain
from dtrain.checkpoint import AsyncSaver, Snapshot, open_newest, save, storage
from dtrain.checkpoint.snapshot import HostCopy, TensorShard
from dtrain.config.model import ModelConfig
from dtrain.config.precision import Float8
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.engine.vote.finalize import LazyOutcome
from dtrain.errors import CheckpointError
from dtrain.models import build_model
from dtrain.precision.remainder import RemainderPair, split
from dtrain.sharding.placement import STAGES
from tests.gpu.device import DEVICE, ON_CPU, needs_gpu, no_waits

pytestmark = pytest.mark.usefixtures("one_rank_of_nccl")

VOCAB, STEPS = 300, 8
ADAMW = dtrain.AdamW(lr=1e-3)
CONFIG = ModelConfig(num_layers=2, hidden_dim=128, num_heads=4, max_seq_len=64)
FP8 = {
    recipe: dtrain.PrecisionPolicy.named("fp8", float8=Float8(recipe=recipe, choice="all"))
    for recipe in ("tensorwise", "rowwise")
}
WAITS = needs_gpu("the host waits for no CPU; tests/fake has this on fake devices")


def batch(index: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCAB, (4, CONFIG.max_seq_len + 1), generator=torch.Generator().manual_seed(index))
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def make_engine(precision: str | dtrain.PrecisionPolicy, stage: int = 2, **options: Any) -> Any:
    """A small language model, by default under the native engine."""
    settings = {"optimizer": ADAMW, "zero_stage": stage, "precision": precision, "max_grad_norm": 0.5, "seed": 0}
    engine: Any = dtrain.initialize(build_model(CONFIG, VOCAB, seed=0).to(DEVICE), **settings | options)
    assert engine.device.type == DEVICE.type
    return engine


def train(engine: Any, steps: int) -> list[dtrain.StepOutcome]:
    outcomes = []
    for step in range(engine.attempted_steps, engine.attempted_steps + steps):
        for micro in engine.accumulate([batch(2 * step), batch(2 * step + 1)]):
            on_device = {name: tensor.to(DEVICE) for name, tensor in micro.items()}
            engine.backward(engine(**on_device).loss, weight=1 + step % 2)
        outcomes.append(engine.step())
    return outcomes


def masters(engine: Any) -> torch.Tensor:
    return torch.cat([buffer.master for buffer in engine.sharded.buffers])


def test_infinity_on_the_device_is_skipped_and_named() -> None:
    engine = make_engine("bf16", 2)
    before = masters(engine)
    name = engine._backward_names[-1]
    handle = dict(engine.module.named_parameters())[name].register_hook(lambda g: g * float("inf"))
    outcome = train(engine, 1)[0]
    handle.remove()
    assert outcome.reason == "overflow"
    assert outcome.culprit is not None
    numel = dict(engine.module.named_parameters())[name].numel()
    got = outcome.culprit
    assert (got.rank, got.step, got.phase, got.micro_batch, got.tensor) == (0, 0, "local gradient", 0, name)
    assert (got.start, got.stop, got.num_inf + got.num_nan) == (0, numel, numel)  # Inf, and NaN where it was 0
    assert torch.equal(before, masters(engine))
    assert train(engine, 1)[0].applied


COMPACT = {"master": "remainder", "grad_dtype": "bf16"}


@pytest.mark.parametrize("optimizer", [ADAMW, dtrain.AdamWBF16(lr=1e-3), dtrain.AdamW(lr=1e-3, compile=False)])
@pytest.mark.parametrize("stage", [0, 3])
def test_compact_states_follow_full_ones(stage: int, optimizer: dtrain.AdamW, tmp_path: Path) -> None:
    """Losses as with full states, the weights the halves of their masters, and both load each other's checkpoints."""
    full, compact = (make_engine("bf16", stage, optimizer=optimizer, **options) for options in ({}, COMPACT))
    losses = [[outcome.loss for outcome in train(engine, STEPS)] for engine in (full, compact)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    want = compact.master_state()
    for buffer in compact.sharded.buffers:
        assert isinstance(buffer.master, RemainderPair) == (buffer.layout.dtype == torch.bfloat16)
        if isinstance(buffer.master, RemainderPair):
            assert torch.equal(buffer.master.bits[0], split(buffer.master.read())[0])
            assert buffer.gradient.main_grad.dtype == torch.bfloat16
    compact.save(tmp_path)
    full.load(tmp_path)
    assert all(torch.equal(master, want[name]) for name, master in full.master_state().items())
    train(full, 1)
    full.save(tmp_path)
    compact.load(tmp_path)
    want = full.master_state()
    assert all(torch.equal(master, want[name]) for name, master in compact.master_state().items())


@WAITS
@pytest.mark.parametrize("stage", sorted(STAGES))
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"precision": "fp16", "loss_scale": "dynamic"},
        {"precision": "bf16", "reproducible": True},
        {"precision": "bf16", "optimizer": dtrain.AdamW(lr=1e-3, compile=False)},
        {"precision": "bf16", **COMPACT},
        {"precision": FP8["tensorwise"]},
        {"precision": FP8["rowwise"]},
    ],
    ids=["bf16", "fp16", "reproducible", "eager", "compact", "fp8", "fp8, row-wise"],
)
def test_no_step_waits_for_the_device(stage: int, options: dict[str, Any]) -> None:
    engine = make_engine(stage=stage, **options)
    batches = [{name: tensor.to(DEVICE) for name, tensor in batch(index).items()} for index in range(2)]
    tokens = torch.tensor(256.0, device=DEVICE)

    def step() -> dtrain.StepOutcome:
        for number, micro in enumerate(engine.accumulate(batches)):
            engine.backward(engine(**micro).loss, weight=(256, tokens)[number])
        return engine.step()

    outcomes = [step() for _ in range(2)]  # compiles, and allocates what is used again
    with no_waits():
        outcomes += [step() for _ in range(3)]
    assert all(type(outcome) is LazyOutcome for outcome in outcomes)
    # FP16 may still be on its way down with its scale
    assert all(outcome.reason in (None, "overflow") for outcome in outcomes)
    assert engine.attempted_steps == 5
    assert engine.applied_steps == sum(outcome.applied for outcome in outcomes)


@WAITS
def test_a_wait_is_an_error_then() -> None:
    value = torch.ones((), device=DEVICE)
    with no_waits(), pytest.raises(RuntimeError, match="synchroniz"):
        value.item()


def test_outcomes_read_late_are_their_own() -> None:
    """The ring of pinned buffers has two slots."""
    late, prompt = (make_engine("fp16", 2, loss_scale=dtrain.LossScale("dynamic", init=2.0**24)) for _ in range(2))
    outcomes, seen = train(late, 10), []
    for _ in range(10):
        seen += [asdict(outcome) for outcome in train(prompt, 1)]
    assert [repr(asdict(outcome)) for outcome in outcomes] == [repr(outcome) for outcome in seen]
    assert len({outcome.loss_scale for outcome in outcomes}) > 1
    assert torch.equal(masters(late), masters(prompt))


@pytest.mark.parametrize("precision", ["bf16", *FP8.values()], ids=["bf16", *FP8])
@pytest.mark.parametrize("stage", [2, 3])
def test_resume_is_bit_exact(precision: str | dtrain.PrecisionPolicy, stage: int, tmp_path: Path) -> None:
    straight, first, resumed = (make_engine(precision, stage, reproducible=True) for _ in range(3))
    train(straight, 6)
    train(first, 3)
    first.save(tmp_path)
    resumed.load(tmp_path)
    train(resumed, 3)
    for name, tensor in straight.master_state().items():
        assert torch.equal(resumed.master_state()[name], tensor), name


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_is_saved_while_training_goes_on_is_the_state_of_the_call(tmp_path: Path, stage: int) -> None:
    engine = make_engine("bf16", stage, reproducible=True)
    outcomes = train(engine, 2)
    for start in (2, 5):  # the second save goes into the memory of the first
        expected = {name: tensor.clone() for name, tensor in engine.states.full_state("exp_avg")}
        path = engine.save(tmp_path, asynchronous=True)
        outcomes += train(engine, 3)  # nothing waits for the copy, nor looks at an outcome
        assert engine.wait_for_save() == path
        reader = open_newest(tmp_path, SingleRank(torch.device("cpu")))
        assert reader.step == start
        for name, tensor in expected.items():
            assert torch.equal(reader.read("exp_avg", name), tensor.cpu().flatten()), name
    assert ON_CPU or all(block.is_pinned() for block in engine._between.parts.checkpointer._saver._copy._blocks)
    straight = make_engine("bf16", stage, reproducible=True)
    assert [outcome.loss for outcome in train(straight, 8)] == [outcome.loss for outcome in outcomes]


def test_a_save_that_fails_is_raised_by_a_step_that_can_be_called_again(tmp_path: Path) -> None:
    engine = make_engine("bf16", 2)
    train(engine, 1)
    with mock.patch.object(storage, "write", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        engine.save(tmp_path, asynchronous=True)
        deadline = time.monotonic() + 30
        while not engine._between.parts.checkpointer._saver.has_failed:
            assert time.monotonic() < deadline
    train(engine, 1)  # its vote says so, and nobody has read it
    with pytest.raises(CheckpointError, match="failed on rank 0: No space left on device"):
        train(engine, 1)
    assert engine.step().applied
    assert engine.save(tmp_path, asynchronous=True) == engine.wait_for_save() == tmp_path / "step-00000003"


def shard_of(data: torch.Tensor) -> TensorShard:
    return TensorShard("weight", "master", tuple(data.shape), torch.float32, 0, data.numel(), data)


@needs_gpu("streams")
def test_the_host_does_not_wait_for_the_copy() -> None:
    """It is queued behind work that takes long; what changes the tensor after it is queued behind it."""
    data = torch.arange(1 << 20, dtype=torch.float32, device=DEVICE)
    snapshot = Snapshot(1, (shard_of(data),), {})
    copy = HostCopy(data.device)
    copy.reserve(snapshot)
    torch.cuda._sleep(1_000_000_000)  # about half a second
    slow = torch.cuda.Event()
    slow.record()
    taken = copy.take(snapshot)
    data.zero_()
    assert not slow.query()
    taken.ready()
    assert slow.query()
    assert torch.equal(taken.shards[0].data, torch.arange(1 << 20, dtype=torch.float32))


@needs_gpu("streams")
@pytest.mark.parametrize("copied", [True, False])
def test_a_synchronous_save_on_another_stream_is_ordered_with_it(tmp_path: Path, copied: bool) -> None:
    """The written, hashed and fingerprinted bytes are those queued on the current stream before the save."""
    alone, on_host = SingleRank(DEVICE), SingleRank(torch.device("cpu"))
    data = torch.zeros(1 << 22, dtype=torch.float32, device=DEVICE)
    snapshot = Snapshot(1, (shard_of(data),), {})
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(1_000_000_000)
        data.fill_(3.0)
        if copied:
            AsyncSaver(alone).save(tmp_path, snapshot, None)
        else:
            save(tmp_path, snapshot, alone)
    reader = open_newest(tmp_path, on_host)  # proves the hash
    assert torch.equal(reader.read("master", "weight"), torch.full((1 << 22,), 3.0))
    reader.check_fingerprints([shard_of(data.cpu())], on_host)


@needs_gpu("its allocator")
@pytest.mark.parametrize("stage", sorted(STAGES))
@pytest.mark.parametrize("precision", ["bf16", FP8["tensorwise"]], ids=["bf16", "fp8"])
def test_memory_on_the_device_follows_the_formula(precision: str | dtrain.PrecisionPolicy, stage: int) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    engine = make_engine(precision, stage)
    states = torch.cuda.memory_allocated() - before
    reported = engine.memory()
    assert sum(reported.values()) <= 1.10 * sum(engine.memory_formula().values())
    assert states <= 1.05 * sum(reported.values()) + 2**20


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_convolutions_and_rnns_of_fp32_are_not_tf32(precision: str) -> None:
    """Against float64: FP32 errs by some 1e-7 here, TF32 by some 1e-4. In bf16 the two are modules kept in FP32."""
    policy = dtrain.PrecisionPolicy.named(precision, rules={"0": "fp32", "1": "fp32"})
    for module, x in (
        (torch.nn.Conv1d(64, 64, 3), torch.randn(4, 64, 32)),
        (torch.nn.GRU(64, 64), torch.randn(16, 4, 64)),
    ):
        with torch.no_grad():
            exact = copy.deepcopy(module).double()(x.double())
        model = torch.nn.ModuleList([module.to(DEVICE), torch.nn.Linear(1, 1).to(DEVICE)])
        engine = dtrain.initialize(model, precision=policy, seed=0)
        with engine.eval():
            out = module(x.to(DEVICE))
        out, exact = (out[0], exact[0]) if isinstance(out, tuple) else (out, exact)
        assert out.dtype == torch.float32
        assert float((out.cpu().double() - exact).norm() / exact.norm()) < 1e-5
