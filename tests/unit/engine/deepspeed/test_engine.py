"""The DeepSpeed engine: generated configuration, refusals, and workarounds for DeepSpeed's behavior."""

from __future__ import annotations

import itertools
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtrain
from dtrain.distributed.startup.setup import disconnect
from dtrain.engine.adapters.deepspeed import config as deepspeed_config
from dtrain.engine.adapters.deepspeed import library
from dtrain.engine.adapters.deepspeed.engine import DeepSpeedEngine
from dtrain.errors import ContractError, DivergenceError, ModelError, UsageError
from tests.helpers.ranks import RankFailure, run_ranks
from tests.helpers.zoo import make

pytestmark = pytest.mark.processes


def start(model: nn.Module | str = "mlp", **options: Any) -> DeepSpeedEngine:
    built = make(model).build(0) if isinstance(model, str) else model
    engine = dtrain.initialize(built, engine="deepspeed", **{"precision": "fp32", "seed": 0, **options})
    assert isinstance(engine, DeepSpeedEngine)
    return engine


def step(engine: DeepSpeedEngine, name: str, indices: list[int]) -> dtrain.StepOutcome:
    entry = make(name)
    for index in engine.accumulate(indices):
        engine.backward(entry.loss(engine, entry.batch(index)))
    return engine.step()


# every stage, precision and place of the states
CONFIGS = [(0, "bf16", "none"), (1, "bf16", "cpu"), (2, "fp32", "cpu")]
CONFIGS += [(2, "bf16", "none"), (3, "fp32", "none"), (3, "bf16", "cpu")]


def one_rank(rank: int, world: int, extensions: str) -> None:
    os.environ["TORCH_EXTENSIONS_DIR"] = extensions
    assert "DS_ACCELERATOR" not in os.environ
    for stage, precision, offload in CONFIGS:
        engine = start(zero_stage=stage, precision=precision, offload=offload)
        deepspeed, parsed = engine._deepspeed, engine._deepspeed._config
        given, formula, memory = engine.library_config, engine.memory_formula(), engine.memory()
        assert json.loads(json.dumps(given)) == given, "plain values only"
        assert deepspeed.zero_optimization_stage() == given["zero_optimization"]["stage"] == stage
        assert deepspeed.get_data_types() == (torch.bfloat16 if "bf16" in given else torch.float32, torch.float32)
        assert deepspeed.communication_data_type == torch.float32
        assert (parsed.gradient_clipping, parsed.gradient_accumulation_steps) == (0.0, 1)
        for kind in ("master", "moments", "compute"):
            # both weight-decay classes are padded to whole shards
            assert 0 <= memory[kind] - formula[kind] <= (64 if formula[kind] else 0), (kind, given)
    assert not os.path.isdir(extensions) or os.listdir(extensions) == [], "nothing is compiled on a CPU"
    disconnect()  # as between the runs of a Hydra sweep
    assert all(step(start(zero_stage=s, precision="bf16"), "mlp", [0]).applied for s in range(4))
    for lacks, values in {"dimensions": torch.tensor(1.0), "elements": torch.empty(0, 2)}.items():
        odd = nn.Module()
        odd.scale = nn.Parameter(values)
        with pytest.raises(ModelError, match=f"'scale' has no {lacks}"):
            start(odd, zero_stage=3)
    engine, entry = start(zero_stage=2), make("mlp")
    for index in engine.accumulate([0, 1]):
        loss = entry.loss(engine, entry.batch(index))
        if index == 1:
            with pytest.raises(UsageError, match="a dummy loss without a graph with engine=deepspeed at zero_stage=2"):
                engine.backward(loss.detach(), weight=0.0)
        engine.backward(loss, weight=1.0 - index)
    assert engine.step().applied
    for stage in (0, 3):
        require_channels_last(stage)
    for part, in_place, stage in itertools.product(("norm", "linear"), (False, True), (0, 1, 3)):
        got = compiled(part, in_place, stage)
        if stage == 3 and not in_place:
            assert f"'{part}' is a torch.compile wrapper" in got
        elif stage and part == "norm":
            assert "'norm' is compiled and 'norm" in got
        else:
            assert got == "applied", (part, in_place, stage)
    assert "DS_ACCELERATOR" not in os.environ


def require_channels_last(stage: int) -> None:
    """A convolution in that memory format, one of whose strides torch ignores, against the native engine."""
    masters = []
    for name in ("native", "deepspeed"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 5, 2), nn.Conv2d(5, 4, 1)).to(memory_format=torch.channels_last)
        engine = dtrain.initialize(model, engine=name, zero_stage=stage, precision="fp32", seed=0)
        for number in range(2):
            engine.backward(engine(torch.randn(2, 3, 4, 4)).square().mean() * (number + 1))
            assert engine.step().applied
        masters.append(engine.master_state())
    want, got = masters
    assert all((got[key] - want[key]).norm() <= 1e-4 * want[key].norm() for key in want)


