"""Recomputed and compiled blocks on several ranks: each group is unsharded once in a backward; bounds and graphs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

import dtrain
from dtrain.engine.blocks.compiled import CompiledBlocks
from dtrain.measure.parity.compare import BOUNDS, NOISE_FACTOR
from dtrain.precision.hardware import has_compiler
from dtrain.sharding.group import ParameterGroup
from tests.engines.checks.training import language_model, tokens_of, train_language_model
from tests.helpers.oracle import extract_loss
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

UNITS = [f"blocks.{number}" for number in range(4)]
WAYS: list[dict[str, Any]] = [{}, {"recompute": "full"}, {"recompute": "selective"}]
needs_compiler = pytest.mark.skipif(not has_compiler(torch.device("cpu")), reason="no C++ compiler")


def start(stage: int, precision: str = "bf16", **blocks: Any) -> Any:
    options = {"zero_stage": stage, "reproducible": True, "blocks": dtrain.Blocks(**blocks)}
    return dtrain.initialize(language_model(dropout=0.0), precision=precision, seed=3, audit=0, **options)


def count_unshards(engine: Any) -> list[Counter[str]]:
    """Returns how often each unit is unsharded in the forward and in the backward of the second step."""
    train_language_model(engine, 1)
    counts: list[Counter[str]] = []
    real = ParameterGroup.start_unshard

    def start_unshard(group: ParameterGroup) -> None:
        if group.name and not group.is_unsharding:
            counts[-1][group.name] += 1
        real(group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParameterGroup, "start_unshard", start_unshard)
        tokens = tokens_of(1, engine.rank)
        counts.append(Counter())
        loss = extract_loss(engine(tokens=tokens[:, :-1], targets=tokens[:, 1:]))
        counts.append(Counter())
        engine.backward(loss)
        engine.step()
    return counts


def unshards(rank: int, world: int) -> list[list[Counter[str]]]:
    return [count_unshards(start(3, **way)) for way in WAYS]


def test_stage_3_unshards_a_recomputed_group_once_in_backward() -> None:
    for way, (forward, backward) in zip(WAYS, run_ranks(2, unshards)[0], strict=True):
        assert forward == Counter(UNITS)
        # the last two stay unsharded between forward and backward
        assert backward == Counter(UNITS[:-2]), way


def without_inductor(self: CompiledBlocks, graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Traces forward and backward as for compiled code, and runs the operations one by one: a tenth of the time."""
    self.num_graphs += 1
    return lookup_backend("aot_eager")(graph, inputs)


def distance(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    return float(sum((values - others[name]).double().square().sum() for name, values in some.items())) ** 0.5


def compiled(rank: int, world: int, precision: str, uses_inductor: bool) -> list[Any]:
    """Returns graphs and breaks, deviations from eager blocks, whether stages have equal bits, and unshards."""
    if not uses_inductor:
        CompiledBlocks._compile = without_inductor  # type: ignore[method-assign]
    counters.clear()

    def run(engine: Any) -> tuple[list[float], dict[str, Tensor]]:
        return train_language_model(engine), engine.master_state()

    (curve, masters), (_, exact) = (run(start(3, name)) for name in (precision, "fp32"))
    begun = language_model(dropout=0.0).state_dict()
    found, runs = [], []
    ways = WAYS if precision == "fp8" else WAYS[:1]
    for stage, way in ((3, {}), *((2, way) for way in ways)):
        engine = start(stage, precision, compile="blocks", **way)
        runs.append(run(engine))
        found.append((engine.compiled_graphs, sum(counters["graph_break"].values())))
    loss = max(abs(a - b) / abs(b) for a, b in zip(runs[0][0], curve, strict=True))
    # over all weights: of a single one, Adam's first steps may have another sign
    moved, rounded, deviation = (distance(masters, other) for other in (begun, exact, runs[0][1]))
    weights = deviation / (BOUNDS[precision].weights * moved + NOISE_FACTOR * rounded) if masters else 0.0
    same = [run[0] == runs[0][0] and all(torch.equal(run[1][k], v) for k, v in runs[0][1].items()) for run in runs]
    return [found, loss, weights, all(same), count_unshards(start(3, precision, compile="blocks"))]


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
    return train_language_model(start(stage, compile="blocks"))


@needs_compiler
@pytest.mark.compile
@pytest.mark.exhaustive
def test_reproducible_compiled_blocks_have_equal_bits_on_one_rank_and_two() -> None:
    assert run_ranks(1, compiled_curve, 0)[0] == run_ranks(2, compiled_curve, 3)[0]
