"""The vote's row and its decision, in one launch each.

The arithmetic is that of ``dtrain.engine.vote.tensors`` and ``dtrain.engine.vote.decide``;
``dtrain.engine.vote.record`` says what each field means.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 1024
"""Elements that the only program of a launch reads at a time."""


@triton.jit
def _is_finite(x):
    return tl.abs(x) < float("inf")  # false also for NaN


@triton.jit
def _store_float(row, column, x):
    tl.store(row + column, x.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["num_micro_batches", "stride", "num_squares"])
def record(
    row,
    host,
    values,
    squares,
    max_abs,
    bad_gradient,
    num_micro_batches,
    stride,
    num_squares,
    HOST: tl.constexpr,
    NEVER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fills one rank's ``row``: the host's fields, then the device's.

    Args:
        row: int64 [HOST + 9].
        host: int64 [HOST + num_micro_batches], what the host knows, and the numbers of the micro-batches.
        values: FP32 [2, num_micro_batches], losses and weights.
        squares: FP64 [num_squares].
        max_abs: FP64, the largest magnitude.
        bad_gradient: int64, the first gradient that is not finite, or NEVER, to which it is reset.
        num_micro_batches, num_squares: sizes.
        stride: from a loss to its weight.
        HOST: number of the columns that the host knows.
        NEVER: above every index.
        BLOCK: elements read at a time.
    """
    lanes = tl.arange(0, BLOCK)
    for first in tl.static_range(0, HOST, BLOCK):
        known = first + lanes < HOST
        tl.store(row + first + lanes, tl.load(host + first + lanes, mask=known, other=0), mask=known)

    sum_weights = tl.zeros((BLOCK,), tl.float64)
    weighted_loss = tl.zeros((BLOCK,), tl.float64)
    num_bad = tl.zeros((BLOCK,), tl.int64)
    first_position = tl.full((BLOCK,), NEVER, tl.int64)
    first_loss = tl.full((BLOCK,), NEVER, tl.int64)
    first_weight = tl.full((BLOCK,), NEVER, tl.int64)
    start = 0
    while start < num_micro_batches:
        position = (start + lanes).to(tl.int64)
        mask = position < num_micro_batches
        loss = tl.load(values + position, mask=mask, other=0.0).to(tl.float64)
        weight = tl.load(values + stride + position, mask=mask, other=0.0).to(tl.float64)
        number = tl.load(host + HOST + position, mask=mask, other=NEVER)
        sum_weights += weight
        # a micro-batch of weight 0 is a dummy: its loss does not count
        weighted_loss += tl.where(weight == 0.0, 0.0, loss * weight)
        bad_loss = (_is_finite(loss) == 0) & mask
        bad_weight = ((_is_finite(weight) == 0) | (weight < 0.0)) & mask
        num_bad += bad_loss.to(tl.int64)
        first_position = tl.minimum(first_position, tl.where(bad_loss, position, NEVER))
        first_loss = tl.minimum(first_loss, tl.where(bad_loss, number, NEVER))
        first_weight = tl.minimum(first_weight, tl.where(bad_weight, number, NEVER))
        start += BLOCK
    sum_squares = tl.zeros((BLOCK,), tl.float64)
    start = 0
    while start < num_squares:
        position = start + lanes
        sum_squares += tl.load(squares + position, mask=position < num_squares, other=0.0)
        start += BLOCK

    position = tl.min(first_position)
    bad = tl.load(values + position, mask=position != NEVER, other=0.0)
    gradient = tl.load(bad_gradient)
    tl.store(bad_gradient, NEVER)
    least_loss = tl.min(first_loss)
    least_weight = tl.min(first_weight)
    _store_float(row, HOST, tl.sum(sum_weights))
    _store_float(row, HOST + 1, tl.sum(weighted_loss))
    _store_float(row, HOST + 2, tl.sum(sum_squares))
    _store_float(row, HOST + 3, bad.to(tl.float64))
    _store_float(row, HOST + 4, tl.load(max_abs))
    tl.store(row + HOST + 5, tl.sum(num_bad))
    tl.store(row + HOST + 6, tl.where(least_loss == NEVER, -1, least_loss))
    tl.store(row + HOST + 7, tl.where(least_weight == NEVER, -1, least_weight))
    tl.store(row + HOST + 8, tl.where(gradient == NEVER, -1, gradient))


