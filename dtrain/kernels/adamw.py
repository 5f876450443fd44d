"""AdamW over tiles of the arena: unscale, moments, master, and the cast into the compute replica, in one launch.

The arithmetic is that of ``dtrain.optim.compiled``. An element costs 30 bytes of memory traffic with a BF16 replica,
28 if its master is a pair
(``dtrain.precision.remainder``), and 2 less if the main grad is BF16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 2048
"""Elements that one program updates."""

NUM_WARPS = 8

FIELDS = 10
"""Number of fields of a row: addresses of master, main grad, both moments and replica; number of elements; kind of the
replica; weight decay and lr factor, as the bits of FP32 numbers; whether the main grad is BF16."""

KINDS = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""Kinds of replicas, by dtype."""

PAIR = 4
"""Kind of a replica that is a half of the master, whose address is then that of the remainder."""


# the numbers lie among others, so they are aligned to their own size only
@triton.jit(do_not_specialize=["first", "count", "numbers"])
def adamw(
    rows,
    tiles,
    first,
    count,
    grad_divisor,
    code,
    numbers,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    FIELDS: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    PAIR: tl.constexpr,
    NAN: tl.constexpr,
):
    """Updates one tile; see ``dtrain.optim.tiled.TiledAdamW``. ``numbers``: lr, lr and root with bias corrections."""
    lr = tl.load(numbers)
    step_size = tl.load(numbers + 1)
    root_correction = tl.load(numbers + 2)
    tile = tiles + (first + tl.program_id(0)) * 2
    row = rows + tl.load(tile) * FIELDS
    start = tl.load(tile + 1).to(tl.int64) * TILE
    # parameters start on 64 elements, so addresses are multiples of 16 bytes, and accesses are vectors
    master_address = tl.load(row)
    grad_address = tl.load(row + 1)
    first_ptr = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16)
    second_ptr = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), 16)
    replica = tl.load(row + 4)
    numel = tl.multiple_of(tl.load(row + 5), 16)
    kind = tl.load(row + 6)
    decay = tl.load(row + 7).to(tl.int32).to(tl.float32, bitcast=True)
    lr_factor = tl.load(row + 8).to(tl.int32).to(tl.float32, bitcast=True)
    is_bf16 = tl.load(row + 9) != 0

    skip = tl.load(code) != 0
    # as UpdateScalars has it: the factor, a power of two, takes the divisor to where FP32 holds it
    wide = tl.load(grad_divisor).to(tl.float64)
    exponent = ((wide.to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1023
    shift = tl.minimum(tl.maximum(exponent, -WIDE), WIDE) - exponent
    shift = tl.minimum(tl.maximum(shift, -126), 126)
    factor = ((shift + 1023) << 52).to(tl.float64, bitcast=True)
    divisor = tl.minimum(tl.maximum(wide * factor, 2.0**-126), 3.4028234663852886e38).to(tl.float32)
    index = start + tl.arange(0, TILE)
    mask = index < numel
    if kind == PAIR:
        weight_ptr = tl.multiple_of(replica.to(tl.pointer_type(tl.int16)), 16)
        remainder_ptr = tl.multiple_of(master_address.to(tl.pointer_type(tl.int16)), 16)
        weight = tl.load(weight_ptr + index, mask=mask, other=0).to(tl.int32)
        remainder = tl.load(remainder_ptr + index, mask=mask, other=0).to(tl.int32)
        master = ((weight << 16) + remainder).to(tl.float32, bitcast=True)
    else:
        master_ptr = tl.multiple_of(master_address.to(tl.pointer_type(tl.float32)), 16)
        master = tl.load(master_ptr + index, mask=mask, other=0.0)
    exp_avg = tl.load(first_ptr + index, mask=mask, other=0.0)
    exp_avg_sq = tl.load(second_ptr + index, mask=mask, other=0.0)
    if is_bf16:
        low_ptr = tl.multiple_of(grad_address.to(tl.pointer_type(tl.bfloat16)), 16)
        main_grad = tl.load(low_ptr + index, mask=mask, other=0.0).to(tl.float32)
    else:
        grad_ptr = tl.multiple_of(grad_address.to(tl.pointer_type(tl.float32)), 16)
        main_grad = tl.load(grad_ptr + index, mask=mask, other=0.0)
    grad = tl.div_rn(main_grad * factor.to(tl.float32), divisor)
    new_first = exp_avg + (grad - exp_avg) * one_minus_beta1
    new_second = exp_avg_sq * beta2 + grad * grad * one_minus_beta2
    root = tl.div_rn(tl.sqrt_rn(new_second), root_correction) + eps
    moved = master - (lr * lr_factor * decay * master + step_size * lr_factor * tl.div_rn(new_first, root))
    # a select: a product with zero would be NaN if the gradient is Inf
    kept = tl.where(skip, master, moved)
    tl.store(first_ptr + index, tl.where(skip, exp_avg, new_first), mask=mask)
    tl.store(second_ptr + index, tl.where(skip, exp_avg_sq, new_second), mask=mask)
    if kind == PAIR:
        bits = tl.where(kept == kept, kept.to(tl.int32, bitcast=True), NAN)
        weight_ptr = tl.multiple_of(replica.to(tl.pointer_type(tl.int16)), 16)
        remainder_ptr = tl.multiple_of(master_address.to(tl.pointer_type(tl.int16)), 16)
        tl.store(weight_ptr + index, ((bits + 0x8000) >> 16).to(tl.int16), mask=mask)
        tl.store(remainder_ptr + index, bits.to(tl.int16), mask=mask)
    else:
        master_ptr = tl.multiple_of(master_address.to(tl.pointer_type(tl.float32)), 16)
        tl.store(master_ptr + index, kept, mask=mask)
    if kind == 1:
        tl.store(tl.multiple_of(replica.to(tl.pointer_type(tl.float32)), 16) + index, kept, mask=mask)
    elif kind == 2:
        tl.store(tl.multiple_of(replica.to(tl.pointer_type(tl.bfloat16)), 16) + index, kept.to(tl.bfloat16), mask=mask)
    elif kind == 3:
        tl.store(tl.multiple_of(replica.to(tl.pointer_type(tl.float16)), 16) + index, kept.to(tl.float16), mask=mask)
