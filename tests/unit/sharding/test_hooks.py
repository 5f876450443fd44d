"""Which forwards read their parameters as attributes, so that no hook has to make them readable."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtrain.sharding.hooks import reads_attributes


class _Inherits(nn.Linear):
    pass


class _Overrides(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self._parameters["weight"])  # type: ignore[arg-type]


def _patched() -> nn.Linear:
    linear = nn.Linear(2, 2)
    weight = linear.weight
    linear.forward = lambda x: F.linear(x, weight)  # type: ignore[method-assign]
    return linear


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(2, 2), True),
        (nn.GRUCell(2, 2), True),
        (_Inherits(2, 2), True),
        (nn.GRU(2, 2), False),  # from a list of its own
        (_Overrides(2, 2), False),
        (_patched(), False),
        (torch.jit.script(nn.Linear(2, 2)), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_the_forwards_of_torch_are_known_to_read_attributes(module: nn.Module, expected: bool) -> None:
    assert reads_attributes(module) is expected


def test_no_module_of_torch_but_rnns_reads_its_parameters_otherwise() -> None:
    kinds = [kind for kind in vars(torch.nn).values() if inspect.isclass(kind) and issubclass(kind, nn.Module)]
    others = {kind for kind in kinds if kind is not nn.Module and not issubclass(kind, nn.RNNBase)}
    assert len(others) > 100
    forwards = {kind: inspect.getsource(kind.forward) for kind in others}
    assert not [kind for kind, source in forwards.items() if "_parameters" in source or "_flat_weights" in source]
    assert "_flat_weights" in inspect.getsource(nn.GRU.forward), "what is looked for"
