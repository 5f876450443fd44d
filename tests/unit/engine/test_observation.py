"""The contract is checked on the first forward, its gradients and its reductions; FP32 over low-precision weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.engine.observation import ReduceDtypeCheck, observe_forward
from dtrain.errors import ContractError
from dtrain.precision.contract import Contract, resolve
from dtrain.precision.forward import Autocast
from dtrain.precision.policy import PrecisionPolicy
from tests.helpers.net import Net

BF16 = torch.bfloat16
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def policy(name: str, **rules: str) -> PrecisionPolicy:
    """``rules`` for children ``_0`` and so on."""
    named = PrecisionPolicy.named(name, rules={key.strip("_"): value for key, value in rules.items()})
    return named.reducing("auto", reduces_every_micro_batch=True)


FLOAT8 = PrecisionPolicy.named("fp8").on(torch.device("cpu"))
RULES = {"_0": "fp16", "_1": "fp32", "_3": "bf16"}
IN_FP32 = "bf16, with every weight in FP32"


def prepared(model: nn.Module, precision: str | PrecisionPolicy = "bf16") -> tuple[nn.Module, Contract, Any]:
    """``model`` as an engine leaves it after set-up."""
    named = policy(precision.partition(",")[0]) if isinstance(precision, str) else precision
    contract = resolve(named, model)
    if precision == IN_FP32:  # as engines hold it that have one dtype for all weights
        contract = replace(contract, replica_dtypes=dict.fromkeys(contract.replica_dtypes, torch.float32))
    autocast = Autocast(contract, model, torch.device("cpu"))
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(contract.parameter_dtype(name))
    return model, contract, autocast


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def wide() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 1))


def run(model: nn.Module, contract: Contract, autocast: Any, x: Tensor = X) -> Tensor:
    hooks = num_hooks(model)
    with autocast(), observe_forward(model, contract):
        output: Tensor = model(x)
    assert num_hooks(model) == hooks
    return output


def num_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def low_precision() -> torch.autocast:
    return torch.autocast("cpu", dtype=BF16)


def with_a_late_cast(model: nn.Sequential) -> None:
    model[2].register_forward_pre_hook(lambda module, _: setattr(module.weight, "data", module.weight.data.float()))


def with_another_recipe(model: nn.Sequential) -> None:
    model[1].quantized_weight.recipe = replace(model[1].recipe, name="rowwise")


def with_a_cast_in_its_forward(model: nn.Sequential) -> None:
    model[1].forward = lambda x: type(model[1]).forward(model[1], x).float()


def in_low_precision(model: nn.Sequential) -> None:
    del model[1].forward  # what casts its inputs
    model[1].float()


# the model, its policy, what an engine then changes in it, what replaces autocast, and the error
BREACHES: list[tuple[Callable[[], nn.Module], Any, Any, Any, str]] = [
    (mlp, "bf16", with_a_late_cast, None, "'2.weight' is torch.float32; .* torch.bfloat16"),
    (mlp, "bf16", in_low_precision, low_precision, r"module '1' \(LayerNorm\) computed torch.bfloat16"),
    (mlp, IN_FP32, None, nullcontext, r"module '0' \(Linear\) computed torch.float32; the contract says torch.bf"),
    (mlp, "fp32", None, low_precision, r"module '0' \(Linear\) computed torch.bfloat16; the contract says torch.fl"),
    (mlp, policy("bf16", _1="bf16"), lambda m: delattr(m[1], "forward"), None, "'1' .* is called with another forward"),
    (wide, FLOAT8, lambda m: setattr(m[1], "__class__", nn.Linear), None, "'1' is called as Linear; the contract says"),
    (wide, FLOAT8, with_another_recipe, None, r"module '1' multiplies by Recipe\(name='rowwise'.* the contract"),
    (wide, FLOAT8, with_a_cast_in_its_forward, None, r"'1' \(Float8Linear\) computed torch.float32; .* torch.bfloat16"),
    (
        wide,
        policy("fp32", **RULES),
        lambda m: delattr(m[0], "forward"),
        None,
        r"'0' .* called with another .* torch.fl",
    ),
]


@pytest.mark.parametrize(("build", "precision", "change", "instead", "message"), BREACHES)
def test_a_breach_is_an_error(build: Any, precision: Any, change: Any, instead: Any, message: str) -> None:
    model, contract, autocast = prepared(build(), precision)
    if change is not None:
        run(model, contract, autocast).float().sum().backward()  # it keeps the contract before
        change(model)
    hooks = num_hooks(model)
    with pytest.raises(ContractError, match=message):
        run(model, contract, instead or autocast)
    assert num_hooks(model) == hooks


def test_gradient_of_another_dtype_is_an_error_in_the_first_backward_only() -> None:
    model, contract, autocast = prepared(mlp())
    model[0].weight.grad_dtype = torch.float32
    with pytest.raises(ContractError, match=r"'0.weight' leaves backward as torch.float32; .* torch.bfloat16"):
        run(model, contract, autocast).float().sum().backward()
    model.zero_grad()
    with autocast():
        later = model(X)
    later.float().sum().backward()


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "jvp": lambda module, x: torch.func.jvp(module, (x,), (torch.ones_like(x),))[1],
    "vjp": lambda module, x: torch.func.vjp(module, x)[0],
    "grad": lambda module, x: torch.func.grad(lambda t: module(t).float().square().sum())(x),
    "vmap": lambda module, x: torch.vmap(module)(x),
    "jacrev": lambda module, x: torch.func.jacrev(module)(x[0]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_module_inside_a_transform_of_torch_func_is_called_as_ever(name: str) -> None:
    inside = Net(lambda net, x: TRANSFORMS[name](net.inner, x), inner=nn.Linear(8, 8))
    model, contract, autocast = prepared(inside)
    run(model, contract, autocast).float().square().sum().backward()
    assert model.inner.weight.grad is not None
    assert model.inner.weight.grad.any()


def test_what_a_user_adds_is_not_checked() -> None:
    model, contract, autocast = prepared(mlp())
    with torch.no_grad():
        run(model, contract, autocast)
    model[2].register_forward_hook(lambda module, args, output: output.float())
    assert run(model, contract, autocast).dtype == torch.float32
    scripted = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 1))
    model, contract, autocast = prepared(scripted, "fp32")
    run(model, contract, autocast).sum().backward()


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_is_compiled_once(whole: bool) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, contract, autocast = prepared(nn.Sequential(mlp(), nn.Linear(1, 1)))
    with autocast():
        want = model(X)
    (model if whole else model[0]).compile(backend=backend, fullgraph=True)
    for _ in range(2):  # after set-up, and after a load
        assert torch.equal(run(model, contract, autocast), want)
    with autocast():
        assert torch.equal(model(X), want)
    assert len(graphs) == 1


def test_modules_of_other_formats_keep_the_contract() -> None:
    model, contract, autocast = prepared(wide(), FLOAT8)
    assert contract.float8_modules == ("1",)
    run(model, contract, autocast).float().sum().backward()
    assert model[1]._parameters["weight"].grad.dtype == BF16
    model, contract, autocast = prepared(wide(), policy("bf16", **RULES))
    run(model, contract, autocast).float().sum().backward()
    model[0].register_forward_hook(lambda module, args, output: output.to(torch.float64).float())
    run(model, contract, autocast)  # a user's own hook runs after the check


def test_reduce_dtype_check_by_label_and_of_fp32_sums() -> None:
    check = ReduceDtypeCheck(policy("bf16"), {"block": BF16, "block fp32": torch.float32})
    check.record("vote", torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ContractError, match=r"'block'.*not seen"):
        check.require_complete()
    check.record("block", torch.zeros(1, dtype=BF16))
    check.record("block fp32", torch.zeros(1))
    check.require_complete()
    assert check.seen == {"block": BF16, "block fp32": torch.float32}
    with pytest.raises(ContractError, match=r"'block fp32'.*torch.bfloat16; .* torch.float32"):
        check.record("block fp32", torch.zeros(1, dtype=BF16))
    check = ReduceDtypeCheck(PrecisionPolicy.named("bf16").reducing("fp32", reduces_every_micro_batch=False))
    with pytest.raises(ContractError, match="any gradient"):
        check.require_complete()
    check.record("bucket 0", torch.zeros(1))
    check.require_complete()
    with pytest.raises(ContractError, match=r"'bucket 1'.*torch.bfloat16"):
        check.record("bucket 1", torch.zeros(1, dtype=BF16))


SEQUENCES = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Inside(nn.Module):
    """A plain module, attention, which reads its output layer's weight by itself, and a GRU, which keeps a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x, _ = self.attention(x, x, x, need_weights=False)
        states, _ = self.gru(x)
        return states


