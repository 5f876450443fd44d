"""The precision contract, and the dtypes that the model's operations really run in."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.errors import ConfigError, ContractError, ModelError
from dtrain.precision.policy import (
    Autocast,
    Contract,
    PrecisionPolicy,
    check_trainable,
    find_loss,
    is_fp32_class,
    set_matmul_precision,
)
from tests.helpers.zoo import make

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Ops(TorchDispatchMode):
    """Notes the dtype of the first floating argument of every kernel that runs, casts left out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        floating = [a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()]
        if floating:
            self.seen.setdefault(func.overloadpacket.__name__, set()).add(floating[0])
        return func(*args, **(kwargs or {}))


def prepared(model: nn.Module, name: str = "bf16", fp32_modules: tuple[str, ...] = ()) -> tuple[Autocast, Contract]:
    """The forward rules, with replicas cast as the engine casts them."""
    contract = PrecisionPolicy.named(name, fp32_modules=fp32_modules).resolve(model)
    for parameter_name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(contract.replica_dtypes[parameter_name])
    contract.check_parameters(model)
    return Autocast(contract, model, CPU), contract


def dtypes_of(call: Callable[[], Any], autocast: Autocast) -> tuple[Any, dict[str, set[torch.dtype]]]:
    with Ops() as ops, autocast():
        output = call()
    return output, ops.seen


def low(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


class Free(nn.Module):
    """Runs ``function`` between nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


# -- the contract ------------------------------------------------------------------------------------------------------


def test_norms_stay_fp32_and_the_rest_is_low() -> None:
    contract = PrecisionPolicy.named("bf16").resolve(make("transformer").build(0))
    for name, dtype in contract.replica_dtypes.items():
        assert dtype == (FP32 if "norm" in name else BF16), name
    assert contract.fp32_modules == (
        "blocks.0.attention_norm", "blocks.0.ffn_norm", "blocks.1.attention_norm", "blocks.1.ffn_norm", "norm"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "compute", "reduce"),
    [("fp32", FP32, FP32), ("tf32", FP32, FP32), ("bf16", BF16, BF16), ("fp16", FP16, FP16)],
)
def test_names(name: str, compute: torch.dtype, reduce: torch.dtype) -> None:
    policy = PrecisionPolicy.named(name)
    assert (policy.compute_dtype, policy.reduce_dtype, policy.master_dtype) == (compute, reduce, FP32)
    assert policy.tf32 is (name == "tf32")
    assert policy.is_low is (compute != FP32)
    dtypes = set(policy.resolve(make("mlp").build(0)).replica_dtypes.values())
    assert dtypes == {compute}


class LlamaRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class PreNorm(nn.Module):
    """The common name of a block that normalises and then does something else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.fn = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.norm(x))


