"""What lines of a script do with a gradient that an engine has taken: ask, read, write, copy, trace."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from dtrain.errors import UsageError
from dtrain.parameters.taken_gradient import Readers, TakenGradient


def parameter() -> Any:
    made: Any = nn.Parameter(torch.ones(3, 4))
    made.grad = TakenGradient(made, "layer.weight", Readers("native"))
    return made


READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.grad.norm(),
    "data": lambda p: p.grad.data.norm(2),
    "detach": lambda p: p.grad.detach().abs().max(),
    "foreach": lambda p: torch._foreach_norm([p.grad])[0],
    "cat": lambda p: torch.cat([p.grad.view(-1), p.grad.flatten()]).norm(),
    "total norm": lambda p: nn.utils.get_total_norm([p.grad]),
    "numpy": lambda p: torch.tensor(p.grad.detach().cpu().numpy().sum()),
    "tolist": lambda p: torch.tensor(p.grad.tolist()).sum(),
    "element": lambda p: p.grad[0, 1],
    "double": lambda p: p.grad.double().mean(),
    "DTensor": lambda p: p.grad.full_tensor().norm() + p.grad.to_local().norm(),
    "copy": lambda p: copy.deepcopy(p.grad).sum(),
    "pickle": lambda p: pickle.loads(pickle.dumps(p.grad)).sum(),
    "other": lambda p: torch.ones(3, 4).add_(p.grad.detach().clone()).sum(),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "zero_": lambda p: p.grad.zero_(),
    "mul_": lambda p: p.grad.mul_(0.5),
    "data": lambda p: p.grad.data.mul_(0.5),
    "element": lambda p: p.grad.__setitem__(0, 1.0),
    "mask": lambda p: p.grad.__setitem__(torch.ones(3, 4) > 0, 0.0),
    "view": lambda p: p.grad.view(-1)[2:].add_(1),
    "clip norm": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "clip value": lambda p: nn.utils.clip_grad_value_([p], 1.0),
    "zero_grad": lambda p: torch.optim.SGD([p], lr=0.1).zero_grad(set_to_none=False),
    "a step of torch": lambda p: torch.optim.SGD([p], lr=0.1).step(),
    "out": lambda p: torch.add(torch.ones(3, 4), 1, out=p.grad),
    "into another": lambda p: torch.ones(3, 4).add_(p.grad),
}


@pytest.mark.parametrize("what", READS)
def test_a_read_is_nan_and_warns_once(what: str) -> None:
    tried = parameter()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert READS[what](tried).isnan()
        assert READS[what](tried).isnan()
    assert [str(one.message)[:36] for one in found] == ["'layer.weight'.grad is read after en"]
    assert "grad_norm" in str(found[0].message)
    assert found[0].filename == (copy.__file__ if what == "copy" else __file__)


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.filterwarnings("ignore:'layer.weight'.grad is read")
def test_a_write_is_an_error_that_names_the_parameter(what: str) -> None:
    tried = parameter()
    with pytest.raises(UsageError, match=r"'layer.weight'.grad is given to .*, which writes.*register_hook"):
        WRITES[what](tried)
    assert torch.equal(tried.detach(), torch.ones(3, 4))


def test_to_ask_what_it_is_is_no_read() -> None:
    tried, own = parameter(), parameter().grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (own.shape, own.dtype, own.device, own.numel(), own.dim()) == (
            (3, 4),
            torch.float32,
            tried.device,
            12,
            2,
        )
        assert not own.requires_grad
        assert not own.is_sparse
        assert own.is_contiguous()
        assert repr(own) == "TakenGradient('layer.weight', shape=(3, 4), dtype=torch.float32)"
        assert copy.deepcopy(tried).grad is None
        assert torch.equal(pickle.loads(pickle.dumps(tried)), tried)
        tried.grad.requires_grad_(False)
        tried.grad.detach_()
        tried.grad = None


def test_a_backward_that_adds_to_it_is_an_error() -> None:
    tried = parameter()
    with pytest.raises(UsageError, match=r"'layer.weight' got a gradient outside engine.backward"):
        tried.sum().backward()


def test_a_model_that_has_them_can_be_traced() -> None:
    model: Any = nn.Linear(4, 4)
    for name, own in model.named_parameters():
        own.grad = TakenGradient(own, name, Readers("native"))
    want = model(torch.ones(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            assert mode.from_tensor(model.weight).shape == (4, 4)
        assert torch.func.functional_call(model, dict(model.named_parameters()), torch.ones(2, 4)).equal(want)
        copied = copy.deepcopy(model)
    assert isinstance(copied(torch.ones(2, 4)), Tensor)


@pytest.mark.compile
def test_a_model_that_has_them_can_be_compiled() -> None:
    model: Any = nn.Linear(4, 4)
    for name, own in model.named_parameters():
        own.grad = TakenGradient(own, name, Readers("native"))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 4)), model(torch.ones(2, 4)))
