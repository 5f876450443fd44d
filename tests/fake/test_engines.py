"""Every stage and precision as one rank of 8 and of 1,024, on fake devices: memory, collectives, waits, host reads."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dtrain
from dtrain.engine.vote.record import NUM_FIELDS
from dtrain.models import build_model
from dtrain.sharding.placement import STAGES, memory_formula
from tests.fake.collectives import Collective
from tests.fake.harness import CONFIG, VOCAB, FakeRank, fake_engine

FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
PRECISIONS = {"bf16": BF16, "fp16": FP16, "fp8": BF16}
CASES = [("bf16", 0, 8), ("bf16", 1, 8), ("fp8", 2, 8), ("fp8", 3, 1024), ("fp16", 3, 8)]
MORE_CASES = [pytest.param("bf16", 2, 8, marks=pytest.mark.exhaustive)]


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


HIDDEN, FFN = CONFIG.hidden_dim, up(-(-8 * CONFIG.hidden_dim // 3), 64)
BLOCK = (3 * HIDDEN * HIDDEN, HIDDEN * HIDDEN, 2 * FFN * HIDDEN, FFN * HIDDEN)  # qkv, out, gate and up, down
EMBEDDING = (up(VOCAB, 64) * HIDDEN,)  # tied with the head
NORMS = (HIDDEN,) * (2 * CONFIG.num_layers + 1)
NUM_WEIGHTS = CONFIG.num_layers * len(BLOCK)


def padded(numels: tuple[int, ...], ranks: int) -> int:
    """Elements of a flat buffer: parameters start on 64 elements, and each rank has whole chunks of 1,024."""
    return up(up(sum(up(numel, 64) for numel in numels), 1024), 1024 * ranks)


def flat_buffers(precision: str, ranks: int) -> list[tuple[str, int, torch.dtype]]:
    """Returns (name, elements, dtype) of the flat buffers in the order of the forward."""
    low, block = PRECISIONS[precision], FP8 if precision == "fp8" else PRECISIONS[precision]
    buffers = [("root", padded(EMBEDDING, ranks), low), ("root", padded(NORMS, ranks), FP32)]
    buffers += [(f"blocks.{number}", padded(BLOCK, ranks), block) for number in range(CONFIG.num_layers)]
    return [(f"{group}/{str(dtype).removeprefix('torch.')}", numel, dtype) for group, numel, dtype in buffers]


def backward_order(buffers: list[tuple[str, int, torch.dtype]]) -> list[tuple[str, int, torch.dtype]]:
    return [*buffers[:1:-1], *buffers[:2]]  # the last block first, the root last


def expected_collectives(precision: str, stage: int, ranks: int, num_micro_batches: int) -> Iterator[Collective]:
    """Yields the collectives of a step."""
    buffers = flat_buffers(precision, ranks)
    root, blocks = buffers[:2], buffers[2:]

    def gathers(*which: tuple[str, int, torch.dtype]) -> Iterator[Collective]:
        yield from (Collective("all_gather", name, numel, dtype) for name, numel, dtype in which)

    for _ in range(num_micro_batches if stage >= 2 else 0):
        if stage == 3:
            first, *others = blocks
            yield from gathers(first, *root, *others)  # the first block is prefetched, the root before it is used
            yield from gathers(*blocks[-3::-1])  # the last two blocks and the root are unsharded still
        for number, (name, numel, dtype) in enumerate(backward_order(buffers)):
            sent = PRECISIONS[precision] if dtype == FP8 else dtype  # a gradient has the compute dtype
            # the weight follows each shard of the first one
            yield Collective("all_to_all_single", name, numel + (0 if number else 64 * ranks), sent)
    for name, numel, _ in backward_order(buffers) if stage < 2 else ():
        yield Collective("reduce_scatter_sum", name, numel, FP32)
    if stage == 0:
        yield from gathers(*((f"sum {name}", numel, FP32) for name, numel, _ in backward_order(buffers)))
    yield Collective("gather_rows", "vote", NUM_FIELDS + 1, torch.int64)  # a bit for each of up to 64 parameters
    if precision == "fp8" and stage:
        yield Collective("all_reduce_max", "largest weights", NUM_WEIGHTS, FP32)
    if stage in (1, 2):
        yield from gathers(*buffers)


def expected_memory(precision: str, stage: int, ranks: int, *, is_padded: bool) -> dict[str, int]:
    """Returns the formula, of the parameters or of the buffers that they fill."""
    size = (lambda numels: padded(numels, ranks)) if is_padded else sum
    blocks = CONFIG.num_layers * size(BLOCK)
    is_float8 = precision == "fp8"
    numel = size(EMBEDDING) + blocks + size(NORMS)
    found = memory_formula(
        STAGES[stage],
        numel=numel,
        state_bytes=8 * numel,
        replica_bytes=2 * size(EMBEDDING) + (1 if is_float8 else 2) * blocks,
        fp32_numel=size(NORMS),
        frozen_bytes=0,
        num_ranks=ranks,
    )
    if is_padded and is_float8:
        found["compute"] += 2 * 4 * NUM_WEIGHTS  # the scales, and the magnitudes behind them
    return found


@pytest.mark.parametrize(("precision", "stage", "ranks"), [*CASES, *MORE_CASES])
def test_a_step_of_one_rank_among_many(precision: str, stage: int, ranks: int) -> None:
    num_micro_batches = 2 if stage < 3 else 1
    with fake_engine(ranks, precision=precision, zero_stage=stage) as rank:
        check_memory(rank, precision, stage, ranks)
        rank.collectives.clear()
        outcome = rank.step(num_micro_batches)
        assert rank.collectives.issued == list(expected_collectives(precision, stage, ranks, num_micro_batches))
        assert len(rank.collectives.sent) == len(rank.collectives.issued)
        rank.collectives.require_waited()
        check_memory(rank, precision, stage, ranks)
        assert outcome.applied
        gc.collect()
        # losses, weights, tables of addresses and the placeholders of sharded parameters are small change
        assert 0 <= rank.device.live_bytes() - sum(rank.engine.memory().values()) < 64 * 1024


def check_memory(rank: FakeRank, precision: str, stage: int, ranks: int) -> None:
    held, formula = rank.engine.memory(), rank.engine.memory_formula()
    assert formula == expected_memory(precision, stage, ranks, is_padded=False)
    assert {kind: held[kind] for kind in formula} == expected_memory(precision, stage, ranks, is_padded=True)
    assert held["unsharded"] == held["buffers"] == 0


def frozen_blocks() -> nn.Module:
    """The default model, of which the embedding and the norms are trained."""
    model = build_model(CONFIG, VOCAB, seed=0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("blocks." not in name or "norm" in name)
    return model


OPTIONS: dict[str, dict[str, Any]] = {
    "frozen, fp8, sharded": {"precision": "fp8", "model": frozen_blocks, "zero_stage": 3},
    "reproducible": {"reproducible": True},
    "sums sent in bf16": {"reduce_dtype": "bf16", "zero_stage": 1},
    "two groups ahead": {"zero_stage": 3, "prefetch": 2},
    "replicas": {"shard_size": 4},
    "calibrated": {"precision": "fp16", "loss_scale": dtrain.LossScale("calibrated", calibration_steps=2)},
    "ddp": {"engine": "ddp", "zero_stage": 0, "world_size": 1},
    "not compiled": {"world_size": 1, "optimizer": dtrain.AdamWBF16(compile=False), "ema_decay": 0.9},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_makes_the_host_wait_or_forgets_a_wait(name: str) -> None:
    with fake_engine(**{"world_size": 8, "zero_stage": 2, **OPTIONS[name]}) as rank:
        assert all(rank.step(1).applied for _ in range(2))  # the first step too
        rank.collectives.require_waited()
        held, formula = rank.engine.memory(), rank.engine.memory_formula()
        assert all(held[kind] >= formula[kind] for kind in formula)


def test_measured_step_does_not_make_the_host_wait() -> None:
    with fake_engine(8, zero_stage=3) as rank:
        rank.step(1)
        rank.collectives.clear()
        with rank.engine.measure_precision(["blocks.*"]):
            rank.step(2)
        measured = list(rank.collectives.issued)
        rank.collectives.clear()
        rank.step(2)
        assert rank.collectives.issued == measured, "a measured step communicates as any other"
        rank.collectives.require_waited()


@pytest.mark.parametrize(
    ("stage", "ranks"), [(3, 2), *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in ((2, 1), (0, 8)))]
)
def test_a_step_of_muon_by_one_rank_among_many(stage: int, ranks: int) -> None:
    with fake_engine(ranks, precision="bf16", zero_stage=stage, optimizer=dtrain.Muon(compile=False)) as rank:
        rank.step(1)
        rank.collectives.clear()
        assert rank.step(1).applied
        rank.collectives.require_waited()
        specs = [slot.spec for buffer in rank.engine.sharded.buffers for slot in buffer.layout.slots]
        matrices = sum(spec.numel for spec in specs if "blocks" in spec.name and len(spec.shape) == 2)
        moved = [one for one in rank.collectives.issued if "owners" in one.label]
        assert {one.dtype for one in moved} <= {BF16}
        memory = rank.engine.memory()
        if ranks == 1:
            assert not moved
            assert memory["matrices"] == 2 * matrices
        elif stage == 0:
            assert moved == [Collective("all_gather", "matrices of all owners", memory["matrices"] // 2, BF16)]
        else:
            both_ways = [("all_to_all", f"matrices {way} their owners") for way in ("to", "from")]
            assert [(one.op, one.label) for one in moved] == both_ways
            assert rank.collectives.sent.count("all_to_all") >= 2
            assert memory["matrices"] <= 2 * 1.3 * matrices
        gc.collect()
        assert 0 <= rank.device.live_bytes() - sum(memory.values()) < 64 * 1024