@pytest.mark.parametrize(
    ("module", "kept"),
    [
        (nn.LayerNorm(4), True),
        (nn.RMSNorm(4), True),
        (nn.BatchNorm2d(4), True),
        (nn.InstanceNorm3d(4), True),
        (nn.GroupNorm(2, 4), True),
        (LlamaRMSNorm(), True),
        (nn.Softmax(-1), True),
        (nn.LogSoftmax(-1), True),
        (nn.CrossEntropyLoss(), True),
        (nn.MSELoss(), True),
        (nn.Linear(4, 4), False),
        (PreNorm(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_classes_kept_in_fp32(module: nn.Module, kept: bool) -> None:
    assert is_fp32_class(module) is kept


def test_a_block_named_after_its_norm_is_not_a_norm() -> None:
    contract = PrecisionPolicy.named("bf16").resolve(nn.Sequential(PreNorm()))
    assert contract.replica_dtypes == {
        "0.norm.weight": FP32, "0.norm.bias": FP32, "0.fn.weight": BF16, "0.fn.bias": BF16
    }  # fmt: skip


def test_patterns_keep_whole_modules_in_fp32() -> None:
    model = make("transformer").build(0)
    contract = PrecisionPolicy.named("bf16", fp32_modules=["blocks.1", "*.qkv", "head"]).resolve(model)
    for name, dtype in contract.replica_dtypes.items():
        kept = "norm" in name or "qkv" in name or name.startswith(("blocks.1.", "head."))
        assert dtype == (FP32 if kept else BF16), name


def test_a_star_keeps_everything() -> None:
    contract = PrecisionPolicy.named("bf16", fp32_modules=["*"]).resolve(make("transformer").build(0))
    assert set(contract.replica_dtypes.values()) == {FP32}


def test_a_pattern_without_a_match_names_the_nearest_module() -> None:
    policy = PrecisionPolicy.named("bf16", fp32_modules=["embeding"])
    with pytest.raises(ConfigError, match=r"pattern 'embeding' matches no module; did you mean 'embedding'\?"):
        policy.resolve(make("transformer").build(0))


def test_a_parameter_tied_between_fp32_and_low_is_fp32() -> None:
    contract = PrecisionPolicy.named("bf16", fp32_modules=["head"]).resolve(make("tied").build(0))
    assert contract.replica_dtypes["embedding.weight"] == FP32
    assert "head.weight" not in contract.replica_dtypes


def test_a_second_name_of_a_module_is_a_name() -> None:
    model = nn.ModuleDict({"first": nn.Linear(4, 4)})
    model["second"] = model["first"]
    contract = PrecisionPolicy.named("bf16", fp32_modules=["second"]).resolve(model)
    assert contract.replica_dtypes == {"first.weight": FP32, "first.bias": FP32}


def test_frozen_parameters_that_are_no_floats_keep_their_dtype() -> None:
    model = nn.Linear(4, 4)
    for name, dtype in (("quantized", torch.int8), ("phase", torch.complex64)):
        model.register_parameter(name, nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False))
    dtypes = PrecisionPolicy.named("bf16").resolve(model).replica_dtypes
    assert dtypes == {"weight": BF16, "bias": BF16, "quantized": torch.int8, "phase": torch.complex64}


def test_check_parameters_names_the_one_that_was_changed() -> None:
    model = make("transformer").build(0)
    _, contract = prepared(model)
    model.blocks[1].qkv.half()
    with pytest.raises(ContractError, match=r"'blocks\.1\.qkv\.weight' is torch\.float16, the contract says torch\.bf"):
        contract.check_parameters(model)


def test_the_contract_says_everything_once() -> None:
    _, contract = prepared(make("mlp").build(0))
    said = contract.to_dict()
    assert {key: said[key] for key in ("precision", "master", "compute", "accumulate", "reduce", "output")} == {
        "precision": "bf16", "master": "fp32", "compute": "bf16", "accumulate": "fp32", "reduce": "bf16", "output": "fp32"
    }  # fmt: skip
    assert said["replicas"] == dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"], "bf16")
    assert "6 parameters computed in bf16, 0 in fp32" in contract.describe()[-1]


# -- the choice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amx", "avx512_bf16", "name", "why"),
    [
        (True, False, "bf16", "multiplies BF16 matrices in hardware"),
        (False, True, "bf16", "multiplies BF16 matrices in hardware"),
        (False, False, "fp32", "no BF16 matrix instructions"),
    ],
)
def test_auto_on_a_cpu(monkeypatch: pytest.MonkeyPatch, amx: bool, avx512_bf16: bool, name: str, why: str) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    policy = PrecisionPolicy.named("auto", fp32_modules=["head"]).on(CPU)
    assert (policy.name, policy.fp32_modules) == (name, ("head",))
    first = policy.resolve(make("transformer").build(0)).describe()[0]
    assert first.startswith(f"precision auto: {name}, because ")
    assert why in first


@pytest.mark.parametrize(
    ("capability", "name"), [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 0), "fp16"), ((7, 5), "fp16")]
)
def test_auto_on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    policy = PrecisionPolicy.named("auto").on(torch.device("cuda"))
    assert policy.name == name
    assert f"NVIDIA Test (compute capability {capability[0]}.{capability[1]})" in policy.reason


def test_tf32_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = PrecisionPolicy.named("tf32")
    with pytest.raises(
        ConfigError, match=r"precision=tf32 needs an NVIDIA GPU of Ampere or later, this is cpu; use fp32"
    ):
        policy.on(CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match="Ampere"):
        policy.on(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert policy.on(torch.device("cuda")) is policy


def test_matmul_precision_follows_the_policy() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        set_matmul_precision(PrecisionPolicy.named("tf32"))
        assert torch.get_float32_matmul_precision() == "high"
        set_matmul_precision(PrecisionPolicy.named("bf16"))
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PrecisionPolicy.named("bf61"), "'bf61' is not one of .*; did you mean 'bf16'"),
        (lambda: PrecisionPolicy("x", torch.float64), "compute dtype must be .*float64"),
        (lambda: PrecisionPolicy("x", BF16, master_dtype=BF16), "master and output dtype are FP32"),
        (lambda: PrecisionPolicy("x", BF16, output_dtype=BF16), "master and output dtype are FP32"),
        (lambda: PrecisionPolicy("x", BF16, reduce_dtype=FP16), "reduce dtype must be float32 or the compute dtype"),
    ],
)
def test_senseless_policies_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


