"""A Triton kernel that needs more registers than a thread has."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def spilling(source, target, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    x = tl.load(source + index)
    total = tl.cumsum(x)
    tl.debug_barrier()
    # all elements of x and of its sums are needed after the barrier
    tl.store(target + index, total / tl.sum(total) + x)
