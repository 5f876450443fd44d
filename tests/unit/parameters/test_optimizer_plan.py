"""The order of the rules in a flat buffer."""

from __future__ import annotations

import pytest

from dtrain.errors import ConfigError
from dtrain.parameters.optimizer_plan import _adjacent


def test_parameters_with_one_state_lie_together() -> None:
    assert _adjacent({("b",), ("a",), ()}) == ((), ("a",), ("b",))
    sorted_by_name = [("g", "m", "s"), ("g", "s"), ("m", "s"), ("s",)]  # those with m do not lie together
    assert _adjacent(sorted_by_name) == (("g", "s"), ("g", "m", "s"), ("m", "s"), ("s",))


def test_states_that_cannot_lie_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="these states: a, b; a, c; b, c; no order of them"):
        _adjacent({("a", "b"), ("b", "c"), ("a", "c")})