# -- what really runs --------------------------------------------------------------------------------------------------


def test_a_linear_runs_low() -> None:
    model = nn.Linear(8, 4)
    autocast, _ = prepared(model)
    output, seen = dtypes_of(lambda: model(torch.randn(3, 8)), autocast)
    assert output.dtype == BF16
    assert seen["addmm"] == {BF16}


def test_an_fp16_linear_runs_fp16() -> None:
    model = nn.Linear(8, 4)
    autocast, _ = prepared(model, "fp16")
    output, seen = dtypes_of(lambda: model(torch.randn(3, 8)), autocast)
    assert (output.dtype, seen["addmm"]) == (FP16, {FP16})


def test_fp32_leaves_everything_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Softmax(-1))
    before = [module.forward for module in model]
    autocast, _ = prepared(model, "fp32")
    assert [module.forward for module in model] == before
    output, seen = dtypes_of(lambda: model(torch.randn(3, 8)), autocast)
    assert set().union(*seen.values()) == {FP32}
    assert autocast.cast_output(output) is output


NORMS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.LayerNorm(8), (3, 8)),
    (nn.RMSNorm(8), (3, 8)),
    (nn.GroupNorm(2, 8), (3, 8, 4)),
    (nn.BatchNorm1d(8), (3, 8)),
    (nn.InstanceNorm1d(8, affine=True), (3, 8, 4)),
    (nn.Softmax(-1), (3, 8)),
    (nn.LogSoftmax(-1), (3, 8)),
    (nn.Softmin(-1), (3, 8)),
]


@pytest.mark.parametrize(("module", "shape"), NORMS, ids=lambda value: type(value).__name__)
def test_a_norm_module_computes_in_fp32(module: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(copy.deepcopy(module))
    autocast, _ = prepared(model)
    x = low(*shape)
    output, _ = dtypes_of(lambda: model(x), autocast)
    assert output.dtype == FP32
    assert torch.equal(output, module(x.float()))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.softmax": lambda x: F.softmax(x, -1),
    "torch.softmax": lambda x: torch.softmax(x, -1),
    "Tensor.softmax": lambda x: x.softmax(-1),
    "F.log_softmax": lambda x: F.log_softmax(x, -1),
    "Tensor.log_softmax": lambda x: x.log_softmax(-1),
    "F.softmin": lambda x: F.softmin(x, -1),
    "F.layer_norm": lambda x: F.layer_norm(x, (8,), torch.ones(8, dtype=x.dtype), torch.zeros(8, dtype=x.dtype)),
    "F.rms_norm": lambda x: F.rms_norm(x, (8,), torch.ones(8, dtype=x.dtype)),
    "F.group_norm": lambda x: F.group_norm(x, 2, torch.ones(8, dtype=x.dtype)),
    "F.batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "F.instance_norm": lambda x: F.instance_norm(x.unflatten(1, (2, 4))),
    "F.cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.long)),
    "F.mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_computes_in_fp32(name: str) -> None:
    function = FUNCTIONS[name]
    autocast, _ = prepared(Free(function))
    x = low(3, 8)
    output, _ = dtypes_of(lambda: function(x), autocast)
    assert output.dtype == FP32
    assert torch.equal(output, function(x.float()))


def test_softmax_inside_a_composite_function_is_fp32() -> None:
    """MultiheadAttention with weights, and gumbel_softmax, call softmax inside a function of torch."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    autocast, _ = prepared(attention)
    x = torch.randn(2, 3, 8)
    _, seen = dtypes_of(lambda: attention(x, x, x, need_weights=True), autocast)
    assert seen["_softmax"] == {FP32}
    _, seen = dtypes_of(lambda: F.gumbel_softmax(low(3, 8)), autocast)
    assert seen["_softmax"] == {FP32}


def test_outside_the_forward_nothing_is_changed() -> None:
    prepared(nn.Linear(2, 2))
    assert F.softmax(low(2, 2), -1).dtype == BF16


def test_a_function_inside_the_users_own_fp32_region_is_left_alone() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.softmax(x, -1)

    autocast, _ = prepared(Free(forward))
    output, _ = dtypes_of(lambda: forward(low(2, 2)), autocast)
    assert output.dtype == BF16


def test_an_fp32_linear_runs_in_fp32_exactly() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    autocast, _ = prepared(model, fp32_modules=("1",))
    x = torch.randn(3, 8)
    output, seen = dtypes_of(lambda: model(x), autocast)
    assert seen["addmm"] == {BF16, FP32}
    hidden = F.linear(x.to(BF16), model[0].weight, model[0].bias).float()
    assert torch.equal(output, F.linear(hidden, model[1].weight, model[1].bias))
    # a control: what autocast alone makes of it
    with torch.autocast("cpu", dtype=BF16):
        assert not torch.equal(F.linear(hidden, model[1].weight, model[1].bias).float(), output)


class Heads(nn.Module):
    """Calls the elements of a ModuleList, and a child of a child, whose own forward never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(8, 4)])
        self.wrapper = nn.Sequential(nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[0](x) + self.wrapper[0](x)


def test_modules_inside_an_fp32_module_run_in_fp32_whoever_calls_them() -> None:
    model = Heads()
    autocast, contract = prepared(model, fp32_modules=("heads", "wrapper"))
    assert set(contract.replica_dtypes.values()) == {FP32}
    x = torch.randn(3, 8)
    output, seen = dtypes_of(lambda: model(x), autocast)
    assert seen["addmm"] == {FP32}
    head, inner = model.heads[0], model.wrapper[0]
    assert torch.equal(output, F.linear(x, head.weight, head.bias) + F.linear(x, inner.weight, inner.bias))


def test_keyword_and_nested_inputs_of_an_fp32_module_are_cast() -> None:
    class Pair(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor], *, gain: Tensor, index: Tensor) -> tuple[Tensor, ...]:
            return (*pair, gain, index)

    model = nn.ModuleDict({"pair": Pair()})
    autocast, _ = prepared(model, fp32_modules=("pair",))
    index = torch.tensor(3)
    with autocast():
        output = model["pair"]((low(2), low(2)), gain=low(1), index=index)
    assert [x.dtype for x in output] == [FP32, FP32, FP32, torch.int64]
    assert output[3] is index


