"""The flat update of a rule without a kernel of its own, with one state in BF16."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.optim import flat
from dtrain.optim.adamw import AdamW, AdamWRule
from dtrain.optim.flat import FlatUpdate
from dtrain.optim.rule import Rule, StateSpec, UpdateClass, UpdateScalars, UpdateSlice
from dtrain.optim.rules import rule_of
from dtrain.sharding.layout import CHUNK
from tests.helpers.momentum import Momentum, MomentumRule

RULE = MomentumRule(Momentum(lr=0.1, weight_decay=0.1, reduced=True, init=0.5))
SCALARS = UpdateScalars(0.1, 1, torch.tensor(3.0), torch.tensor(0.0))
CHUNKS = 6


class Arena:
    """Masters, main grads, the state and a BF16 replica; the first half of the chunks decays."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.master, self.main_grad = (torch.randn(CHUNKS * CHUNK, generator=generator) for _ in range(2))
        self.state = RULE.states[0].like(self.master)
        self.replica = self.master.bfloat16()

    def segments(self, cuts: Sequence[int]) -> list[list[UpdateSlice]]:
        """Returns a segment for each range of chunks between ``cuts`` and the change of the class."""
        bounds = sorted({0, CHUNKS // 2, CHUNKS, *cuts})
        parts = [slice(start * CHUNK, stop * CHUNK) for start, stop in itertools.pairwise(bounds)]
        return [
            [
                UpdateSlice(
                    UpdateClass(weight_decay=0.1 if part.start < CHUNKS // 2 * CHUNK else 0.0),
                    (0, part.start),
                    self.master[part],
                    self.main_grad[part],
                    (self.state[part],),
                    self.replica[part],
                )
            ]
            for part in parts
        ]

    def bits(self) -> list[Tensor]:
        return [tensor.clone() for tensor in (self.master, self.state, self.replica)]


@settings(max_examples=20)
@given(st.sets(st.integers(0, CHUNKS)), st.integers(1, CHUNKS))
def test_any_cut_at_chunks_gives_the_same_bits(cuts: set[int], block: int) -> None:
    whole, cut = Arena(), Arena()
    FlatUpdate([RULE], whole.segments([])).update([0, 1], SCALARS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat, "_BLOCK", block * CHUNK)
        segments = cut.segments(sorted(cuts))
        FlatUpdate([RULE], segments).update(range(len(segments)), SCALARS)
    assert all(map(torch.equal, cut.bits(), whole.bits()))
    assert torch.equal(cut.replica, cut.master.bfloat16())
    assert not torch.equal(cut.master, Arena().master)


def test_segments_left_out_stay_as_they_are() -> None:
    arena, before = Arena(), Arena().bits()
    FlatUpdate([RULE], arena.segments([1])).update([0, 2], SCALARS)
    for tensor, old in zip(arena.bits(), before, strict=True):
        changed = (tensor != old).view(CHUNKS, CHUNK).any(dim=1)
        assert changed.tolist() == [True, False, False, True, True, True]


def test_a_state_is_made_in_its_own_dtype_and_value() -> None:
    state = StateSpec("ema", torch.bfloat16, 0.5).like(torch.nn.Parameter(torch.zeros(3, 2)))
    assert (state.dtype, state.shape, state.requires_grad) == (torch.bfloat16, (3, 2), False)
    assert (state == 0.5).all()
    assert RULE.state_bytes == 2


def test_a_record_finds_its_rule() -> None:
    rule: Rule = rule_of(AdamW(compile=False))
    assert isinstance(rule, AdamWRule)
    assert (rule.is_compiled, rule.state_bytes) == (False, 8)
    assert [spec.name for spec in rule.states] == ["exp_avg", "exp_avg_sq"]
    with pytest.raises(ConfigError, match="optimizer is Momentum; expected one of Adam, AdamW, AdamWBF16"):
        rule_of(Momentum())
