"""DeepSpeed's tests of loss scales and dtypes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.errors import UsageError
from tests.corpus.assertions.deepspeed_gradients import TESTS, X, dot_engine, expect_weight, step_on
from tests.corpus.faults.deepspeed_weights import a_buffer_keeps_its_dtype_and_its_large_values
from tests.corpus.rows import assertion
from tests.engines.helpers import held, same
from tests.engines.matrix import Trial

SCALES = f"{TESTS}/runtime/half_precision/test_dynamic_loss_scale.py::TestFused"


@assertion(
    f"{SCALES}::test_no_overflow",
    "A dynamic loss scale doubles after each window of two steps without an overflow, and only then.",
    precisions=("fp16", "fp32"),
)
def a_loss_scale_doubles_after_each_clean_window_and_moves_no_weight(trial: Trial) -> None:
    engine = dot_engine(trial, loss_scale=dtrain.LossScale("dynamic", init=256.0, growth_interval=2))
    for number, scale in enumerate((256, 256, 512, 512), 1):
        assert step_on(engine, [X] * 6).loss_scale == scale
        expect_weight(engine, -number * X)  # each gradient is divided by the scale that multiplied it
    assert engine.loss_scale.scale == 1024


@assertion(
    f"{SCALES}::test_all_overflow",
    "Each overflow halves the dynamic loss scale, whether it is Inf, -Inf or NaN, down to the minimum and not below.",
    precisions=("fp16", "fp32"),
)
def every_kind_of_overflow_halves_the_loss_scale_down_to_its_minimum(trial: Trial) -> None:
    engine = dot_engine(trial, X, loss_scale=dtrain.LossScale("dynamic", init=4.0, growth_interval=2, min=1.0))
    before = held(engine)
    for factor, scale in ((math.inf, 2), (-math.inf, 1), (math.nan, 1), (math.inf, 1)):
        outcome = step_on(engine, [X] * trial.ranks, factor)
        assert (outcome.applied, outcome.reason) == (False, "overflow")
        assert engine.loss_scale.scale == scale
    assert same(held(engine), before)


@assertion(
    f"{SCALES}::test_some_overflow",
    "After overflows the loss scale grows again only when a whole window is clean, and the next overflow halves it.",
    precisions=("fp16", "fp32"),
)
def an_overflow_restarts_the_window_of_the_loss_scale(trial: Trial) -> None:
    engine = dot_engine(trial, loss_scale=dtrain.LossScale("dynamic", init=256.0, growth_interval=2))
    for factor, scale in ((1, 256), (math.inf, 128), (1, 128), (1, 256), (math.nan, 128)):
        step_on(engine, [X] * trial.ranks, factor)
        assert engine.loss_scale.scale == scale
    expect_weight(engine, -3 * X)


@assertion(
    f"{TESTS}/v1/zero/test_zero_user_backward.py::TestZeroUserBackwardWithScale::"
    "test_error_when_backward_without_scale_fp16",
    "A backward that bypasses loss scaling raises an error instead of giving unscaled gradients.",
    precisions=("fp16", "fp32"),
)
def a_backward_past_the_loss_scale_is_an_error(trial: Trial) -> None:
    engine = dot_engine(trial, loss_scale=dtrain.LossScale("dynamic", init=256.0))
    with pytest.raises(UsageError, match="backward"):
        engine(X).backward()


def constant() -> Tensor:
    return 10000 ** (-torch.arange(5.0) / 5)


assertion(
    f"{TESTS}/v1/half_precision/test_mixed_precision_dtype.py::TestMixedPrecisionDtypeEndToEnd::"
    "test_buffer_preserved_by_default",
    "If weights become BF16, a buffer of FP32 stays FP32.",
)(a_buffer_keeps_its_dtype_and_its_large_values)
