"""The DeepSpeed engine: generated configuration, refusals, and workarounds for DeepSpeed's behavior."""

from __future__ import annotations

import itertools
import json
import os
from typing import Any

import pytest
import torch
from torch import nn

import dtrain
from dtrain.distributed.setup import disconnect
from dtrain.engine.deepspeed import config as deepspeed_config
from dtrain.engine.deepspeed.engine import DeepSpeedEngine
from dtrain.errors import ContractError, DivergenceError, ModelError, UsageError
from tests.helpers.ranks import RankFailure, run_ranks
from tests.helpers.zoo import make

pytestmark = pytest.mark.processes


def start(model: nn.Module | str = "mlp", **options: Any) -> DeepSpeedEngine:
    torch.set_num_threads(1)
    built = make(model).build(0) if isinstance(model, str) else model
    engine = dtrain.initialize(built, engine="deepspeed", **{"precision": "fp32", "seed": 0, **options})
    assert isinstance(engine, DeepSpeedEngine)
    return engine


def step(engine: DeepSpeedEngine, name: str, indices: list[int]) -> dtrain.StepOutcome:
    entry = make(name)
    for index in engine.accumulate(indices):
        engine.backward(entry.loss(engine, entry.batch(index)))
    return engine.step()


def one_rank(rank: int, world: int, extensions: str) -> dict[str, Any]:
    os.environ["TORCH_EXTENSIONS_DIR"] = extensions
    assert "DS_ACCELERATOR" not in os.environ
    found: dict[str, Any] = {"configs": []}
    for stage in range(4):
        for precision in ("fp32", "bf16"):
            for offload in ("none", "cpu") if stage else ("none",):
                engine = start(zero_stage=stage, precision=precision, offload=offload)
                parsed = engine._deepspeed._config
                found["configs"].append(
                    {
                        "given": engine.library_config,
                        "stage": engine._deepspeed.zero_optimization_stage(),
                        "dtypes": tuple(map(str, engine._deepspeed.get_data_types())),
                        "communication_data_type": str(engine._deepspeed.communication_data_type),
                        "clipping": parsed.gradient_clipping,
                        "micro_batches": parsed.gradient_accumulation_steps,
                        "formula": engine.memory_formula(),
                        "memory": engine.memory(),
                    }
                )
    found["compiled"] = os.listdir(extensions) if os.path.isdir(extensions) else []
    disconnect()  # as between the runs of a Hydra sweep
    found["again"] = [step(start(zero_stage=s, precision="bf16"), "mlp", [0]).applied for s in (0, 1, 2, 3)]
    scalar = nn.Module()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ModelError, match="'scale' has no dimensions") as error:
        start(scalar, zero_stage=3)
    found["scalar"] = str(error.value)
    engine = start(zero_stage=2)
    entry = make("mlp")
    for index in engine.accumulate([0, 1]):
        loss = entry.loss(engine, entry.batch(index))
        if index == 1:
            with pytest.raises(UsageError, match="a dummy loss without a graph with engine=deepspeed at zero_stage=2"):
                engine.backward(loss.detach(), weight=0.0)
            engine.backward(loss, weight=0.0)  # the fix
        else:
            engine.backward(loss)
    assert engine.step().applied
    found["compiled modules"] = {
        case: compiled(*case) for case in itertools.product(("norm", "linear"), (False, True), (0, 1, 2, 3))
    }
    assert "DS_ACCELERATOR" not in os.environ
    return found


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).float().square().mean()


def compiled(part: str, in_place: bool, stage: int) -> str:
    """The result of a BF16 step with one module compiled: "applied", or the error."""
    model = Norms()
    if in_place:
        getattr(model, part).compile(backend="eager")
    else:
        setattr(model, part, torch.compile(getattr(model, part), backend="eager"))
    try:
        engine = start(model, zero_stage=stage, precision="bf16")
    except ModelError as error:
        return str(error)
    engine.backward(engine(torch.ones(2, 4)))
    return "applied" if engine.step().applied else "skipped"


@pytest.fixture(scope="module")
def single_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(1, one_rank, str(tmp_path_factory.mktemp("x") / "extensions"), timeout=280)[0]
    return found


def test_deepspeed_follows_the_generated_configuration(single_rank: dict[str, Any]) -> None:
    assert len(single_rank["configs"]) == 2 + 3 * 4
    for case in single_rank["configs"]:
        given = case["given"]
        assert json.loads(json.dumps(given)) == given, "plain values only"
        assert case["stage"] == given["zero_optimization"]["stage"]
        weights = torch.bfloat16 if "bf16" in given else torch.float32
        assert case["dtypes"] == (str(weights), "torch.float32"), given
        assert case["communication_data_type"] == "torch.float32"
        assert (case["clipping"], case["micro_batches"]) == (0.0, 1)


def test_nothing_is_compiled_on_a_cpu(single_rank: dict[str, Any]) -> None:
    assert single_rank["compiled"] == []


def test_memory_follows_the_formula(single_rank: dict[str, Any]) -> None:
    for case in single_rank["configs"]:
        for kind in ("master", "moments", "compute"):
            # both weight-decay classes are padded to whole shards
            slack = 64 if case["formula"][kind] else 0
            assert 0 <= case["memory"][kind] - case["formula"][kind] <= slack, (kind, case)


def test_engines_start_again_after_their_process_group_has_ended(single_rank: dict[str, Any]) -> None:
    assert single_rank["again"] == [True] * 4


def test_compiled_modules_run_or_are_refused(single_rank: dict[str, Any]) -> None:
    for (part, in_place, stage), got in single_rank["compiled modules"].items():
        if stage == 3 and not in_place:
            assert f"'{part}' is a torch.compile wrapper" in got
        elif stage and part == "norm":
            assert "'norm' is compiled and 'norm" in got
        else:
            assert got == "applied", (part, in_place, stage)


