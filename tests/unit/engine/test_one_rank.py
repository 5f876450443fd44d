"""What a model under an engine may and may not be changed in, and small promises of an engine on one rank."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.distributed.progress import RECORD_BYTES, Phase, ProgressRecord
from dtrain.distributed.schedule import Collective, CollectiveSchedule
from dtrain.errors import CommunicationError, ContractError
from dtrain.precision.forward import set_matmul_precision
from tests.helpers.one_rank import X, build, loss_of, masters, start, train_step, unchanged


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.half(), r"no longer lies in its flat buffer .*do not call \.to\(\), \.half\(\)"),
        (lambda model: setattr(model[2].weight, "data", model[2].weight.data.clone()), "no longer lies in its flat"),
        (lambda model: model[0].bias.requires_grad_(False), r"'0\.bias' was frozen after dtrain.initialize"),
        (lambda model: model[1].requires_grad_(True), r"'1\.weight' was frozen at dtrain.initialize and now requires"),
    ],
)
def test_a_change_of_the_model_is_an_error_at_the_next_step(change: Callable[[nn.Module], Any], message: str) -> None:
    model = build()
    model[1].requires_grad_(False)
    engine = start(model)
    model.float().to("cpu").train()  # changes nothing
    train_step(engine)
    before = masters(engine)
    change(model)
    engine.backward(model(X.to(model[0].weight.dtype)).float().square().mean())
    with pytest.raises(ContractError, match=message):
        engine.step()
    assert unchanged(engine, before)


def test_a_loss_may_come_in_an_output_and_be_changed_after_its_backward() -> None:
    engine, total = start(), None
    for scale in engine.accumulate([1.0, 2.0]):
        loss = loss_of(engine) * scale
        engine.backward({"loss": loss, "logits": None})
        total = loss.detach() if total is None else total.add_(loss.detach())
    assert engine.step().loss == pytest.approx(1.5 * loss_of(start()).item())


class WithoutWeight(torch.autograd.Function):
    """Gives None as the gradient of a weight, as functions do that freeze an input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x + weight.sum() * 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Unused(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return WithoutWeight.apply(x * self.bias, self.weight)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_none_as_a_gradient_is_zero(micro_batches: int) -> None:
    engine = start(Unused(4, 4), optimizer=dtrain.AdamW(lr=0.1, weight_decay=0.0))
    before = masters(engine)
    for _ in range(2):
        for _ in engine.accumulate(range(micro_batches)):
            engine.backward(loss_of(engine))
        assert engine.step().applied
    assert [torch.equal(masters(engine)[name], before[name]) for name in ("weight", "bias")] == [True, False]


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_ends_with_its_last_reference(stage: int) -> None:
    engine = start(zero_stage=stage)
    train_step(engine)
    held = [weakref.ref(thing) for thing in (engine, engine.sharded, engine.module)]
    del engine
    gc.collect()
    assert [reference() for reference in held] == [None] * 3


def test_eval_restores_the_mode_of_every_module_and_may_be_nested() -> None:
    engine = start()
    engine.module[1].eval()  # as one does with a frozen norm
    modes: list[bool] = []
    engine.module[2].register_forward_hook(lambda *_: modes.extend(module.training for module in engine.module))
    with engine.eval():
        engine(X)
    with pytest.raises(RuntimeError), engine.eval():
        engine(X.T)
    assert modes == [False] * 3
    assert [module.training for module in (engine.module, *engine.module)] == [True, True, False, True]
    assert torch.is_grad_enabled()
    before = engine._batch.current.num_forwards
    with engine.eval():
        with engine.eval():
            pass
        engine.module.train()
        engine(X)
    assert engine._batch.current.num_forwards == before, (
        "a forward inside eval() takes no random numbers from the training"
    )


def test_a_record_and_its_shorthand_are_the_same() -> None:
    record = start(engine=dtrain.Native(zero_stage=3, prefetch=2, sharding_units=["0", "2"], keep_gathered=("2",)))
    shorthand = start(zero_stage=3, prefetch=2, sharding_units=("0", "2"), keep_gathered=["2"])
    assert record.options == shorthand.options
    assert record._ballot._config_hash == shorthand._ballot._config_hash
    assert train_step(record) == train_step(shorthand)
    assert start(engine=dtrain.Native(zero_stage=1), zero_stage=1).options.zero_stage == 1, "no contradiction"


def test_torch_default_dtype_has_no_effect() -> None:
    want, engine = start(), start()
    outcome = train_step(want)
    torch.set_default_dtype(torch.float64)
    try:
        assert train_step(engine) == outcome
    finally:
        torch.set_default_dtype(torch.float32)
    assert unchanged(engine, masters(want))


def sgd(engine: str = "native", **options: Any) -> Any:
    return start(engine=engine, optimizer=dtrain.SGD(0.1, momentum=0.0), **{"max_grad_norm": None, **options})


def stepped(engine: Any, **arguments: Any) -> tuple[dict[str, Tensor], float]:
    engine.backward(loss_of(engine))
    norm = engine.step(**arguments).grad_norm
    return masters(engine), norm


@pytest.mark.parametrize("engine", ["native", "ddp"])
def test_the_clipping_threshold_of_a_step_is_that_of_a_run_with_it(engine: str) -> None:
    limited, unlimited = sgd(engine, max_grad_norm=0.05), sgd(engine)
    (clipped, norm), (free, _) = stepped(limited), stepped(unlimited)
    assert norm > 0.05
    assert not unchanged(limited, free)
    for default, given, want in ((None, 0.05, clipped), (3.0, 0.05, clipped), (0.05, math.inf, free)):
        own = sgd(engine, max_grad_norm=default)
        assert stepped(own, max_grad_norm=given)[1] == norm
        assert unchanged(own, want)
    stepped(unlimited, max_grad_norm=0.05)
    stepped(own)
    assert unchanged(own, masters(unlimited)), "it holds for one step"


def test_a_factor_adds_the_gradients_of_micro_batches() -> None:
    model, shifts = build(), (0.0, 1.0, 2.0)
    for shift in shifts:
        (model(X) - shift).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    engine = sgd()
    for shift in engine.accumulate(shifts):
        engine.backward((engine(X) - shift).square().mean())
    assert engine.step(max_grad_norm=0.5, grad_factor=3.0).grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for name, value in masters(engine).items():
        torch.testing.assert_close(value, model.get_parameter(name).detach())


def test_a_stop_is_requested_once() -> None:
    engine = start()
    engine.request_stop()
    assert [train_step(engine).stop_requested for _ in range(2)] == [True, False]


def test_frozen_float64_keeps_its_dtype_and_a_torch_dtype_is_a_precision() -> None:
    model = nn.Linear(8, 8)
    model.table = nn.Parameter(torch.full((3,), 0.1, dtype=torch.float64), requires_grad=False)
    engine = start(model, precision=torch.bfloat16)
    for dtype, name in ((torch.float32, "fp32"), (torch.float16, "fp16"), (torch.float8_e4m3fn, "fp8")):
        assert dtrain.PrecisionPolicy.of(dtype) == dtrain.PrecisionPolicy.named(name)
    assert engine.policy == start(precision="bf16").policy
    assert model.table.dtype == torch.float64
    assert engine.contract.to_dict()["replicas"]["table"] == "float64"
    assert "1 frozen in float64" in engine.contract.describe()[-1]
    assert "gradients sent in bf16, summed in fp32" in engine.contract.describe()[0]
    engine.check_contract()


def test_fp32_is_fp32_in_convolutions_and_rnns() -> None:
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    try:
        torch.backends.fp32_precision = "tf32"
        for policy in (dtrain.PrecisionPolicy.named("tf32"), dtrain.PrecisionPolicy.named("fp32")):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                set_matmul_precision(policy)
            assert torch.get_float32_matmul_precision() == ("high" if policy.tf32 else "highest")
            assert cudnn.allow_tf32 == policy.tf32
            assert {cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision} == {"tf32" if policy.tf32 else "ieee"}
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = before


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_an_error_of_the_device_is_not_reported_as_a_dead_rank(error: type[RuntimeError]) -> None:
    for raised, expected in ((error("an illegal memory access"), error), (RuntimeError("reset"), CommunicationError)):
        with pytest.raises(expected), CollectiveSchedule().waiting(0, Collective(1, "all_gather")):
            raise raised


def test_an_engine_records_its_step_and_phase(tmp_path: Path) -> None:
    engine = start()
    memory = memoryview(bytearray(RECORD_BYTES))
    engine.comm.schedule.progress.move_to(memory)
    seen: list[tuple[int, Phase]] = []

    def look(*_: Any) -> None:
        record = ProgressRecord.read(memory)
        seen.append((record.step, record.phase))

    engine.module.register_forward_hook(look)
    next(engine.module.parameters()).register_hook(look)
    look()
    for _ in range(2):
        engine.backward(loss_of(engine))
        look()
        engine.step()
        look()
    with engine.eval():
        engine(X)
    engine.save(tmp_path)
    look()
    expected = [(0, Phase.START)]
    for step in range(2):
        expected += [(step, Phase.FORWARD), (step, Phase.BACKWARD), (step, Phase.DATA), (step + 1, Phase.DATA)]
    assert seen == [*expected, (2, Phase.EVALUATION), (2, Phase.DATA)]
    assert all(
        engine.comm.schedule.progress.busy_s[phase] > 0 for phase in (Phase.UPDATE, Phase.EVALUATION, Phase.SAVE)
    )
