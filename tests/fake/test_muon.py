"""Muon as one rank of many on fake devices: waits, host reads, the collectives of a step, and the buffers."""

from __future__ import annotations

import gc

import pytest
import torch

import dtrain
from dtrain.config.optim import Muon
from tests.fake.collectives import Collective
from tests.fake.harness import fake_engine

RECORD = Muon(compile=False)


@pytest.mark.parametrize(("stage", "ranks"), [(2, 1), (3, 2), pytest.param(0, 8, marks=pytest.mark.exhaustive)])
def test_a_step_of_one_rank_among_many(stage: int, ranks: int) -> None:
    with fake_engine(ranks, precision="bf16", zero_stage=stage, optimizer=RECORD) as rank:
        assert isinstance(rank.engine.options.optimizer, dtrain.config.optim.Muon)
        rank.step(1)
        rank.collectives.clear()
        assert rank.step(1).applied
        rank.collectives.require_waited()
        matrices = sum(
            slot.spec.numel
            for b in rank.engine.sharded.buffers
            for slot in b.layout.slots
            if "blocks" in slot.spec.name and len(slot.spec.shape) == 2
        )
        moved = [one for one in rank.collectives.issued if "owners" in one.label]
        assert {one.dtype for one in moved} <= {torch.bfloat16}
        memory = rank.engine.memory()
        if ranks == 1:
            assert not moved
            assert memory["matrices"] == 2 * matrices
        elif stage == 0:
            assert moved == [
                Collective("all_gather", "matrices of all owners", memory["matrices"] // 2, torch.bfloat16)
            ]
        else:
            assert [(one.op, one.label) for one in moved] == [
                ("all_to_all", "matrices to their owners"),
                ("all_to_all", "matrices from their owners"),
            ]
            assert len([1 for name, _ in rank.collectives.sent if name == "all_to_all"]) >= 2
            assert memory["matrices"] <= 2 * 1.3 * matrices
        gc.collect()
        assert 0 <= rank.device.live_bytes() - sum(memory.values()) < 64 * 1024