def compiled(part: str, in_place: bool, stage: int) -> str:
    """The result of a BF16 step with one module compiled: "applied", or the error."""
    model = nn.Sequential(OrderedDict(linear=nn.Linear(4, 4), norm=nn.LayerNorm(4)))
    if in_place:
        getattr(model, part).compile(backend="eager")
    else:
        setattr(model, part, torch.compile(getattr(model, part), backend="eager"))
    try:
        engine = start(model, zero_stage=stage, precision="bf16")
    except ModelError as error:
        return str(error)
    engine.backward(engine(torch.ones(2, 4)).float().square().mean())
    return "applied" if engine.step().applied else "skipped"


def test_one_rank(tmp_path: Path) -> None:
    run_ranks(1, one_rank, str(tmp_path / "extensions"), timeout=280)


class Either(nn.Sequential):
    """Its layers run in the order that the caller gives."""

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for number in order:
            x = torch.tanh(self[number](x))
        return x.square().mean()


def require_loaded_weights(folder: str) -> None:
    """After further steps, and an evaluation, which leaves weights unsharded."""
    persistent, deepspeed_config.PERSISTENT = deepspeed_config.PERSISTENT, 0  # as for any model that is large enough
    engine, entry = start(zero_stage=3), make("mlp")
    deepspeed_config.PERSISTENT = persistent

    def evaluate() -> float:
        with engine.eval():
            return float(entry.loss(engine, entry.batch(9)))

    step(engine, "mlp", [0, 1])
    engine.save(folder)
    before = evaluate()
    for index in (2, 4):
        step(engine, "mlp", [index, index + 1])
    assert evaluate() != before
    engine.load(folder)
    assert evaluate() == before


def require_no_stale_gradients(stage: int, offload: str, precision: str) -> None:
    """Steps that use some parameters only in a later micro-batch, not at all, or not in the last; one ended early.

    None sees the gradients before it, or loses its own.
    """
    engine = start("sometimes_used", zero_stage=stage, offload=offload, precision=precision)
    entry = make("sometimes_used")
    step(engine, "sometimes_used", [0])
    for indices, taken in (([1, 0], 2), ([1], 1), ([0, 1], 2), ([0, 1, 0], 2), ([1, 0], 2)):
        model = entry.build(0)
        model.load_state_dict({name: master.clone() for name, master in engine.states.full_state("master")})
        for _, index in zip(range(taken), engine.accumulate(indices), strict=False):
            engine.backward(entry.loss(engine, entry.batch(index)))
            entry.loss(model, entry.batch(index)).backward()
        engine.finish_gradients()
        for name, got in engine.states.full_state("main_grad"):
            own = model.get_parameter(name).grad
            want = torch.zeros_like(got) if own is None else own * engine.world_size
            tolerance = 1e-5 if precision == "fp32" else 3e-2
            assert (got - want).norm() <= tolerance * want.norm(), (stage, offload, precision, indices, name)
        assert engine.step().applied


def ranks_that_differ(rank: int, world: int, folder: str) -> None:
    """If a rank sums its own micro-batches first, ranks may use different parameters; else their order must agree."""
    entry = make("sometimes_used")
    model = entry.build(0)
    sum(entry.loss(model, entry.batch(index)) for index in (0, 1, 2)).backward()  # type: ignore[union-attr]
    for stage, precision, tolerance in ((0, "fp32", 1e-6), (1, "fp32", 1e-6), (1, "bf16", 2e-2)):
        engine = start("sometimes_used", zero_stage=stage, precision=precision)
        for index in engine.accumulate([rank, rank + 2]):
            if index == 3:  # the last of rank 1: a dummy
                engine.backward(torch.zeros(()), weight=0.0)
            else:
                engine.backward(entry.loss(engine, entry.batch(index)))
        engine.finish_gradients()
        for name, got in engine.states.full_state("main_grad"):
            want = model.get_parameter(name).grad
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * float(want.abs().max()))
        assert engine.step().applied
    for stage, offload in ((1, "cpu"), (2, "none"), (3, "cpu")):
        require_no_stale_gradients(stage, offload, "fp32")
    for stage, offload in ((2, "cpu"), (3, "none")):
        require_no_stale_gradients(stage, offload, "bf16")
    require_loaded_weights(folder)
    # without the keys that make DeepSpeed reduce in FP32 it reduces in BF16 silently
    real, own = deepspeed_config.generate, ("communication_data_type", "data_types")
    deepspeed_config.generate = lambda request: {k: v for k, v in real(request).items() if k not in own}
    with pytest.raises(ContractError, match=r"torch.bfloat16; the contract says torch.float32"):
        step(start(zero_stage=2, precision="bf16"), "mlp", [0])
    # last, because its failure ends the connections
    engine = start(Either(nn.Linear(4, 4), nn.Linear(4, 4)), zero_stage=2)
    engine.backward(engine(torch.ones(2, 4), order=(rank, 1 - rank)))
    with pytest.raises(DivergenceError, match=r"of this step is backward\(4 gradients, their order"):
        engine.step()


def test_ranks_that_differ(tmp_path: Path) -> None:
    run_ranks(2, ranks_that_differ, str(tmp_path), timeout=280)


def load_for_cuda(rank: int, world: int) -> None:
    library.load(torch.device("cpu"))
    library.load(torch.device("cuda", 0))


def test_importing_for_another_device_is_refused() -> None:
    with pytest.raises(RankFailure, match="DeepSpeed was loaded for cpu, but this rank trains on cuda"):
        run_ranks(1, load_for_cuda)
