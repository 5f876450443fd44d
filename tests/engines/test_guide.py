"""The GAN, the gradient penalty and the moving average of docs/library.md, with every engine and in plain PyTorch."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dtrain
from tests.helpers.ranks import run_ranks

GUIDE = Path(__file__).parents[2] / "docs/library.md"
OTHERS = [("native", 0), ("ddp", 0), ("fsdp2", 2), ("deepspeed", 2)]


def blocks(heading: str) -> list[str]:
    (section,) = re.findall(
        rf"^## {heading}\n(.*?)(?=^## )", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    found: list[str] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return found


class Plain:
    """The methods of an engine that the guide's loops call, in plain PyTorch."""

    def __init__(self, model: nn.Module, optimizer: dtrain.AdamW, ema_decay: float | None = None, **_: Any) -> None:
        self.module = model
        self._decay = ema_decay
        self._average = copy.deepcopy(model)
        decayed, others = ([p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False))
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=optimizer.lr, betas=(0.9, 0.95))

    def __call__(self, x: Tensor) -> Any:
        return self.module(x)

    def backward(self, loss: Tensor) -> None:
        self._optimizer.zero_grad()
        loss.backward()

    @torch.no_grad()
    def step(self) -> Any:
        self._optimizer.step()
        if self._decay is not None:
            for average, parameter in zip(self._average.parameters(), self.module.parameters(), strict=True):
                average += (1 - self._decay) * (parameter - average)
        return SimpleNamespace(applied=True)

    @contextmanager
    def ema(self) -> Iterator[None]:
        own, self.module = self.module, self._average
        yield
        self.module = own

    def eval(self) -> Any:
        return torch.no_grad() if self.module.training else nullcontext()

    def master_state(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}


def run_blocks(code: list[str], initialize: Any) -> list[Any]:
    """Runs ``code`` and returns the weights of its engines, and ``smooth``."""
    torch.set_num_threads(1)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "dtrain": dtrain}
    results: list[Any] = []
    with mock.patch.object(dtrain, "initialize", initialize):
        for block in code:
            torch.manual_seed(0)  # the penalty draws from the generator of the process
            exec(compile(block, str(GUIDE), "exec"), names)  # noqa: S102 - the document is ours
            results += [names[name].master_state() for name in ("g", "d", "averaged") if name in names]
    return [*results, names.get("smooth")]


def compare(rank: int, world: int, engine: str, stage: int) -> None:
    initialize = dtrain.initialize

    def start(model: nn.Module, **options: Any) -> Any:
        return initialize(model, **{**options, "engine": engine, "zero_stage": stage})

    gan, average = blocks("Two engines: a GAN"), blocks("Moving average of the weights")
    # DeepSpeed's discriminator has to be frozen, as tests/engines/checks/two_engines.py has it
    code = [*gan, *average] if engine != "deepspeed" else [gan[0].partition("g, d = pair")[0], *average]
    found, expected = run_blocks(code, start), run_blocks(code, Plain)
    assert found[-1] is not None
    torch.testing.assert_close(found[-1], expected[-1], rtol=1e-5, atol=1e-6)
    assert len(found) == len(expected) > 1
    for got, want in zip(found[:-1], expected[:-1], strict=True):
        for name, weight in want.items():
            torch.testing.assert_close(got[name], weight, rtol=0, atol=1e-6)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("engine", "stage"),
    [("native", 3), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS)],
)
def test_equals_plain_pytorch(engine: str, stage: int) -> None:
    run_ranks(1, compare, engine, stage)
