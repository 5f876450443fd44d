"""Recomputed and compiled blocks on several ranks: each group is unsharded once in a backward; bounds and graphs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

import dtrain
from dtrain.config.model import ModelConfig
from dtrain.engine.blocks.compiled import CompiledBlocks
from dtrain.models import build_model
from dtrain.precision.hardware import has_compiler
from dtrain.sharding.group import ParameterGroup
from dtrain.tools.parity.compare import BOUNDS, NOISE_FACTOR
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

NUM_LAYERS = 4
RECOMPUTED = ({"recompute": "full"}, {"recompute": "selective"})
needs_compiler = pytest.mark.skipif(not has_compiler(torch.device("cpu")), reason="no C++ compiler")


def language_model(dropout: float) -> nn.Module:
    config = ModelConfig(num_layers=NUM_LAYERS, hidden_dim=32, num_heads=2, max_seq_len=16, dropout=dropout)
    return build_model(config, 64, seed=0)


def tokens(step: int, index: int) -> Tensor:
    return torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(100 * step + index))


def start(dropout: float = 0.2, *, precision: str = "bf16", engine: str = "native", **options: Any) -> Any:
    blocks = dtrain.Blocks(**options.pop("blocks", {}))
    model = language_model(dropout)
    return dtrain.initialize(model, engine=engine, precision=precision, seed=3, audit=0, blocks=blocks, **options)


def train(engine: Any, steps: int = 2) -> list[float]:
    """Two micro-batches a step over all ranks."""
    curve = []
    for step in range(steps):
        indices = range(engine.rank, 2, engine.world_size)
        for index in engine.accumulate(indices):
            batch = tokens(step, index)
            engine.backward(engine(tokens=batch[:, :-1], targets=batch[:, 1:]))
        outcome = engine.step()
        curve += [outcome.loss, outcome.grad_norm]
    return curve


def run_of(engine: Any, steps: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    return train(engine, steps), engine.master_state()


def distance(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    return float(sum((values - others[name]).double().square().sum() for name, values in some.items())) ** 0.5


def count_unshards(engine: Any) -> list[Counter[str]]:
    """Returns how often each unit is unsharded in the forward and in the backward of the second step."""
    train(engine, 1)
    counts: list[Counter[str]] = []
    real = ParameterGroup.start_unshard

    def start_unshard(group: ParameterGroup) -> None:
        if group.name and not group.is_unsharding:
            counts[-1][group.name] += 1
        real(group)

    ParameterGroup.start_unshard = start_unshard  # type: ignore[method-assign]
    try:
        batch = tokens(1, engine.rank)
        counts.append(Counter())
        loss = engine(tokens=batch[:, :-1], targets=batch[:, 1:])
        counts.append(Counter())
        engine.backward(loss)
        engine.step()
    finally:
        ParameterGroup.start_unshard = real  # type: ignore[method-assign]
    return counts


def unshards(rank: int, world: int, ways: list[dict[str, Any]]) -> list[list[Counter[str]]]:
    return [count_unshards(start(zero_stage=3, blocks=blocks)) for blocks in ways]


UNITS = [f"blocks.{number}" for number in range(NUM_LAYERS)]


def test_stage_3_unshards_a_recomputed_group_once_in_backward() -> None:
    ways = [{}, *RECOMPUTED]
    for way, (forward, backward) in zip(ways, run_ranks(2, unshards, ways)[0], strict=True):
        assert forward == Counter(UNITS)
        # the last two stay unsharded between forward and backward
        assert backward == Counter(UNITS[:-2]), way


def without_inductor(self: CompiledBlocks, graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Traces forward and backward as for compiled code, and runs the operations one by one: a tenth of the time."""
    self.num_graphs += 1
    return lookup_backend("aot_eager")(graph, inputs)


def compiled(rank: int, world: int, precision: str, uses_inductor: bool) -> list[Any]:
    """Returns graphs and breaks, deviations from eager blocks, whether stages have equal bits, and unshards."""
    if not uses_inductor:
        CompiledBlocks._compile = without_inductor  # type: ignore[method-assign]
    counters.clear()
    options = {"precision": precision, "reproducible": True}
    (curve, masters), (_, exact) = (
        run_of(start(0.0, zero_stage=3, **{**options, "precision": p})) for p in (precision, "fp32")
    )
    begun = language_model(0.0).state_dict()
    found, runs = [], []
    ways: list[dict[str, Any]] = [{}] if uses_inductor else [{}, *RECOMPUTED]
    for stage, way in ((3, ways[0]), *((2, way) for way in ways)):
        engine = start(0.0, zero_stage=stage, blocks={"compile": "blocks", **way}, **options)
        runs.append(run_of(engine))
        found.append((engine.compiled_graphs, sum(counters["graph_break"].values())))
    loss = max(abs(a - b) / abs(b) for a, b in zip(runs[0][0], curve, strict=True))
    # over all weights: of a single one, Adam's first steps may have another sign
    moved, rounded, deviation = (distance(masters, other) for other in (begun, exact, runs[0][1]))
    weights = deviation / (BOUNDS[precision].weights * moved + NOISE_FACTOR * rounded) if masters else 0.0
    same = [run[0] == runs[0][0] and all(torch.equal(run[1][k], v) for k, v in runs[0][1].items()) for run in runs]
    unsharded = count_unshards(start(0.0, zero_stage=3, blocks={"compile": "blocks"}, **options))
    return [found, loss, weights, all(same), unsharded]


@needs_compiler
@pytest.mark.compile
@pytest.mark.parametrize(
    ("precision", "uses_inductor"),
    [
        ("fp32", False),
        pytest.param("bf16", True, marks=pytest.mark.exhaustive),
        pytest.param("fp8", False, marks=pytest.mark.exhaustive),
    ],
)
def test_compiled_blocks(precision: str, uses_inductor: bool) -> None:
    """One graph without a break for all blocks; within the bounds of ``dtrain parity``; equal bits at two stages."""
    for found, loss, weights, same, unsharded in run_ranks(2, compiled, precision, uses_inductor, timeout=500):
        assert set(found) == {(1, 0)}
        assert loss <= BOUNDS[precision].loss
        assert weights <= 1
        assert same
        assert unsharded == [Counter(UNITS), Counter(UNITS[:-2])]


def compiled_curve(rank: int, world: int, stage: int) -> list[float]:
    return train(start(0.0, zero_stage=stage, reproducible=True, blocks={"compile": "blocks"}))


@needs_compiler
@pytest.mark.compile
@pytest.mark.exhaustive
def test_reproducible_compiled_blocks_have_equal_bits_on_one_rank_and_two() -> None:
    assert run_ranks(1, compiled_curve, 0)[0] == run_ranks(2, compiled_curve, 3)[0]
