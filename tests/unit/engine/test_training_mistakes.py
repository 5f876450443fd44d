"""Mistakes that would train a wrong model silently; each is found at the next call."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dtrain
from dtrain.distributed.schedule import Collective, CollectiveSchedule
from dtrain.distributed.setup import connect
from dtrain.engine.native import NativeEngine
from dtrain.errors import CommunicationError, ConfigError, ContractError, ModelError, UsageError
from dtrain.precision.forward import set_matmul_precision


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x))


def engine_on(model: nn.Module, stage: int = 2) -> NativeEngine:
    engine = dtrain.initialize(model, zero_stage=stage, precision="fp32", seed=0)
    assert isinstance(engine, NativeEngine)
    return engine


def masters(engine: NativeEngine) -> Tensor:
    return torch.cat([buffer.master for buffer in engine.sharded.buffers])


def one_step(engine: NativeEngine) -> dtrain.StepOutcome:
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    return engine.step()


def test_two_forwards_of_one_micro_batch_draw_different_masks() -> None:
    engine = engine_on(Noisy())
    x = torch.ones(4, 8)
    first, second = engine(x), engine(x)
    assert not torch.equal(first == 0, second == 0), "two views of one sample must not share their dropout"
    other = engine_on(_same_weights(engine.module))
    assert torch.equal(first, other(x)), "the first forward draws the same in every run"
    assert torch.equal(second, other(x))


def _same_weights(model: nn.Module) -> nn.Module:
    copy = Noisy()
    copy.load_state_dict(model.state_dict())
    return copy


def test_a_loss_without_a_graph_is_refused() -> None:
    engine = engine_on(Noisy())
    loss = engine(torch.ones(2, 8)).square().mean()
    with pytest.raises(UsageError, match="the loss has no graph"):
        engine.backward(loss.detach())
    engine.backward(loss.detach(), weight=0)
    assert engine.step().reason == "empty"


def test_a_parameter_unfrozen_later_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    engine = engine_on(model)
    assert one_step(engine).applied
    model[0].requires_grad_(True)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    with pytest.raises(ContractError, match=r"'0\.weight' was frozen at dtrain.initialize and now requires a gradient"):
        engine.step()


def test_a_parameter_frozen_later_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    engine = engine_on(model)
    model[1].bias.requires_grad_(False)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    with pytest.raises(ContractError, match=r"'1\.bias' was frozen after dtrain.initialize"):
        engine.step()


def test_one_model_has_one_engine() -> None:
    model = nn.Linear(8, 8)
    engine_on(model)
    with pytest.raises(ModelError, match="under an engine already"):
        engine_on(model)


def test_a_model_that_was_refused_is_still_free() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data = model[0].weight.data
    for _ in range(2):
        with pytest.raises(ModelError, match="two parameters over one storage"):
            engine_on(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_ends_with_its_last_reference(stage: int) -> None:
    """A sweep builds one engine after the other in one process."""
    engine = engine_on(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), stage)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    held = [weakref.ref(thing) for thing in (engine, engine.sharded, engine.module)]
    del engine
    gc.collect()
    assert [reference() for reference in held] == [None] * 3


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_negative_and_nonfinite_weights_are_refused(weight: float, as_tensor: bool) -> None:
    engine = engine_on(nn.Linear(8, 8))
    before = masters(engine)

    def step() -> None:
        loss = engine(torch.ones(2, 8)).square().mean()
        engine.backward(loss, weight=torch.tensor(weight) if as_tensor else weight)
        engine.step()

    with pytest.raises(
        UsageError, match=r"the weight of micro-batch 0 (of step 0 on rank 0 )?is .*; expected a finite number >= 0"
    ):
        step()
    assert torch.equal(before, masters(engine))


def test_a_replica_replaced_is_noticed_before_the_update() -> None:
    engine = engine_on(nn.Linear(8, 8))
    before = masters(engine)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.module.weight.data = engine.module.weight.data.clone()  # type: ignore[union-attr]
    with pytest.raises(ContractError, match="no longer lies in its flat buffer"):
        engine.step()
    assert torch.equal(before, masters(engine))


def test_the_culprit_names_the_micro_batch_that_was_meant() -> None:
    engine = engine_on(nn.Linear(8, 8))
    for number in engine.accumulate(range(4)):
        if number == 1:
            continue  # left out by the caller: no backward
        loss = engine(torch.ones(2, 8)).square().mean()
        engine.backward(loss * (math.inf if number == 2 else 1.0))
    outcome = engine.step()
    assert outcome.culprit is not None
    assert outcome.culprit.micro_batch == 2


def test_parameters_that_overlap_in_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    both = torch.randn(12, 8)
    model[0].weight = nn.Parameter(both[:8])
    model[1].weight = nn.Parameter(both[4:], requires_grad=False)
    with pytest.raises(ModelError, match="two parameters over one storage"):
        engine_on(model)


# -- flags that must be reset ------------------------------------------------------------------------------------------


def test_a_stop_is_requested_once() -> None:
    engine = engine_on(nn.Linear(8, 8))
    engine.request_stop()
    assert one_step(engine).stop_requested
    assert not one_step(engine).stop_requested


def test_an_evaluation_inside_an_evaluation_does_not_end_it() -> None:
    engine = engine_on(Noisy())
    before = engine._current.num_forwards
    with engine.eval():
        with engine.eval():
            pass
        engine.module.train()
        engine(torch.ones(2, 8))
    assert engine._current.num_forwards == before, "a forward inside eval() takes no random numbers from the training"


def test_a_batch_abandoned_before_any_backward_has_no_effect() -> None:
    engine = engine_on(Noisy())
    other = engine_on(_same_weights(engine.module))
    for _ in engine.accumulate(range(3)):
        engine(torch.ones(2, 8))
        break
    outcomes = []
    for each in (engine, other):
        for _ in each.accumulate(range(2)):
            each.backward(each(torch.ones(2, 8)).square().mean())
        outcomes.append(each.step())
    assert outcomes[0] == outcomes[1], "the same numbering and the same random numbers as if it had not been"
    assert outcomes[0].applied


def test_a_batch_abandoned_after_a_backward_is_an_error() -> None:
    engine = engine_on(nn.Linear(8, 8))
    for _ in engine.accumulate(range(3)):
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        break
    with pytest.raises(UsageError, match=r"incomplete on this rank: .* build a new engine and load a checkpoint"):
        next(engine.accumulate(range(3)))


def test_the_end_of_an_old_batch_leaves_the_new_one_alone() -> None:
    engine = engine_on(nn.Linear(8, 8))
    old = engine.accumulate(range(3))
    next(old)
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    new = engine.accumulate(range(3))
    next(new)
    next(new)
    old.close()  # type: ignore[attr-defined]
    assert engine._micro_batch == 1


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["buffer", "frozen", "trainable"])
def test_an_expanded_tensor_is_refused(kind: str) -> None:
    model = nn.Linear(8, 8)
    expanded = torch.zeros(1).expand(8)
    if kind == "buffer":
        model.register_buffer("mask", expanded)
    else:
        model.mask = nn.Parameter(expanded, requires_grad=kind == "trainable")
    with pytest.raises(ModelError, match=r"'mask' is an expanded tensor .* \.contiguous\(\)"):
        engine_on(model)


class Slowing:
    def factor(self, step: int) -> float:
        return 1.0 / (step + 1)


@dataclass(frozen=True)
class Opaque:
    curve: object

    def factor(self, step: int) -> float:
        return 1.0


def test_a_schedule_that_ranks_cannot_compare_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the schedule is Slowing, .* make it a frozen dataclass"):
        dtrain.initialize(nn.Linear(8, 8), precision="fp32", schedule=Slowing())
    with pytest.raises(ConfigError, match="must be numbers, strings, or lists"):
        dtrain.initialize(nn.Linear(8, 8), precision="fp32", schedule=Opaque(curve=object()))


def test_frozen_float64_keeps_its_dtype() -> None:
    model = nn.Linear(8, 8)
    model.table = nn.Parameter(torch.full((3,), 0.1, dtype=torch.float64), requires_grad=False)
    engine = dtrain.initialize(model, precision="bf16", seed=0)
    assert model.table.dtype == torch.float64
    assert engine.contract.to_dict()["replicas"]["table"] == "float64"
    assert "1 frozen in float64" in engine.contract.describe()[-1]
    engine.check_contract()  # type: ignore[attr-defined]


def test_the_contract_describes_gradient_reduction() -> None:
    engine = dtrain.initialize(nn.Linear(8, 8), precision="bf16", seed=0)
    assert "gradients sent in bf16, summed in fp32" in engine.contract.describe()[0]


def test_fp32_is_fp32_in_convolutions_and_rnns() -> None:
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    try:
        torch.backends.fp32_precision = "tf32"
        for policy in (dtrain.PrecisionPolicy.named("tf32"), dtrain.PrecisionPolicy.named("fp32")):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                set_matmul_precision(policy)
            assert cudnn.allow_tf32 == policy.tf32
            assert (torch.get_float32_matmul_precision() == "high") == policy.tf32
            assert {cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision} == {"tf32" if policy.tf32 else "ieee"}
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = before


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_an_error_of_the_device_is_not_reported_as_a_dead_rank(error: type[RuntimeError]) -> None:
    waiting = CollectiveSchedule().waiting(0, Collective(1, "all_gather"))
    with pytest.raises(error), waiting:
        raise error("CUDA error: an illegal memory access was encountered")
    waiting = CollectiveSchedule().waiting(0, Collective(1, "all_gather"))
    with pytest.raises(CommunicationError, match="another rank has died"), waiting:
        raise RuntimeError("connection reset")


def test_a_process_group_without_a_backend_for_the_device_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match=r"backend gloo for cuda, .* init_process_group with backend='nccl'"):
            connect(torch.device("cuda", 0))
        assert connect(torch.device("cpu")).world_size == 1
    finally:
        dist.destroy_process_group()


class Breaks(nn.Module):
    """A backward that fails in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.broken = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x)
        if self.broken:
            hidden.register_hook(self._fail)
        return self.layers[1](hidden).square().mean()

    def _fail(self, grad: Tensor) -> None:
        raise RuntimeError("the graph broke")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("verb", ["step", "backward", "save", "load"])
def test_no_step_after_a_failed_backward(tmp_path: Path, verb: str, stage: int) -> None:
    model = Breaks()
    engine = dtrain.initialize(model, precision="fp32", zero_stage=stage)
    before = engine.master_state()
    with pytest.raises(RuntimeError, match="the graph broke"):
        engine.backward(engine(torch.ones(2, 8)))
    model.broken = False
    calls = {
        "step": engine.step,
        "backward": lambda: engine.backward(engine(torch.ones(2, 8))),
        "save": lambda: engine.save(tmp_path),
        "load": lambda: engine.load(tmp_path),
    }
    with pytest.raises(UsageError, match=f"engine.{verb} after an engine.backward that failed half-way"):
        calls[verb]()
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.master_state().items())
