from __future__ import annotations

import torch
from torch import Tensor, nn

from dtrain.precision.module_calls import ModuleCall, watch_calls


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError


class Catching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Failing()

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.inner(x)
        except ValueError:
            return -x


def test_calls_know_their_caller_after_one_that_failed() -> None:
    model, ended = nn.Sequential(Catching(), nn.Tanh()), list[ModuleCall]()
    with watch_calls(dict(model.named_modules()), lambda call: f"begun {call.name}", ended.append):
        output = model(torch.ones(1))
    found = [(call.name, call.begun, call.caller) for call in ended]
    assert found == [("0", "begun 0", ""), ("1", "begun 1", ""), ("", "begun ", None)]
    assert ended[2].output is output