def plain_defaults() -> str:
    """The keys that make DeepSpeed reduce in FP32 are left out: it then reduces in BF16 silently."""
    real = deepspeed_config.generate

    def generate(request: Any) -> dict[str, Any]:
        return {k: v for k, v in real(request).items() if k not in ("communication_data_type", "data_types")}

    deepspeed_config.generate = generate
    with pytest.raises(ContractError) as error:
        step(start(zero_stage=2, precision="bf16"), "mlp", [0])
    return str(error.value)


class Either(nn.Module):
    """Two layers of one size, used in the order that the caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, swapped: bool) -> torch.Tensor:
        for layer in (self.second, self.first) if swapped else (self.first, self.second):
            x = torch.tanh(layer(x))
        return x.square().mean()


def reloaded(folder: str) -> tuple[float, float]:
    """A loss before a save, and after further steps, an evaluation, which leaves weights unsharded, and a load."""
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
    return before, evaluate()


def ranks_that_differ(rank: int, world: int, folder: str) -> dict[str, Any]:
    """If a rank sums its own micro-batches first, ranks may use different parameters; else their order must agree."""
    found: dict[str, Any] = {}
    for stage, precision in ((0, "fp32"), (1, "fp32"), (1, "bf16")):
        engine = start("sometimes_used", zero_stage=stage, precision=precision)
        entry = make("sometimes_used")
        for index in engine.accumulate([rank, rank + 2]):
            if index == 3:  # the last of rank 1: a dummy
                engine.backward(torch.zeros(()), weight=0.0)
            else:
                engine.backward(entry.loss(engine, entry.batch(index)))
        engine.finish_gradients()
        grads = {name: (g / 3).clone() for name, g in engine.full_state("main_grad")}
        assert engine.step().applied
        found[f"{stage} {precision}"] = grads
    found["stale"] = [
        message
        for stage, offload in ((1, "cpu"), (2, "none"), (2, "cpu"), (3, "none"), (3, "cpu"))
        for precision in ("fp32", "bf16")
        for message in stale_gradients(zero_stage=stage, offload=offload, precision=precision)
    ]
    found["reloaded"] = reloaded(folder)
    found["reduce dtype"] = plain_defaults()
    engine = start(Either(), zero_stage=2)  # last, because its failure ends the connections
    engine.backward(engine(torch.ones(2, 4), swapped=rank == 1))
    with pytest.raises(DivergenceError) as error:
        engine.step()
    found["order"] = str(error.value)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, ranks_that_differ, str(tmp_path_factory.mktemp("checkpoints")), timeout=280)


def stale_gradients(**options: Any) -> list[str]:
    """Steps that use some parameters only in a later micro-batch, not at all, or not in the last; one ended early.

    None sees the gradients before it, or loses its own.
    """
    engine = start("sometimes_used", **options)
    entry, found = make("sometimes_used"), []
    step(engine, "sometimes_used", [0])
    for indices, taken in (([1, 0], 2), ([1], 1), ([0, 1], 2), ([0, 1, 0], 2), ([1, 0], 2)):
        model = entry.build(0)
        with torch.no_grad():
            for name, master in engine.full_state("master"):
                model.get_parameter(name).copy_(master)
        for _, index in zip(range(taken), engine.accumulate(indices), strict=False):
            engine.backward(entry.loss(engine, entry.batch(index)))
            entry.loss(model, entry.batch(index)).backward()
        engine.finish_gradients()
        for name, got in engine.full_state("main_grad"):
            own = model.get_parameter(name).grad
            want = torch.zeros_like(got) if own is None else own * engine.world_size
            if (got - want).norm() > (1e-5 if options["precision"] == "fp32" else 3e-2) * want.norm():
                found.append(f"{options} {indices}: {name}")
        assert engine.step().applied
    return found


def channels_last(rank: int, world: int) -> list[str]:
    """A convolution in that memory format, one of whose strides torch ignores, against the native engine."""
    found = []
    for stage in range(4):
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
        found += [f"{stage}: {key}" for key in want if (got[key] - want[key]).norm() > 1e-4 * want[key].norm()]
    return found


def test_weights_in_channels_last() -> None:
    assert run_ranks(1, channels_last)[0] == []


def test_weights_left_unsharded_are_not_used_after_a_load(two: list[dict[str, Any]]) -> None:
    for found in two:
        before, after = found["reloaded"]
        assert after == before


def test_reduction_in_another_dtype_is_an_error(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert "torch.bfloat16; the contract says torch.float32" in found["reduce dtype"]


def test_parameters_unused_by_some_ranks_or_steps(two: list[dict[str, Any]]) -> None:
    entry = make("sometimes_used")
    model = entry.build(0)
    sum(entry.loss(model, entry.batch(index)) for index in (0, 1, 2)).backward()  # type: ignore[union-attr]
    for found in two:
        for case, tolerance in (("0 fp32", 1e-6), ("1 fp32", 1e-6), ("1 bf16", 2e-2)):
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                want = parameter.grad / 3
                torch.testing.assert_close(
                    found[case][name], want, rtol=tolerance, atol=tolerance * float(want.abs().max())
                )
        assert not found["stale"]
        assert "of this step is backward(4 gradients, their order" in found["order"]


def test_importing_for_another_device_is_refused() -> None:
    with pytest.raises(RankFailure, match="DeepSpeed was loaded for cpu, but this rank trains on cuda"):
        run_ranks(1, load_for_cuda)


def load_for_cuda(rank: int, world: int) -> None:
    from dtrain.engine.deepspeed import library as deepspeed_library

    deepspeed_library.load(torch.device("cpu"))
    deepspeed_library.load(torch.device("cuda", 0))
