"""``model.loss_chunk`` with a head that is a unit of sharding."""

from __future__ import annotations

import pytest

from dtrain.errors import ConfigError
from tests.engines.checks.training import start_language_model, tokens_of
from tests.engines.matrix import Case
from tests.helpers.ranks import run_ranks


def refuse(rank: int, world: int) -> str:
    units = {"sharding_units": ["blocks.*", "head"]}
    with pytest.raises(ConfigError) as caught:
        start_language_model(Case("native", 3), chunk=5, **units)
    tokens = tokens_of(0, rank)
    engine = start_language_model(Case("native", 3), chunk="auto", **units)
    assert engine(tokens[:, :-1], targets=tokens[:, 1:]).logits is not None, "auto falls back"
    return str(caught.value)


@pytest.mark.processes
def test_a_head_that_is_a_unit_of_sharding_is_refused() -> None:
    for message in run_ranks(2, refuse):
        assert message == (
            "model.loss_chunk=5: the output layer 'head' belongs to a unit of sharding, in whose forward alone its "
            "weight is whole; use model.loss_chunk=none"
        )
