"""Wrong use of an engine on a single rank: every error is named, and none changes a weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.distributed.communicator import Communicator
from dtrain.errors import ConfigError, ContractError, ModelError, UsageError
from tests.helpers.one_rank import X, loss_of, masters, start, train_step, unchanged


@pytest.fixture
def engine() -> Any:
    return start()


# -- the order of calls ------------------------------------------------------------------------------------------------


def test_step_without_backward(engine: Any) -> None:
    with pytest.raises(UsageError, match=r"engine\.step without engine\.backward"):
        engine.step()
    assert engine.attempted_steps == 0
    train_step(engine)
    with pytest.raises(UsageError, match=r"engine\.step without engine\.backward"):
        engine.step()


def test_a_second_backward_on_one_micro_batch(engine: Any) -> None:
    engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match=r"for micro in engine\.accumulate\(batch\)"):
        engine.backward(loss_of(engine))
    assert engine.step().loss == pytest.approx(loss_of(start()).item()), "the first backward still counts"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_second_backward_after_a_micro_batch_that_was_left_out(stage: int) -> None:
    engine = start(zero_stage=stage)
    for micro in engine.accumulate(range(2)):
        if micro == 0:
            continue
        engine.backward(loss_of(engine))
        with pytest.raises(UsageError, match="a second engine"):
            engine.backward(loss_of(engine))


def test_backward_called_on_the_loss_itself(engine: Any) -> None:
    before = masters(engine)
    with pytest.raises(UsageError, match=r"call engine\.backward\(loss\) instead"):
        loss_of(engine).backward()
    assert all(p.grad is None for p in engine.module.parameters())
    assert unchanged(engine, before)
    assert train_step(engine).applied, "and the engine continues"


def test_accumulate_called_twice(engine: Any) -> None:
    for _ in engine.accumulate(range(2)):
        engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match="called again before"):
        list(engine.accumulate(range(2)))
    assert engine.step().applied
    for _ in engine.accumulate(range(2)):
        engine.backward(loss_of(engine))
    assert engine.step().applied


def test_an_empty_batch_is_named_and_the_next_one_is_taken(engine: Any) -> None:
    with pytest.raises(UsageError, match="empty batch"):
        list(engine.accumulate([]))
    for _ in engine.accumulate(iter([1])):
        engine.backward(loss_of(engine))
    assert engine.step().applied


def test_micro_batches_of_one_step_are_one_gradient() -> None:
    whole, parts = start(), start()
    train_step(whole)
    for x in parts.accumulate(X.unbind()):
        parts.backward(loss_of(parts, x[None]))
    assert parts.step().loss == pytest.approx(loss_of(start()).item())
    for name, tensor in masters(whole).items():
        torch.testing.assert_close(masters(parts)[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("verb", ["save", "load"])
def test_save_and_load_between_backward_and_step(engine: Any, verb: str, tmp_path: Path) -> None:
    engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match=f"engine.{verb} between backward and step; call it after engine.step"):
        getattr(engine, verb)(tmp_path)
    assert not list(tmp_path.iterdir())
    engine.step()
    assert engine.save(tmp_path).is_dir()


@pytest.mark.parametrize("lr", [math.nan, math.inf, -1.0])
def test_invalid_learning_rate_is_refused(engine: Any, lr: float) -> None:
    before = masters(engine)
    engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match="learning rate of step 0 is"):
        engine.step(lr=lr)
    assert unchanged(engine, before)
    assert engine.step(lr=0.5).lr == 0.5


# -- the loss ----------------------------------------------------------------------------------------------------------


def test_loss_that_is_not_fp32_is_refused_with_the_fix() -> None:
    engine = start(nn.Linear(4, 1), precision="bf16")
    loss = engine.module(X.bfloat16()).square().mean()
    assert loss.dtype == torch.bfloat16
    with pytest.raises(
        ContractError, match=r"the loss is torch\.bfloat16; .* F\.cross_entropy\(logits\.float\(\), tar"
    ):
        engine.backward(loss)
    assert train_step(engine).applied


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.ones(1), r"of shape \[1\]"),
        (torch.ones(2, 3), r"of shape \[2, 3\]"),
        (1.5, "a float"),
        (None, "a NoneType"),
        ((torch.tensor(1.0),), "a tuple"),
        ({"lost": torch.tensor(1.0)}, "a dict"),
    ],
)
def test_loss_that_is_no_scalar_is_refused(engine: Any, loss: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"expected a 0-dim loss tensor.*got one {message}"):
        engine.backward(loss)
    assert train_step(engine).applied


def test_a_loss_may_come_in_an_output(engine: Any) -> None:
    engine.backward({"loss": loss_of(engine), "logits": None})
    assert engine.step().loss == pytest.approx(loss_of(start()).item())


def test_loss_changed_in_place_after_backward_does_not_count(engine: Any) -> None:
    total = None
    for scale in engine.accumulate([1.0, 2.0]):
        loss = loss_of(engine) * scale
        engine.backward(loss)
        total = loss.detach() if total is None else total.add_(loss.detach())
    assert engine.step().loss == pytest.approx(1.5 * loss_of(start()).item())


# -- the model after initialize ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.half(),
        lambda model: model.double(),
        lambda model: model.to(torch.bfloat16),
        lambda model: setattr(model[2].weight, "data", model[2].weight.data.clone()),
    ],
    ids=["half", "double", "to", "data"],
)
def test_model_changed_after_initialize_is_an_error_at_the_next_step(change: Callable[[nn.Module], Any]) -> None:
    engine = start()
    train_step(engine)
    change(engine.module)
    engine.backward(engine.module(X.to(engine.module[0].weight.dtype)).float().square().mean())
    with pytest.raises(ContractError, match=r"no longer lies in its flat buffer .*do not call \.to\(\), \.half\(\)"):
        engine.step()


def test_no_op_changes_of_the_model_are_allowed(engine: Any) -> None:
    engine.module.float().to("cpu").train()
    assert train_step(engine).applied


# -- eval --------------------------------------------------------------------------------------------------------------


def test_eval_consumes_no_micro_batch_number() -> None:
    def masks(evaluate: bool) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        nn.init.ones_(model[0].weight)
        seen: list[Tensor] = []
        model[1].register_forward_hook(lambda module, args, out: seen.append(out.detach()) if module.training else None)
        engine = start(model, optimizer=dtrain.AdamW(lr=0.0, weight_decay=0.0))
        for _ in engine.accumulate(range(3)):
            if evaluate:
                with engine.eval():
                    assert not engine(X).requires_grad
            engine.backward(loss_of(engine, torch.ones(8, 4)))
        engine.step()
        return [mask != 0 for mask in seen]

    plain, evaluated = masks(False), masks(True)
    assert len(plain) == len(evaluated) == 3
    assert all(torch.equal(a, b) for a, b in zip(plain, evaluated, strict=True))
    assert not torch.equal(plain[0], plain[1])


def test_eval_restores_the_mode_of_every_module(engine: Any) -> None:
    engine.module[1].eval()  # as one does with a frozen norm
    with engine.eval():
        assert not any(module.training for module in engine.module.modules())
    assert [module.training for module in engine.module] == [True, False, True]
    engine.module.eval()
    with engine.eval():
        pass
    assert not engine.module.training


def test_eval_restores_the_mode_after_an_error(engine: Any) -> None:
    with pytest.raises(KeyError), engine.eval():
        raise KeyError
    assert engine.module.training
    assert torch.is_grad_enabled()


# -- what initialize refuses -------------------------------------------------------------------------------------------


def two_over_one_storage() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(2, 2, device="meta"), "'weight' is on the meta device"),
        (lambda: nn.LazyLinear(2), "'weight' is a lazy parameter"),
        (lambda: nn.Linear(2, 2).double(), "'weight' is torch.float64"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "nothing to train"),
        (nn.ReLU, "nothing to train"),
        (two_over_one_storage, r"'0\.weight' and '1\.weight' are two parameters over one storage"),
    ],
    ids=["meta", "lazy", "float64", "frozen", "empty", "storage"],
)
def test_models_that_cannot_be_trained_are_refused(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        start(model())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear, "model=the class torch.nn.modules.linear.Linear is not a torch.nn.Module; call it"),
        ({"weight": X}, "model=.* is not a torch.nn.Module$"),
        (lambda x: x, "model=a builtins.function is not a torch.nn.Module$"),
    ],
    ids=["class", "dict", "function"],
)
def test_a_model_that_is_no_module_is_refused(model: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        dtrain.initialize(model)


def test_a_model_of_another_engine_is_refused(engine: Any) -> None:
    with pytest.raises(ModelError, match="this model is under an engine already"):
        start(engine.module)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float8_e4m3fn, "fp8")],
)
def test_a_torch_dtype_is_a_precision(dtype: torch.dtype, name: str) -> None:
    assert dtrain.PrecisionPolicy.of(dtype) == dtrain.PrecisionPolicy.named(name)
    assert start(precision=dtype).policy.name == name


def test_a_record_and_its_shorthand_are_the_same() -> None:
    record = start(engine=dtrain.Native(zero_stage=3, prefetch=2, sharding_units=["0", "2"], keep_gathered=("2",)))
    shorthand = start(zero_stage=3, prefetch=2, sharding_units=("0", "2"), keep_gathered=["2"])
    assert record.options == shorthand.options
    assert record._config_hash == shorthand._config_hash
    assert train_step(record) == train_step(shorthand)
    assert start(engine=dtrain.Native(zero_stage=1), zero_stage=1).options.zero_stage == 1, "no contradiction"


TORCH_SCHEDULE = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([nn.Parameter(X)]), lambda step: 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf61"}, "precision=bf61 is not one of .*; did you mean 'bf16'"),
        ({"precision": "tf32"}, "needs an NVIDIA GPU"),
        ({"precision": torch.float64}, "precision=torch.float64 is not one of torch.float32, torch.bfloat16, torch.fl"),
        ({"precision": torch.int8}, "precision=torch.int8 is not one of"),
        ({"precision": 16}, "precision=16 is not a name such as bf16, a torch dtype, or a dtrain.PrecisionPolicy"),
        ({"precision": "mxfp8"}, "precision=mxfp8: .* use fp8"),
        ({"engine": "nativ"}, "engine 'nativ' is not one of .*; did you mean 'native'"),
        ({"engine": dtrain.Native}, "engine=the class dtrain.config.engines.Native is not one of native, .* or a rec"),
        (
            {"engine": None},
            "engine=null is not one of native, fsdp2, deepspeed, ddp, or a record such as dtr",
        ),
        ({"zero_stage": 7}, "^zero_stage=7 is too large; it must be at most 3"),
        ({"zero_stage": "2"}, "^zero_stage='2' is not a whole number"),
        ({"zero_stage": True}, "^zero_stage=true is not a whole number"),
        (
            {"engine": dtrain.Native(zero_stage=3), "zero_stage": 2},
            r"^zero_stage=2 beside engine=Native\(zero_stage=3",
        ),
        (
            {"engine": "ddp", "zero_stage": 1},
            "cannot do zero_stage=1: every rank holds .* use zero_stage=0, or ",
        ),
        ({"engine": "ddp", "prefetch": 2}, "engine=ddp has no prefetch; it is a setting of engine=native"),
        ({"engine": "ddp", "optimizer": dtrain.AdamW(compile=True)}, "engine=ddp cannot do optimizer.compile=true"),
        ({"optimiser": dtrain.AdamW()}, "dtrain.initialize has no argument optimiser; did you mean 'optimizer'"),
        (
            {"optimizer": torch.optim.SGD},
            "optimizer=the class torch.optim.* is not an optimizer of dtrain .*AdamW\\(lr=3e-4",
        ),
        ({"optimizer": torch.optim.SGD([nn.Parameter(X)])}, "optimizer=a torch.optim.* is not an optimizer of dtrain"),
        ({"ema_decay": 1}, "^ema_decay=1.0 keeps the first weights; it must be below 1"),
        ({"optimizer": dtrain.AdamW}, "optimizer=the class dtrain.config.optim.AdamW is not an optimizer"),
        ({"schedule": lambda step: 1.0}, r"schedule is a function; write schedule=dtrain.Schedule\(function\), if"),
        ({"schedule": 0.5}, r"schedule=0.5 is not a schedule of dtrain, such as .* or dtrain.Schedule\(lambda step"),
        (
            {"schedule": TORCH_SCHEDULE},
            r"schedule=a torch.optim.lr_scheduler.LambdaLR is a scheduler of torch, .*; write "
            r"schedule=dtrain.TorchSchedule\(torch.optim.lr_scheduler.LambdaLR, ...\)",
        ),
        (
            {"schedule": torch.optim.lr_scheduler.OneCycleLR},
            r"schedule=the class .* write schedule=dtrain.TorchSchedule\(torch.optim.lr_scheduler.OneCycleLR, ...\)",
        ),
        (
            {
                "schedule": dtrain.TorchSchedule(torch.optim.lr_scheduler.ConstantLR),
                "optimizer": dtrain.AdamW(lr=0.0),
            },
            "TorchSchedule needs an optimizer with lr above 0, and got lr=0",
        ),
        (
            {"optimizer": dtrain.AdamW(groups={"*": {"schedule": dtrain.Cosine()}})},
            "Cosine.total_steps is null; give the number of steps",
        ),
        ({"optimizer": dtrain.TorchOptimizer(torch.optim.LBFGS)}, "cannot take LBFGS: its step needs a closure"),
        ({"schedule": dtrain.Cosine}, "schedule=the class .*Cosine is not a schedule of dtrain"),
        ({"schedule": dtrain.Cosine(5)}, "Cosine.total_steps is null; give the number of steps"),
        ({"loss_scale": "dynamc"}, "loss_scale=dynamc is not one of .*; did you mean 'dynamic'"),
        ({"loss_scale": 0.0}, "loss_scale=0.0 is too small; it must be above 0"),
        ({"loss_scale": torch.amp.GradScaler("cpu")}, "loss_scale=a torch.amp.* is not a mode .* needs no GradScaler"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0 is too small; it must be above 0"),
        ({"max_grad_norm": -1}, "max_grad_norm=-1.0 is too small; it must be above 0"),
        ({"max_grad_norm": "1"}, "max_grad_norm='1' is not a number or null"),
        ({"max_grad_norm": math.nan}, "max_grad_norm=nan is not a finite number"),
        ({"seed": "x"}, "seed='x' is not a whole number"),
        ({"seed": -1}, "seed=-1 is too small; it must be at least 0"),
        ({"seed": 2**64}, "seed=18446744073709551616 is too large; it must be below 2"),
        ({"comm": "gloo"}, "comm=gloo is not a dtrain communicator; omit it"),
        ({"comm": Communicator}, "comm=the class .*Communicator is not a dtrain communicator"),
        (
            {"prefetch": 2},
            "^prefetch=2 is used with zero_stage=3 only, and zero_stage=2; remove it, or ",
        ),
        ({"prefetch": -1, "zero_stage": 3}, "^prefetch=-1 is too small; it must be at least 0"),
        ({"keep_gathered": "0", "zero_stage": 3}, "^keep_gathered='0' is not a list"),
        ({"keep_gathered": ["1.wieght"], "zero_stage": 3}, "matches no parameter .*; did you mean '1.weight'"),
        (
            {"engine": "deepspeed", "offload": "cpu", "zero_stage": 0},
            "^offload=cpu with zero_stage=0: DeepSpeed offloads",
        ),
        ({"offload": "cpu", "precision": "fp8"}, "^offload=cpu with precision=fp8: scales"),
        ({"engine": "ddp", "offload": "cpu"}, "engine=ddp has no offload; .* engine=native and deepspeed"),
        ({"sharding_units": ["block.*"]}, "sharding_units pattern 'block.*' matches no module"),
        (
            {"sharding_units": [{"params": []}]},
            r"^sharding_units=\[\{params: \[\]\}\] is not auto or a list of name patt",
        ),
        ({"sharding_units": None}, "^sharding_units=null is not auto or a list of name patterns of modules"),
        ({"groups": {"0": {"lr_factor": 0.1}}}, r"^groups belong to the optimizer: .*AdamW\(groups=.* sharding_units"),
        (
            {"optimizer": dtrain.AdamW(groups={"0": {"schedule": "cosine"}})},
            r"^AdamW\.groups, '0': schedule=cosine is not a schedule of dtrain",
        ),
        ({"ema_decya": 0.9}, "no argument ema_decya; did you mean 'ema_decay'"),
        ({"reproducible": 1}, "^reproducible=1 is not true or false"),
        ({"reduce_dtype": torch.bfloat16}, "^reduce_dtype=torch.bfloat16 is not one of auto, fp32, bf16, fp16"),
        ({"max_consecutive_skips": 0}, "^max_consecutive_skips=0 is too small"),
        ({"grad_reduction": "mean"}, "dtrain.initialize has no argument grad_reduction"),
    ],
)
def test_unsupported_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(**options)


def test_batch_norm_cannot_be_reproducible() -> None:
    with pytest.raises(ConfigError, match=r"cannot hold with '1' \(BatchNorm1d\).*use GroupNorm or LayerNorm"):
        start(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), reproducible=True)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_torch_default_dtype_has_no_effect(dtype: torch.dtype, stage: int) -> None:
    want = start(zero_stage=stage)
    outcome = train_step(want)
    engine = start(zero_stage=stage)
    torch.set_default_dtype(dtype)
    try:
        assert train_step(engine) == outcome
    finally:
        torch.set_default_dtype(torch.float32)
    assert unchanged(engine, masters(want))
