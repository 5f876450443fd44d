"""What says that a parameter never gets a gradient: a warning after the first step, an error for a lost checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtrain
from dtrain.engine.parts.missed_updates import whole_modules
from dtrain.errors import UsageError
from tests.helpers.one_rank import unchanged

NAMES = ["embed.weight", "blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.scale", "blocks.1.up.weight", "scale"]


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        (["blocks.0.up.weight", "blocks.0.up.bias"], ["blocks.0.up"]),
        (["blocks.0.up.weight"], ["blocks.0.up.weight"]),
        (NAMES[1:4], ["blocks.0"]),
        (NAMES[1:5], ["blocks"]),
        (["scale", "embed.weight"], ["scale", "embed"]),
        (NAMES, ["embed", "blocks", "scale"]),
    ],
)
def test_modules_stand_for_all_their_parameters(missing: list[str], named: list[str]) -> None:
    assert whole_modules(missing, NAMES) == named


class Net(nn.Module):
    """A block inside a checkpoint, behind an embedding that may be frozen; ``way`` is how the block is called."""

    def __init__(self, way: str, *, is_frozen: bool) -> None:
        super().__init__()
        self.way = way
        self.embed, self.unused = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.block, self.head = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Linear(8, 2)
        self.embed.requires_grad_(not is_frozen)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.way == "pair":
            x = checkpoint(lambda x, scale: self.block(x) * scale, x, torch.tensor(2.0), use_reentrant=True)
        elif self.way == "nested":
            x = checkpoint(lambda x: checkpoint(self.block, x, use_reentrant=False), x, use_reentrant=True)
        elif self.way == "no_grad":
            with torch.no_grad():
                x = self.block(x)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.way == "reentrant")
        return self.head(x).float().square().mean()


def start(way: str, *, is_frozen: bool = True, engine: str = "native") -> Any:
    torch.manual_seed(0)
    return dtrain.initialize(Net(way, is_frozen=is_frozen), engine=engine, precision="fp32", seed=0)


@pytest.mark.parametrize("engine", ["native", "ddp", "fsdp2"])
@pytest.mark.parametrize("way", ["reentrant", "pair", "nested"])
def test_a_block_that_a_checkpoint_cuts_off_is_an_error_before_the_first_step(way: str, engine: str) -> None:
    model = start(way, engine=engine)
    before = model.master_state()
    with pytest.raises(
        UsageError, match=r"'block\.0\.weight' would never get a gradient: its (FSDP)?Linear .*use_reentrant"
    ):
        model(torch.arange(6))
    assert unchanged(model, before)


@pytest.mark.parametrize(
    ("way", "is_frozen", "named"),
    [("other", True, "'unused'"), ("other", False, "'unused'"), ("no_grad", True, "'block', 'unused'")],
)
def test_modules_without_a_gradient_are_named_once(
    way: str, is_frozen: bool, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(way, is_frozen=is_frozen)
    for _ in range(2):
        engine.backward(engine(torch.arange(6)))
        assert engine.step().applied
    warnings = [one.getMessage() for one in caplog.records if "got no gradient" in one.getMessage()]
    assert len(warnings) == 1
    assert sorted(warnings[0].rpartition(": ")[2].split(", ")) == sorted(named.split(", "))
