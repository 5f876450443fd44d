"""Which parameters Muon updates, and the order of the rules of several optimizers in a flat buffer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from dtrain.config.model import GPT2_FACTORY, ModelConfig
from dtrain.config.optim import Muon
from dtrain.errors import ConfigError
from dtrain.models import build_model
from dtrain.parameters.muon import muon_parameters
from dtrain.parameters.optimizer_plan import _adjacent

LLAMA = ModelConfig(num_layers=1, hidden_dim=32, num_heads=4, num_kv_heads=2, ffn_dim=48, tie_embeddings=False)
GPT2 = ModelConfig(factory=GPT2_FACTORY, num_layers=1, hidden_dim=32, num_heads=4, max_seq_len=32, ffn_dim=48)


class Net(nn.Module):
    """Positions as many as the width of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.positions = nn.Embedding(8, 8)
        self.bag = nn.EmbeddingBag(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm([2, 4])) for _ in range(2))
        self.conv = nn.Conv2d(3, 4, 2)
        self.frozen = nn.Linear(8, 9).requires_grad_(False)
        self.mix = nn.Linear(8, 12)
        self.shared = nn.Linear(8, 12)
        self.shared.weight = self.mix.weight
        self.heads = nn.ModuleList(nn.Linear(12, 20) for _ in range(2))


def names(model: nn.Module, **options: Any) -> list[str]:
    return list(muon_parameters(model, Muon(**options)))


def test_hidden_layers_and_no_output_layers() -> None:
    """Whether the output layer is tied or not, and also of a model in a container."""
    assert names(Net()) == ["blocks.0.0.weight", "blocks.1.0.weight", "mix.weight"]
    assert muon_parameters(Net(), Muon())["mix.weight"] == (12,)
    assert names(nn.Sequential(Net())) == ["0.blocks.0.0.weight", "0.blocks.1.0.weight", "0.mix.weight"]
    tied = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5))
    tied[2].weight = tied[0].weight
    assert names(tied) == ["1.weight"]
    assert names(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5))) == ["1.weight"]


def test_patterns_give_more_of_them_to_adamw() -> None:
    assert names(Net(), adamw=["blocks.1", "m?x.weight"]) == ["blocks.0.0.weight"]
    with pytest.raises(ConfigError, match=r"adamw pattern 'blcks' matches no parameter.*did you mean 'blocks'"):
        names(Net(), adamw=["blcks"])


def test_the_models_name_the_matrices_of_their_fused_weights() -> None:
    assert muon_parameters(build_model(LLAMA, 50, 0), Muon()) == {
        "blocks.0.attn.qkv.weight": (32, 16, 16),
        "blocks.0.attn.out.weight": (32,),
        "blocks.0.ffn.gate_up.weight": (48, 48),
        "blocks.0.ffn.down.weight": (32,),
    }
    assert muon_parameters(build_model(GPT2, 50, 0), Muon()) == {
        "blocks.0.attn.qkv.weight": (32, 32, 32),
        "blocks.0.attn.out.weight": (32,),
        "blocks.0.ffn.up.weight": (48,),
        "blocks.0.ffn.down.weight": (32,),
    }
    tied = replace(LLAMA, tie_embeddings=True)
    assert names(build_model(tied, 50, 0)) == names(build_model(LLAMA, 50, 0))


def test_a_pattern_splits_before_the_model_does_and_the_first_one_wins() -> None:
    model = build_model(LLAMA, 50, 0)
    found = muon_parameters(model, Muon(splits={"*.attn.qkv": [8] * 8, "blocks.*": [16, 16]}, adamw=["*.gate_up"]))
    assert found["blocks.0.attn.qkv.weight"] == (8,) * 8
    assert found["blocks.0.attn.out.weight"] == (16, 16)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"mix": [6, 5]}, r"splits of 'mix.weight' are \[6, 5\]; expected positive integers that sum to its first dim"),
        ({"mix": [12, 0]}, r"expected positive integers"),
        ({"tokens": [10, 10]}, r"splits pattern 'tokens' matches no weight that Muon updates"),
        ({"mxi": [12]}, r"splits pattern 'mxi' matches no parameter"),
    ],
)
def test_wrong_splits_are_refused(splits: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        names(Net(), splits=splits)


def test_parameters_with_one_state_lie_together_in_a_flat_buffer() -> None:
    assert _adjacent({("b",), ("a",), ()}) == ((), ("a",), ("b",))
    sorted_by_name = [("g", "m", "s"), ("g", "s"), ("m", "s"), ("s",)]  # those with m do not lie together
    assert _adjacent(sorted_by_name) == (("g", "s"), ("g", "m", "s"), ("m", "s"), ("s",))
    with pytest.raises(ConfigError, match="these states: a, b; a, c; b, c; no order of them"):
        _adjacent({("a", "b"), ("b", "c"), ("a", "c")})
