"""The traversal of autograd in Python against that in C++, with real tensors."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.fake.autograd import Autograd
from tests.helpers.zoo import ZOO, make


def gradients(name: str, in_python: bool) -> tuple[list[Tensor | None], list[str]]:
    """Returns the gradients of a model of the zoo, and its parameters in the order in which backward reaches them."""
    torch.manual_seed(0)
    entry = make(name)
    model, order = entry.build(0), []
    autograd = Autograd()
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=parameter_name: order.append(name))
    loss = entry.loss(model, entry.batch(0))
    engine: Any = autograd.run_backward if in_python else torch.autograd.graph._engine_run_backward
    with mock.patch.object(torch.autograd, "_engine_run_backward", engine):
        loss.backward()
    return [parameter.grad for parameter in model.parameters()], order


@pytest.mark.parametrize("name", sorted(ZOO))
def test_gradients_and_their_order_are_those_of_the_engine(name: str) -> None:
    (expected, order), (got, got_order) = (gradients(name, in_python) for in_python in (False, True))
    assert got_order == order
    torch.testing.assert_close(got, expected)


def test_hooks_of_tensors_replace_their_gradients() -> None:
    leaf = torch.ones(3, requires_grad=True)
    linear: Any = nn.Linear(3, 1)
    autograd = Autograd()
    y = linear(leaf)
    autograd.register_hook(y, lambda grad: 2 * grad)
    autograd.register_hook(leaf, lambda grad: grad + 1)
    autograd.run_backward([y], [torch.ones(1)])
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, 2 * linear.weight[0].detach() + 1)
