"""``engine.full_model()`` outside of its place."""

from __future__ import annotations

import pytest

from dtrain.errors import UsageError
from tests.helpers.one_rank import loss_of, start


def test_is_refused_between_backward_and_step_and_inside_eval() -> None:
    engine = start()
    engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match="between backward and step"), engine.full_model():
        pass
    assert engine.step().applied
    with engine.eval(), pytest.raises(UsageError, match=r"inside engine\.eval"), engine.full_model():
        pass