def test_fp32_modules_compute_in_fp32_over_low_precision_weights() -> None:
    """As DeepSpeed holds them."""
    low = nn.Sequential(Inside(), nn.LayerNorm(8), nn.Linear(8, 8))
    contract = resolve(PrecisionPolicy.named("bf16", rules={"0": "fp32"}), low, "compute")
    assert set(contract.replica_dtypes.values()) == {BF16}
    low.bfloat16()
    full = copy.deepcopy(low[0]).float()  # the same values
    autocast = Autocast(contract, low, torch.device("cpu"))
    with autocast():
        states = low[0](SEQUENCES)
        assert (states.dtype, low[1:](states).dtype) == (torch.float32, BF16)
    want = full(SEQUENCES)
    torch.testing.assert_close(states, want, rtol=0, atol=0)
    states.square().sum().backward()
    want.square().sum().backward()
    for parameter, reference in zip(low[0].parameters(), full.parameters(), strict=True):
        assert parameter.grad.dtype == BF16
        torch.testing.assert_close(parameter.grad.float(), reference.grad, rtol=1e-2, atol=1e-2)
    # the weights are as they were, also after a forward that fails
    assert all(weight.dtype == BF16 for weight in low[0].gru._flat_weights)
    with pytest.raises(RuntimeError), autocast():
        low(torch.randn(2, 5, 3))
    assert {p.dtype for p in low.parameters()} == {BF16}
    assert {type(module._parameters) for module in low.modules()} == {dict}
