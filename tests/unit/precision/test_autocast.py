"""The dtypes in which a model's operations run under a contract."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.precision.contract import Contract, resolve
from dtrain.precision.forward import Autocast, find_loss
from dtrain.precision.policy import PrecisionPolicy
from tests.helpers.net import Net
from tests.helpers.op_dtypes import OpDtypes

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def prepared(model: nn.Module, name: str = "bf16", in_fp32: tuple[str, ...] = ()) -> tuple[Autocast, Contract]:
    """The forward rules, with replicas cast as the engine casts them."""
    contract = resolve(PrecisionPolicy.named(name, rules=dict.fromkeys(in_fp32, "fp32")), model)
    for parameter_name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(contract.replica_dtypes[parameter_name])
    contract.check_parameters(dict(model.named_parameters()), dict(model.named_modules()))
    return Autocast(contract, model, CPU), contract


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


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
    x = bf16(*shape)
    with autocast():
        output = model(x)
    assert output.dtype == FP32
    assert torch.equal(output, module(x.float()))


def test_children_of_an_fp32_module_run_in_fp32_for_any_caller() -> None:
    # calls the elements of a ModuleList, and a child of a child, whose own forward never runs
    parts = {"heads": nn.ModuleList([nn.Linear(8, 4)]), "wrapper": nn.Sequential(nn.Linear(8, 4))}
    model = Net(lambda net, x: net.heads[0](x) + net.wrapper[0](x), **parts)
    autocast, contract = prepared(model, in_fp32=("heads", "wrapper"))
    assert set(contract.replica_dtypes.values()) == {FP32}
    x = torch.randn(3, 8)
    with OpDtypes(nn.Module()) as ops, autocast():
        output = model(x)
    assert {dtype for ran in ops.ran if ran.op == "addmm" for dtype in ran.inputs} == {"fp32"}
    head, inner = model.heads[0], model.wrapper[0]
    assert torch.equal(output, F.linear(x, head.weight, head.bias) + F.linear(x, inner.weight, inner.bias))


def test_keyword_and_nested_inputs_of_an_fp32_module_are_cast() -> None:
    class Pair(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor], *, gain: Tensor, index: Tensor) -> tuple[Tensor, ...]:
            return (*pair, gain, index)

    model = nn.ModuleDict({"pair": Pair()})
    autocast, _ = prepared(model, in_fp32=("pair",))
    index = torch.tensor(3)
    with autocast():
        output = model["pair"]((bf16(2), bf16(2)), gain=bf16(1), index=index)
    assert [x.dtype for x in output] == [FP32, FP32, FP32, torch.int64]
    assert output[3] is index


def test_a_deep_copy_uses_its_own_weights() -> None:
    """An average of the weights, say, that is evaluated beside the model."""
    model = nn.Sequential(nn.LayerNorm(4))
    prepared(model)
    copied = copy.deepcopy(model)
    nn.init.zeros_(copied[0].weight)
    nn.init.constant_(copied[0].bias, 3.0)
    assert torch.equal(copied(torch.randn(2, 4)), torch.full((2, 4), 3.0))


@dataclasses.dataclass
class Output:
    loss: Tensor
    logits: Tensor


def test_outputs_are_cast_to_fp32_unless_they_hold_a_loss() -> None:
    autocast, _ = prepared(nn.Linear(2, 2))
    assert autocast.cast_output(bf16(3)).dtype == FP32
    nested = autocast.cast_output({"a": [bf16(2), torch.arange(2)], "b": (bf16(1), None, "text")})
    assert nested["a"][0].dtype == FP32
    assert nested["a"][1].dtype == torch.int64
    assert nested["b"][0].dtype == FP32
    assert nested["b"][1:] == (None, "text")
    loss = bf16(3).sum()
    for output in ({"loss": torch.tensor(1.0), "logits": bf16(3)}, Output(torch.tensor(1.0), bf16(3)), loss):
        assert autocast.cast_output(output) is output
    assert autocast.cast_output({"loss": loss})["loss"].dtype == BF16
    assert autocast.cast_output((loss, bf16(3)))[0].dtype == BF16


def test_find_loss() -> None:
    loss = torch.tensor(1.0)
    assert find_loss(loss) is loss
    assert find_loss({"loss": loss}) is loss
    assert find_loss(Output(loss, loss)) is loss
    for other in (torch.ones(1), {"loss": torch.ones(2)}, {"loss": 1.0}, {}, (loss,), None, 3.0):
        assert find_loss(other) is None