def test_gradients_cross_the_islands_in_both_directions() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    autocast, contract = prepared(model)
    with autocast():
        output = autocast.cast_output(model(torch.randn(3, 8)))
    output.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == contract.replica_dtypes[name]
        assert parameter.grad.any() or name == "0.bias"


def test_a_deep_copy_runs_its_own_weights() -> None:
    """An average of the weights, say, that is evaluated beside the model."""
    model = nn.Sequential(nn.LayerNorm(4))
    prepared(model)
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin[0].weight)
    nn.init.constant_(twin[0].bias, 3.0)
    assert torch.equal(twin(torch.randn(2, 4)), torch.full((2, 4), 3.0))


# -- outputs -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    loss: Tensor
    logits: Tensor


def test_outputs_are_cast_to_fp32() -> None:
    autocast, _ = prepared(nn.Linear(2, 2))
    assert autocast.cast_output(low(3)).dtype == FP32
    nested = autocast.cast_output({"a": [low(2), torch.arange(2)], "b": (low(1), None, "text")})
    assert nested["a"][0].dtype == FP32
    assert nested["a"][1].dtype == torch.int64
    assert nested["b"][0].dtype == FP32
    assert nested["b"][1:] == (None, "text")


def test_outputs_that_carry_a_loss_are_left_alone() -> None:
    autocast, _ = prepared(nn.Linear(2, 2))
    for output in ({"loss": torch.tensor(1.0), "logits": low(3)}, Output(torch.tensor(1.0), low(3))):
        assert autocast.cast_output(output) is output


def test_a_low_loss_is_not_dressed_up() -> None:
    autocast, _ = prepared(nn.Linear(2, 2))
    loss = low(3).sum()
    assert autocast.cast_output(loss) is loss
    assert autocast.cast_output({"loss": loss})["loss"].dtype == BF16
    assert autocast.cast_output((loss, low(3)))[0].dtype == BF16


def test_find_loss() -> None:
    loss = torch.tensor(1.0)
    assert find_loss(loss) is loss
    assert find_loss({"loss": loss}) is loss
    assert find_loss(Output(loss, loss)) is loss
    for other in (torch.ones(1), {"loss": torch.ones(2)}, {"loss": 1.0}, {}, (loss,), None, 3.0):
        assert find_loss(other) is None


# -- models that cannot be trained -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2, device="meta"), "'weight' is on the meta device"),
        (nn.LazyLinear(2), "'weight' is a lazy parameter"),
        (nn.Linear(2, 2, dtype=torch.float64), "'weight' is torch.float64"),
        (nn.Linear(2, 2, dtype=torch.complex64), "'weight' is torch.complex64"),
        (nn.Linear(2, 2).requires_grad_(False), "no parameter that requires a gradient"),
        (nn.ReLU(), "no parameter that requires a gradient"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_untrainable_models_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_trainable(model)


def test_frozen_parameters_may_have_any_dtype() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64).requires_grad_(False))
    check_trainable(model)
