"""Wrong arguments of an engine's methods and of ``initialize``: each is named, and none changes a weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtrain
from dtrain.distributed.startup.setup import connect
from dtrain.errors import CheckpointError, ConfigError, ContractError, ModelError, UsageError
from tests.helpers.net import Net
from tests.helpers.one_rank import X, loss_of, masters, start, train_step, unchanged

Call = Callable[[Any], Any]
LAST = r"engine\.micro_batch\(last=.*\): expected True or False"
WEIGHT = r"the weight of micro-batch 0 is .*; expected .* such as its token count"
LOSS = "expected a 0-dim loss tensor.*got one "


def weight(value: Any) -> Call:
    return lambda engine: engine.backward(loss_of(engine), weight=value)


CALLS: list[tuple[Call, str]] = [
    *((lambda e, last=last: e.micro_batch(last=last).__enter__(), LAST) for last in (1, torch.tensor(True))),
    *(
        (lambda e, items=items: e.accumulate(items), rf"accumulate got a {type(items).__name__}; expected a list")
        for items in (5, torch.tensor(1.0), {"tokens": X}, "batch")
    ),
    *((weight(value), WEIGHT) for value in ("1", None, torch.ones(2), torch.tensor(1j))),
    *((weight(value), "expected a finite number >= 0") for value in (-1.0, math.nan, math.inf)),
    (lambda engine: engine.backward(torch.ones(2, 3)), LOSS + r"of shape \[2, 3\]"),
    (lambda engine: engine.backward(1.5), LOSS + "a float"),
    (lambda engine: engine.backward({"lost": torch.tensor(1.0)}), LOSS + "a dict"),
    *((lambda e, path=path: e.save(path), r"engine\.save\(.*\): expected a directory") for path in (None, b"run")),
    (lambda engine: engine.load(["run"]), r"engine\.load\(.*\): expected a directory as a string or a Path"),
    (lambda engine: engine.save("nowhere", extra=5), r"engine\.save\(extra=5\): expected a mapping"),
    (lambda engine: engine.save("nowhere", metrics=[1.0]), r"engine\.save\(metrics=.*\): expected a mapping"),
    (lambda engine: engine.save("nowhere", retention=3), r"expected a dtrain\.checkpoint\.Retention"),
    (lambda engine: engine.save("nowhere", asynchronous=1), r"engine\.save\(asynchronous=1\): expected True or False"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_a_wrong_argument_of_a_method(call: Call, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    engine, other = start(), start()
    with pytest.raises(UsageError, match=message):
        call(engine)
    assert not list(tmp_path.iterdir())
    assert train_step(engine) == train_step(other)
    assert unchanged(engine, masters(other))


@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        ("lr", ["0.1", True, [1.0], 1j, torch.ones(2), math.nan, math.inf, -1.0], "the learning rate of step 0 is"),
        ("max_grad_norm", [0, -1.0, math.nan, "1", True], r"engine\.step\(max_grad_norm=.*\): expected a"),
        ("grad_factor", [0, -1.0, math.nan, math.inf, "1", True], r"engine\.step\(grad_factor=.*\): expected a"),
    ],
)
def test_a_wrong_argument_of_step(option: str, values: list[Any], message: str) -> None:
    engine = start()
    before = masters(engine)
    engine.backward(loss_of(engine))
    for value in values:
        with pytest.raises(UsageError, match=message):
            engine.step(**{option: value})
    assert unchanged(engine, before)
    assert engine.step(lr=torch.tensor(0.5)).lr == 0.5


def test_metrics_of_a_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"val_loss.*expected a number or None"):
        start().save(tmp_path, metrics={"val_loss": "x"})
    assert start().save(tmp_path, metrics={"val_loss": torch.tensor(1.0), "train_loss": None}).is_dir()


def test_loss_that_is_not_fp32_is_refused_with_the_fix() -> None:
    engine = start(nn.Linear(4, 1), precision="bf16")
    value = engine.module(X.bfloat16()).square().mean()
    with pytest.raises(ContractError, match=r"the loss is torch\.bfloat16; .* F\.cross_entropy\(logits\.float\(\),"):
        engine.backward(value)
    assert train_step(engine).applied


def sparse_parameter() -> nn.Module:
    model = nn.Linear(2, 2)
    model.w = nn.Parameter(torch.eye(3).to_sparse())
    return model


def sparse_buffer() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", torch.eye(3).to_sparse_csr())
    return model


def overlapping() -> nn.Module:
    both = torch.randn(12, 8)
    return nn.ParameterList([nn.Parameter(both[:8]), nn.Parameter(both[4:], requires_grad=False)])


def tied_by_data(take: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = nn.ModuleDict({"a": nn.Embedding(8, 4), "b": nn.Linear(4, 8, bias=False)})
        model["b"].weight.data = take(model["a"].weight.data)
        return model

    return make


def expanded(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model, tensor = nn.Linear(8, 8), torch.zeros(1).expand(8)
        if kind == "buffer":
            model.register_buffer("mask", tensor)
        else:
            model.mask = nn.Parameter(tensor, requires_grad=kind == "trainable")
        return model

    return make


EXPANDED = r"'mask' is an expanded tensor .* \.contiguous\(\)"
MODELS: list[tuple[Callable[[], Any], str]] = [
    (lambda: nn.Linear(2, 2, device="meta"), "'weight' is on the meta device"),
    (lambda: nn.LazyLinear(2), "'weight' is a lazy parameter"),
    *((lambda d=d: nn.Linear(2, 2, dtype=d), f"'weight' is {d}; an FP32") for d in (torch.float64, torch.complex64)),
    (lambda: nn.Linear(2, 2).requires_grad_(False), "no parameter that requires a gradient; nothing to train"),
    (nn.ReLU, "nothing to train"),
    (overlapping, "two parameters over one storage"),
    *(
        (tied_by_data(take), r"'a\.weight' and 'b\.weight' are two parameters over one storage; tie them by assigning")
        for take in (lambda data: data, lambda data: data[2:6], lambda data: data.T, lambda data: data.view(-1)[28:])
    ),
    (lambda: nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1)), r"'0\.weight' gets a sparse gradient"),
    (lambda: nn.ModuleDict({"bag": nn.EmbeddingBag(8, 4, sparse=True)}), r"'bag\.weight' gets .* set sparse=False"),
    (lambda: nn.Embedding(8, 4, sparse=True), "'weight' gets a sparse gradient"),
    (sparse_parameter, r"'w' has the layout torch\.sparse_coo"),
    (sparse_buffer, r"'adjacency' has the layout torch\.sparse_csr; .*to_dense"),
    *((expanded(kind), EXPANDED) for kind in ("buffer", "frozen", "trainable")),
    (lambda: nn.Linear, "model=the class torch.nn.modules.linear.Linear is not a torch.nn.Module; call it"),
    (lambda: {"weight": X}, "model=.* is not a torch.nn.Module$"),
    (lambda: start().module, "this model is under an engine already"),
]


@pytest.mark.parametrize(("make", "message"), MODELS)
def test_models_that_cannot_be_trained_are_refused(make: Callable[[], Any], message: str) -> None:
    model = make()
    for engine in ("native", "fsdp2", "deepspeed", "ddp"):  # a model that was refused is under no engine
        with pytest.raises(ModelError, match=message):
            dtrain.initialize(model, engine=engine, precision="fp32")


class Slowing:
    def factor(self, step: int) -> float:
        return 1.0 / (step + 1)


@dataclass(frozen=True)
class Opaque:
    curve: object

    def factor(self, step: int) -> float:
        return 1.0


schedulers = torch.optim.lr_scheduler
CONSTANT = dtrain.TorchSchedule(schedulers.ConstantLR)
BY_NAME = dtrain.AdamW(groups={"0": {"schedule": "cosine"}})
TORCH_SCHEDULE = schedulers.LambdaLR(torch.optim.SGD([nn.Parameter(X)]), lambda step: 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": torch.float64}, "precision=torch.float64 is not one of torch.float32, torch.bfloat16, torch.fl"),
        ({"precision": 16}, "precision=16 is not a name such as bf16, a torch dtype, or a dtrain.PrecisionPolicy"),
        ({"engine": dtrain.Native}, "engine=the class dtrain.config.engines.Native is not one of native, .* or a rec"),
        ({"zero_stage": True}, "^zero_stage=true is not a whole number"),
        ({"engine": dtrain.Native(zero_stage=3), "zero_stage": 2}, r"^zero_stage=2 beside engine=Native\(zero_stage=3"),
        ({"engine": "ddp", "zero_stage": 1}, "cannot do zero_stage=1: every rank holds .* use zero_stage=0, or "),
        ({"engine": "ddp", "prefetch": 2}, "engine=ddp has no prefetch; it is a setting of engine=native"),
        ({"optimiser": dtrain.AdamW()}, "dtrain.initialize has no argument optimiser; did you mean 'optimizer'"),
        ({"optimizer": torch.optim.SGD}, r"=the class torch.optim.* is not an optimizer of dtrain .*AdamW\(lr=3e-4"),
        ({"schedule": lambda step: 1.0}, r"schedule is a function; write schedule=dtrain.Schedule\(function\), if"),
        ({"schedule": TORCH_SCHEDULE}, r"of torch, .*; write schedule=dtrain.TorchSchedule\(.*\.LambdaLR, ...\)"),
        ({"schedule": Slowing()}, "the schedule is Slowing, .* make it a frozen dataclass"),
        ({"schedule": Opaque(curve=object())}, "must be numbers, strings, or lists"),
        ({"schedule": CONSTANT, "optimizer": dtrain.AdamW(lr=0.0)}, "TorchSchedule needs an optimizer with lr above 0"),
        ({"optimizer": BY_NAME}, r"^AdamW\.groups, '0': schedule=cosine is not a schedule of dtrain"),
        ({"groups": {"0": {"lr_factor": 0.1}}}, r"^groups belong to the optimizer: .*AdamW\(groups=.* sharding_units"),
        ({"loss_scale": torch.amp.GradScaler("cpu")}, "loss_scale=a torch.amp.* is not a mode .* needs no GradScaler"),
        *(
            ({"max_grad_norm": value}, rf"^max_grad_norm={text}.*; None clips nothing$")
            for value, text in (("1", "'1' is not a number"), (0, "0.0 is too small; it must be above 0"), (-1, "-1.0"))
        ),
        ({"max_grad_norm": math.nan}, "^max_grad_norm=nan is not a finite number; None clips nothing$"),
        ({"seed": 2**64}, "seed=18446744073709551616 is too large; it must be below 2"),
        ({"engine": "nativ"}, "engine 'nativ' is not one of .*; did you mean 'native'"),
        ({"seed": -1}, "seed=-1 is too small; it must be at least 0"),
        ({"comm": "gloo"}, "comm=gloo is not a dtrain communicator; omit it"),
        ({"engine": "ddp", "offload": "cpu"}, "engine=ddp has no offload; .* engine=native and deepspeed"),
        ({"reproducible": 1}, "^reproducible=1 is not true or false"),
        ({"reduce_dtype": torch.bfloat16}, "^reduce_dtype=torch.bfloat16 is not one of auto, fp32, bf16, fp16"),
    ],
)  # fmt: skip
def test_unsupported_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(**options)


def looked_up(weight: nn.Parameter) -> torch.Tensor:
    return nn.functional.embedding(torch.arange(4), weight, sparse=True)


def gathered(weight: nn.Parameter) -> torch.Tensor:
    return torch.gather(weight, 1, torch.zeros(8, 2, dtype=torch.long), sparse_grad=True)


def pooled(weight: nn.Parameter) -> torch.Tensor:
    return nn.functional.embedding_bag(torch.zeros(2, 3, dtype=torch.long), weight, sparse=True, mode="sum")


@pytest.mark.parametrize("use", [looked_up, gathered, pooled])
@pytest.mark.parametrize("engine", ["native", "fsdp2", "ddp", "deepspeed"])
def test_a_sparse_gradient_is_refused_at_the_first_step(engine: str, use: Callable[[Any], torch.Tensor]) -> None:
    model = Net(lambda net, scale: scale * use(net.w).square().mean(), w=nn.Parameter(torch.ones(8, 4)))
    own = dtrain.initialize(model, engine=engine, precision="fp32", seed=0)

    def step() -> None:
        own.backward(own(2.0))
        own.step()

    with pytest.raises(ModelError, match=r"gets a sparse gradient \(the backward gives it one.*set sparse=False"):
        step()
    assert torch.equal(own.master_state()["w"], torch.ones(8, 4))


def test_an_error_that_only_speaks_of_sparse_is_raised_as_it_is() -> None:
    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("block_sparse_attention: no kernel image is available")

    own = start()
    own.module[0].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="no kernel image"):
        own.backward(loss_of(own))


def test_a_frozen_sparse_embedding_is_trained_around() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True).requires_grad_(False), nn.Linear(4, 1))
    own = dtrain.initialize(model, precision="fp32", seed=0)
    own.backward(own(torch.arange(4)).mean())
    assert own.step().applied


def test_batch_norm_cannot_be_reproducible() -> None:
    with pytest.raises(ConfigError, match=r"cannot hold with '1' \(BatchNorm1d\).*use GroupNorm or LayerNorm"):
        start(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), reproducible=True)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_process_group_without_a_backend_for_the_device_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"backend gloo for cuda, .* init_process_group with backend='nccl'"):
        connect(torch.device("cuda", 0))
    assert connect(torch.device("cpu")).world_size == 1
