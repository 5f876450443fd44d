"""The contract is checked on the first forward, its gradients and its reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from dtrain.precision.regions import full_precision
from tests.helpers.zoo import ZOO, make

BF16 = torch.bfloat16
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def policy(name: str) -> PrecisionPolicy:
    return PrecisionPolicy.named(name).reducing("auto", reduces_every_micro_batch=True)


def all_in(contract: Contract, dtype: torch.dtype) -> Contract:
    """The contract of engines that hold every weight in one dtype."""
    return replace(contract, replica_dtypes=dict.fromkeys(contract.replica_dtypes, dtype))


def prepared(
    model: nn.Module,
    precision: str | PrecisionPolicy = "bf16",
    change: Callable[[Contract], Contract] = lambda contract: contract,
) -> tuple[nn.Module, Contract, Autocast]:
    """``model`` as an engine leaves it after set-up."""
    contract = change(resolve(policy(precision) if isinstance(precision, str) else precision, model))
    autocast = Autocast(contract, model, torch.device("cpu"))
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(contract.parameter_dtype(name))
    return model, contract, autocast


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def run(model: nn.Module, contract: Contract, autocast: Any, x: Tensor = X) -> Tensor:
    with autocast(), observe_forward(model, contract):
        output: Tensor = model(x)
    return output


def num_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("name", sorted(ZOO))
def test_odd_models_keep_the_contract(name: str) -> None:
    entry = make(name)
    own_hooks = num_hooks(entry.build(0))
    for precision, change in [
        ("fp32", lambda contract: contract),
        ("bf16", lambda contract: contract),
        ("bf16", lambda contract: all_in(contract, torch.float32)),
    ]:
        model, contract, autocast = prepared(entry.build(0), precision, change)

        def forward(*args: Any, _autocast: Any = autocast, _model: Any = model, **kwargs: Any) -> Any:
            return _autocast.cast_output(_model(*args, **kwargs))

        with autocast(), observe_forward(model, contract):
            loss = entry.loss(forward, entry.batch(0))
        with autocast.backward():
            loss.backward()
        assert num_hooks(model) == own_hooks


def test_weight_cast_before_its_module_is_an_error() -> None:
    model, contract, autocast = prepared(mlp())

    def unshard(module: nn.Module, _: Any) -> None:
        module.weight.data = module.weight.data.float()

    model[2].register_forward_pre_hook(unshard)
    with pytest.raises(ContractError, match=r"parameter '2.weight' is torch.float32; the contract says torch.bfloat16"):
        run(model, contract, autocast)
    assert num_hooks(model) == 1  # the one above


def test_products_in_fp32_are_an_error() -> None:
    model, contract, _ = prepared(mlp(), change=lambda contract: all_in(contract, torch.float32))
    with pytest.raises(
        ContractError, match=r"module '0' \(Linear\) computed torch.float32; the contract says torch.bf"
    ):
        run(model, contract, nullcontext)


def test_products_in_low_precision_are_an_error() -> None:
    model, contract, _ = prepared(mlp(), "fp32")

    @contextmanager
    def autocast() -> Iterator[None]:
        with torch.autocast("cpu", dtype=BF16):
            yield

    with pytest.raises(
        ContractError, match=r"module '0' \(Linear\) computed torch.bfloat16; the contract says torch.fl"
    ):
        run(model, contract, autocast)


def test_norm_in_low_precision_is_an_error() -> None:
    model, contract, _ = prepared(mlp())
    del model[1].forward  # what casts its inputs

    @contextmanager
    def autocast() -> Iterator[None]:
        with torch.autocast("cpu", dtype=BF16):
            yield

    model[1].float()
    with pytest.raises(ContractError, match=r"module '1' \(LayerNorm\) computed torch.bfloat16"):
        run(model, contract, autocast)


def test_norm_that_ignores_its_low_precision_rule_is_an_error() -> None:
    ruled = PrecisionPolicy.named("bf16", rules={"1": "bf16"}).reducing("auto", reduces_every_micro_batch=True)
    model, contract, autocast = prepared(mlp(), ruled)
    assert run(model, contract, autocast).dtype == BF16
    del model[1].forward
    with pytest.raises(
        ContractError, match=r"module '1' \(LayerNorm\) is called with another forward than the one that"
    ):
        run(model, contract, autocast)


def test_gradient_of_another_dtype_is_an_error_in_the_first_backward_only() -> None:
    model, contract, autocast = prepared(mlp())
    model[0].weight.grad_dtype = torch.float32
    with pytest.raises(
        ContractError, match=r"gradient of '0.weight' leaves backward as torch.float32; .* torch.bfloat16"
    ):
        run(model, contract, autocast).float().sum().backward()
    model.zero_grad()
    with autocast():
        later = model(X)
    later.float().sum().backward()


def test_outputs_changed_by_user_hooks_are_not_checked() -> None:
    model, contract, autocast = prepared(mlp())
    model[2].register_forward_hook(lambda module, args, output: output.float())
    assert run(model, contract, autocast).dtype == torch.float32


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models_run_and_compile_once(whole: bool) -> None:
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


def test_scripted_modules_are_not_checked() -> None:
    model, contract, autocast = prepared(nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 1)), "fp32")
    run(model, contract, autocast).sum().backward()


def test_without_gradients_nothing_is_put_on_the_graph() -> None:
    model, contract, autocast = prepared(mlp())
    with torch.no_grad():
        run(model, contract, autocast)


# -- FP8 and rules -----------------------------------------------------------------------------------------------------


def wide() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 1))


def float8() -> PrecisionPolicy:
    return PrecisionPolicy.named("fp8").on(torch.device("cpu"))


def test_fp8_modules_keep_the_contract() -> None:
    model, contract, autocast = prepared(wide(), float8())
    assert contract.float8_modules == ("1",)
    run(model, contract, autocast).float().sum().backward()
    assert model[1]._parameters["weight"].grad.dtype == BF16


def test_module_that_does_not_run_in_fp8_is_an_error() -> None:
    model, contract, autocast = prepared(wide(), float8())
    model[1].__class__ = nn.Linear
    with pytest.raises(ContractError, match="module '1' is called as Linear; the contract says that its"):
        run(model, contract, autocast)
    assert num_hooks(model) == 0


def test_fp8_products_of_another_recipe_are_an_error() -> None:
    model, contract, autocast = prepared(wide(), float8())
    model[1].quantized_weight.recipe = replace(model[1].recipe, rowwise=True)
    with pytest.raises(ContractError, match=r"module '1' multiplies by Recipe\(rowwise=True.* the contract"):
        run(model, contract, autocast)


def test_fp8_products_of_another_dtype_are_an_error() -> None:
    model, contract, autocast = prepared(wide(), float8())
    own = type(model[1]).forward
    model[1].forward = lambda x: own(model[1], x).float()
    with pytest.raises(ContractError, match=r"module '1' \(Float8Linear\) computed torch.float32; .* torch.bfloat16"):
        run(model, contract, autocast)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_modules_of_another_format_keep_the_contract_and_cast_their_output(name: str) -> None:
    rules = {"0": "fp16", "1": "fp32", "3": "bf16"}
    model, contract, autocast = prepared(wide(), PrecisionPolicy.named(name, rules=rules))
    run(model, contract, autocast).float().sum().backward()
    model[0].register_forward_hook(lambda module, args, output: output.to(torch.float64).float())
    run(model, contract, autocast)  # a user's own hook runs after the check
    del model[0].forward
    with pytest.raises(ContractError, match=r"module '0' \(Linear\) is called with another forward .* torch.float16"):
        run(model, contract, autocast)


def test_full_precision_keeps_the_contract() -> None:
    class Exempt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wide()

        def forward(self, x: Tensor) -> Tensor:
            with full_precision():
                return self.inner(x)

    model, contract, autocast = prepared(Exempt(), float8())
    assert run(model, contract, autocast).dtype == torch.float32


def test_reduce_dtype_check_by_label() -> None:
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


def test_reduce_dtype_check_of_fp32_sums() -> None:
    check = ReduceDtypeCheck(PrecisionPolicy.named("bf16").reducing("fp32", reduces_every_micro_batch=False))
    with pytest.raises(ContractError, match="any gradient"):
        check.require_complete()
    check.record("bucket 0", torch.zeros(1))
    check.require_complete()
    with pytest.raises(ContractError, match=r"'bucket 1'.*torch.bfloat16"):
        check.record("bucket 1", torch.zeros(1, dtype=BF16))
