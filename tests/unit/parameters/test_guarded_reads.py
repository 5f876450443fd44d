"""Reads of guarded parameters: what gathers, in which mode, and what is left when the engine is gone."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dtrain
from dtrain.errors import UsageError
from dtrain.parameters import guarded_reads
from dtrain.parameters.guarded_reads import GuardedParameter
from dtrain.precision.float8.linear import convert
from dtrain.precision.float8.options import Recipe
from tests.helpers.net import Net

NO_VALUES = """is_cpu is_cuda is_ipu is_maia is_meta is_mps is_mtia is_vulkan is_xla is_xpu is_pinned is_shared is_leaf
    is_distributed is_inference is_quantized is_sparse is_sparse_csr is_coalesced is_mkldnn is_nested is_complex is_conj
    is_neg is_signed is_floating_point is_contiguous name names has_names device dtype layout grad grad_fn output_nr
    requires_grad retains_grad itemsize nbytes ndim shape numel stride sparse_dim dense_dim _version _is_view
    _is_zerotensor __dlpack_device__ __len__ __hash__""".split()  # noqa: SIM905 - words are easier to read


def begin() -> tuple[nn.Module, Any]:
    parts = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)}
    model = Net(lambda net, x: net.second(net.first(x)).float().square().mean(), **parts)
    engine = dtrain.initialize(model, engine="native", precision="bf16", seed=0)
    engine.guard_reads(shows_masters=True)
    return model, engine


def test_what_has_no_values_gathers_nothing() -> None:
    model, engine = begin()
    plain = nn.Parameter(model.first.weight.detach().clone())
    with mock.patch.object(engine.states.reads, "_gather", side_effect=AssertionError):
        engine.states.reads._masters = {}
        for name in NO_VALUES:
            try:
                expected = getattr(plain, name)
                expected = expected() if callable(expected) else expected
            except (RuntimeError, AttributeError):  # of other kinds of tensors
                continue
            found = getattr(model.first.weight, name)
            found = found() if callable(found) else found
            assert found == expected or name in ("_version", "__hash__"), name


def test_inference_mode_reads_and_writes_masters() -> None:
    model, engine = begin()
    expected = engine.master_state()["first.weight"]
    with torch.inference_mode():
        assert torch.equal(model.first.weight * 1, expected)
        model.first.weight.mul_(2)
    assert torch.equal(model.first.weight.detach(), 2 * expected)
    engine.backward(engine(torch.ones(2, 4)))
    assert engine.step().applied


def test_a_read_after_the_engine_is_gone_is_named() -> None:
    model, engine = begin()
    del engine
    gc.collect()
    assert model.first.weight.shape == (4, 4)
    with pytest.raises(UsageError, match=r"'first.weight' is read, but the engine of the model is gone"):
        model.first.weight.sum()


def test_many_parameters_are_answered_once_each() -> None:
    model, engine = begin()
    parameters = [*model.parameters()] * 50
    assert all(isinstance(parameter, GuardedParameter) for parameter in parameters)
    answer = guarded_reads.ParameterReads.answer
    with mock.patch.object(guarded_reads.ParameterReads, "answer", autospec=True, side_effect=answer) as answers:
        norms = torch._foreach_norm(parameters)
    assert answers.call_count == 4
    assert len(norms) == 200
    with torch.no_grad():
        assert model.first.weight.mul_(1) is model.first.weight
    del engine


def test_every_entry_of_the_state_dict_of_an_fp8_linear_is_detached() -> None:
    linear = nn.Linear(16, 16)
    linear.gain = nn.Parameter(torch.ones(16))
    linear.register_buffer("count", torch.zeros(1))
    plain = {name: value.clone() for name, value in linear.state_dict().items()}
    convert(linear, Recipe())
    state = linear.state_dict()
    assert state.keys() == plain.keys()
    assert not any(value.requires_grad or isinstance(value, nn.Parameter) for value in state.values())
    assert linear.state_dict(keep_vars=True)["gain"] is linear.gain
