"""Steps on tensors without values: what operations return, and models that select by values."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dtrain.errors import ConfigError
from dtrain.planning.record.fake_step import _StandInValues, _tell_of_selection
from tests.helpers.net import Net
from tests.unit.planning.planned_runs import planned_run

_SELECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda values, mask: values[mask],
    "broadcast": lambda values, mask: torch.masked_select(values, mask[:1]),
    "unique": lambda values, mask: values.unique(),
}


def run_selecting(net: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean of the scores that are selected."""
    scores: Tensor = net.select(net.embedding(tokens)[..., 0], targets != -100)
    net.selected = scores.numel()
    return scores.float().mean()


def build(config: Any, vocab_size: int) -> nn.Module:
    return Net(run_selecting, embedding=nn.Embedding(vocab_size, 1), select=_SELECTIONS[config.args["selection"]])


def selected_by(name: str) -> int:
    keys = (f"model.factory={__name__}:build", f"model.args.selection={name}", "model.max_seq_len=16")
    with planned_run(*keys, "train.micro_batch_size=2", "precision=fp32").engine() as (engine, step):
        step()
        return int(engine.module.selected)


@pytest.mark.parametrize("name", ["index", "broadcast"])
def test_a_mask_selects_all_elements_and_the_user_is_told_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    _tell_of_selection.cache_clear()
    with caplog.at_level(logging.WARNING, logger="dtrain"):
        assert [selected_by(name) for _ in range(2)] == [2 * 16] * 2
    assert [message[:44] for message in caplog.messages] == ["the model selects elements by their values, "]


def test_another_size_that_depends_on_values_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the size of the result of aten\._unique2\.default depends on them"):
        selected_by("unique")


@torch.library.custom_op("dtrain_tests::part_of_larger", mutates_args=())
def part_of_larger(x: Tensor) -> Tensor:
    return x.new_empty(3, *x.shape)[1]


part_of_larger.register_fake(lambda x: x.new_empty(3, *x.shape)[1])


_CALLS: dict[str, Callable[[Tensor], Any]] = {
    "new tensors": lambda x: [x + 1, x.t() + 1, x.sum(), x.to(torch.bfloat16), torch.ones(3), torch.cat([x, x])],
    "strides": lambda x: [x[:, :4] + 1, x[:, :4].t() + 1],
    "types of numbers": lambda x: [x.int() * number for number in (1, 1.0, True)] + [x > 1, x > 1.0],
    "views": lambda x: [
        x.view(-1),
        x[1:],
        x[:, 1],
        x.t(),
        *x.unbind(),
        *x.split([1, 3]),
        x.detach(),
        x.expand(2, 4, 6),
    ],
    "other views": lambda x: [x.conj(), x.unsqueeze(0).squeeze(0), torch.ops.aten.alias(x), x.diagonal(), *x.chunk(2)],
    "conjugates": lambda x: [torch.view_as_complex(x.view(4, 3, 2)).conj(), torch._neg_view(x)],
    "complex": lambda x: [
        torch.view_as_complex(x.view(4, 3, 2)).conj() * 2,
        torch.view_as_complex(x.view(4, 3, 2)) * 2,
    ],
    "in place": lambda x: [x.mul_(2), x.copy_(x + 1), x.view(-1).zero_(), torch._foreach_add([x], [x])[0]],
    "in-place views": lambda x: [x.clone().t_(), x.clone().resize_(2, 2), x.clone().unsqueeze_(0)],
    "out": lambda x: [torch.add(x, x, out=x.clone()), torch.mul(x, x, out=x.new_empty(0))],
    "several results": lambda x: [*x.max(dim=1), *torch.nn.functional.layer_norm(x, (6,)).topk(2)],
    "devices": lambda x: [torch.ones(2, device="cuda")],
    "custom operations": lambda x: [part_of_larger(x)],
    "nothing": lambda x: [x[:0] + 1, x[:0].sum()],
}


@pytest.mark.parametrize("name", _CALLS)
def test_operations_return_what_torch_says_that_they_return(name: str) -> None:
    def described(mode: FakeTensorMode) -> list[Any]:
        with mode:
            x = torch.empty(4, 6)
            found = [_CALLS[name](x) for _ in range(2)][1]  # the second time from memory
            own = x.untyped_storage()._cdata
            shares = [(y.untyped_storage()._cdata == own, y.untyped_storage().nbytes(), y is x) for y in found]
            return shares + [(y.shape, y.stride(), y.storage_offset(), y.dtype, y.device, y.is_conj()) for y in found]

    assert described(_StandInValues()) == described(FakeTensorMode())
