"""The peers of `dtrain bench`: scripts without dtrain's code, which do the work that the tables say."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from dtrain.tools.bench import peers
from dtrain.tools.bench.peers import PEERS, deepspeed_zero, plain
from tests.helpers.ranks import run_ranks


def test_peers_import_nothing_of_dtrain_but_their_shared_script() -> None:
    folder = Path(peers.__path__[0])
    assert {peer.module for peer in PEERS.values()} | {"plain"} == {path.stem for path in folder.glob("[!_]*.py")}
    for path in folder.glob("[!_]*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dtrain"):
                assert (node.module, [name.name for name in node.names]) == ("dtrain.tools.bench.peers", ["plain"])
            elif isinstance(node, ast.Import):
                assert not any(name.name.startswith("dtrain") for name in node.names)


def test_only_matrices_are_decayed_and_each_gradient_is_clipped() -> None:
    settings = plain.Settings(0.1, (0.9, 0.99), 1e-8, 0.5, 1e-3, False, 1, torch.device("cpu"))
    model = torch.nn.Linear(3, 2)
    matrix, bias = plain.decay_groups(model, settings.weight_decay)
    assert (matrix["params"], matrix["weight_decay"]) == ([model.weight], 0.5)
    assert (bias["params"], bias["weight_decay"]) == ([model.bias], 0.0)
    assert len(plain.decay_groups(torch.nn.Linear(3, 2, bias=False), 0.5)) == 1

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = model

        def forward(self, x: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(loss=self.linear(x).sum())

    training = plain.prepare(Loss(), settings)
    expected = model(torch.ones(4, 3)).sum().item()
    assert training.step({"x": torch.ones(4, 3)}) == pytest.approx(expected)
    held = training.tensors()
    assert torch.cat([grad.flatten() for grad in held["main_grad"]]).norm() == pytest.approx(1e-3, rel=1e-2)
    assert len(held["moments"]) == 6


SETTINGS = [(1, True), (2, True), (3, True), (2, False)]
"""Stage and ``fp32_sums``; the last one shows that the others could fail."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> SimpleNamespace:
        weight = self.linear.weight
        return SimpleNamespace(loss=self.linear(x.to(weight.dtype)).float().square().mean())


def sent_dtypes(rank: int, world: int) -> dict[tuple[int, bool], set[torch.dtype]]:
    """Dtypes of the gradients that DeepSpeed's peer sends in a step, by stage and ``fp32_sums``."""
    from dtrain.engine.deepspeed.library import load, observed_reductions

    device = torch.device("cpu")
    load(device)
    os.environ["LOCAL_RANK"] = str(rank)  # DeepSpeed reads a launcher's environment
    settings = plain.Settings(1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0, True, 1, device)
    sent: dict[tuple[int, bool], set[torch.dtype]] = {}
    for stage, fp32_sums in SETTINGS:
        training = deepspeed_zero.prepare(Model(), settings, stage=stage, fp32_sums=fp32_sums)
        seen: set[torch.dtype] = set()
        with observed_reductions(lambda tensor, seen=seen: seen.add(tensor.dtype) if tensor.numel() > 16 else None):
            training.step({"x": torch.ones(2, 16)})
        sent[stage, fp32_sums] = seen
    return sent


@pytest.mark.processes
@pytest.mark.skipif(not PEERS["deepspeed_1"].is_installed, reason="needs deepspeed")
def test_deepspeed_peer_sums_in_fp32_as_the_deepspeed_engine_does() -> None:
    for sent in run_ranks(2, sent_dtypes):
        assert sent == {
            (stage, fp32_sums): {torch.float32 if fp32_sums else torch.bfloat16} for stage, fp32_sums in SETTINGS
        }