@triton.jit(do_not_specialize=["num_ranks"])
def decide(
    packed,
    rows,
    canonical_squares,
    canonical_weights,
    num_ranks,
    AGREE: tl.constexpr,
    LOSS_SCALE: tl.constexpr,
    MAX_GRAD_NORM: tl.constexpr,
    GRAD_FACTOR: tl.constexpr,
    HOST: tl.constexpr,
    FIELDS: tl.constexpr,
    CANONICAL: tl.constexpr,
    MAX_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decides on a step from the rows of all ranks.

    Args:
        packed: int64 [4 + num_ranks * FIELDS]: the bits of code, loss, norm and divisor, then a copy of the rows.
        rows: int64 [num_ranks, FIELDS].
        canonical_squares, canonical_weights: FP64 sums in canonical order, if CANONICAL.
        num_ranks: number of rows.
        AGREE: number of fields, the first of a row, in which the ranks must agree.
        LOSS_SCALE: field of the loss scale.
        MAX_GRAD_NORM: field of the clipping threshold; infinite: the gradient is not clipped.
        GRAD_FACTOR: field of the factor of the gradient.
        HOST: number of columns before the device's fields.
        FIELDS: number of columns.
        CANONICAL: whether the canonical sums replace those of the rows.
        MAX_NORM: norm of the applied gradient above which the step is skipped.
        BLOCK: elements read at a time.
    """
    lanes = tl.arange(0, BLOCK)
    weights = tl.zeros((BLOCK,), tl.float64)
    weighted_loss = tl.zeros((BLOCK,), tl.float64)
    squares = tl.zeros((BLOCK,), tl.float64)
    diverged = tl.zeros((BLOCK,), tl.int32)
    bad_loss = tl.zeros((BLOCK,), tl.int32)
    bad_weight = tl.zeros((BLOCK,), tl.int32)
    start = 0
    while start < num_ranks:
        rank = start + lanes
        mask = rank < num_ranks
        row = rows + rank * FIELDS
        # compared as bits, so that two NaN agree and -0.0 differs from 0.0
        for column in tl.static_range(AGREE):
            mine = tl.load(row + column, mask=mask, other=0)
            diverged |= ((mine != tl.load(rows + column)) & mask).to(tl.int32)
        weights += tl.load(row + HOST, mask=mask, other=0).to(tl.float64, bitcast=True)
        weighted_loss += tl.load(row + HOST + 1, mask=mask, other=0).to(tl.float64, bitcast=True)
        squares += tl.load(row + HOST + 2, mask=mask, other=0).to(tl.float64, bitcast=True)
        bad_loss |= (tl.load(row + HOST + 5, mask=mask, other=0) > 0).to(tl.int32)
        bad_weight |= (tl.load(row + HOST + 7, mask=mask, other=-1) >= 0).to(tl.int32)
        start += BLOCK
    start = 0
    while start < num_ranks * FIELDS:
        index = start + lanes
        mask = index < num_ranks * FIELDS
        tl.store(packed + 4 + index, tl.load(rows + index, mask=mask, other=0), mask=mask)
        start += BLOCK

    sum_weights = tl.sum(weights)
    sum_squares = tl.sum(squares)
    if CANONICAL:
        sum_weights = tl.load(canonical_weights)
        sum_squares = tl.load(canonical_squares)
    max_grad_norm = tl.load(rows + MAX_GRAD_NORM).to(tl.float64, bitcast=True)
    divisor = tl.load(rows + LOSS_SCALE).to(tl.float64, bitcast=True) * sum_weights
    divisor = divisor / tl.load(rows + GRAD_FACTOR).to(tl.float64, bitcast=True)
    norm = tl.sqrt(sum_squares) / divisor
    clip = max_grad_norm / (norm + 1e-6)
    clip = tl.where(clip > 1.0, 1.0, clip)  # NaN stays
    clip = tl.where(max_grad_norm == float("inf"), 1.0, clip)
    clipped = divisor / clip
    applied = norm * clip
    code = (sum_weights > 0.0).to(tl.int64) ^ 1  # 1: empty, also if NaN
    code = tl.where((code == 0) & (applied > MAX_NORM), 2, code)
    code = tl.where(_is_finite(sum_squares), code, 2)
    code = tl.where(tl.max(bad_loss) != 0, 3, code)
    code = tl.where(tl.max(bad_weight) != 0, 4, code)
    code = tl.where(tl.max(diverged) != 0, 5, code)
    _store_float(packed, 0, code.to(tl.float64))
    _store_float(packed, 1, tl.sum(weighted_loss) / sum_weights)
    _store_float(packed, 2, norm)
    _store_float(packed, 3, clipped)
