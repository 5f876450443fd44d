"""Silent failures of low precision, and how the engine avoids them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtrain
from dtrain.engine.native import NativeEngine
from dtrain.errors import CommunicationError
from tests.helpers.ranks import run_ranks


def first_gradients(model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """The main grads of one BF16 step whose loss the model returns."""
    engine = dtrain.initialize(model, precision="bf16", seed=0)
    assert isinstance(engine, NativeEngine)
    engine.backward(engine(*inputs))
    engine.finish_gradients()
    return {name: grad.clone() for name, grad in engine.full_state("main_grad")}


class FrequentToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.embed(tokens) * 0.01).float().sum()


def test_the_gradient_of_a_frequent_token_is_summed_in_fp32() -> None:
    """2,048 addends of 0.01: a BF16 running sum stalls at 4, which is what plain autograd gives on CPU."""
    tokens = torch.full((2048,), 3)
    plain = nn.Embedding(8, 4).to(torch.bfloat16)
    (plain(tokens) * 0.01).float().sum().backward()
    assert plain.weight.grad is not None
    assert float(plain.weight.grad[3].max()) < 10, "the defect is gone: the guard may go too"
    grads = first_gradients(FrequentToken(), tokens)
    torch.testing.assert_close(grads["embed.weight"][3], torch.full((4,), 20.48), rtol=5e-3, atol=0)


class Checkpointed(nn.Module):
    """Functional softmax and layer norm inside activation checkpointing, with dropout."""

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.enabled = enabled
        self.inner = nn.Linear(16, 16)
        self.outer = nn.Linear(16, 1)

    def block(self, x: Tensor) -> Tensor:
        x = F.layer_norm(self.inner(x), (16,))
        return F.dropout(F.softmax(x, dim=-1), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.block, x, use_reentrant=False) if self.enabled else self.block(x)
        return self.outer(hidden).float().square().mean()


def test_activation_checkpointing_recomputes_the_same_numbers() -> None:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    grads = []
    for enabled in (False, True):
        torch.manual_seed(0)
        grads.append(first_gradients(Checkpointed(enabled), x))
    for name, expected in grads[0].items():
        assert torch.equal(grads[1][name], expected), name
    assert float(grads[0]["inner.weight"].abs().max()) > 0


def die_before_the_vote(rank: int, world: int) -> str:
    engine = dtrain.initialize(nn.Linear(4, 1), precision="fp32", seed=0)
    engine.backward(engine(torch.ones(1, 4)).mean())
    if rank == 1:
        return "left"
    with pytest.raises(CommunicationError) as caught:
        engine.step()
    return str(caught.value)


@pytest.mark.processes
def test_a_collective_that_fails_is_named() -> None:
    message, _ = run_ranks(2, die_before_the_vote, timeout=60)
    assert "rank 0: " in message
    assert "another rank has died, hangs, or issued other collectives" in message
