"""Casts in the code that Inductor writes for a GPU: a kernel that only casts is told from one that casts what it made.

The code is written for compute capability 9.0 and not run.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.precision.float8.cast import E4M3, Scaling, cast, quantized_both, scale_of
from tests.fake.device import DEVICE
from tests.fake.launches import HAS_TRITON
from tests.measure import fused_casts

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")]

ROWS, COLUMNS = 512, 1024


def by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = scale_of(x.abs().amax(dim=-1), E4M3)
    return cast(x, scale.unsqueeze(-1), E4M3), scale


def amax(x: Tensor) -> Tensor:
    return x.abs().amax(dim=-1).amax()


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (COLUMNS,), weight, 1e-6)


def transposes(x: Tensor) -> tuple[Tensor, ...]:
    return quantized_both(x, E4M3, Scaling.TENSOR, traced=True)


class TwoCasts(torch.autograd.Function):
    """Casts its input in forward, and its gradient in backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return by_row(x)[0].float()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return by_row(grad)[0].float().to(torch.bfloat16)


# by name: the function, the number of its inputs, and how many of its kernels only cast, of those that read a matrix
PLANTED: dict[str, tuple[Callable[..., object], int, tuple[int, int]]] = {
    "a cast by rows": (lambda x: by_row(x), 1, (1, 1)),
    "an amax": (amax, 1, (1, 1)),
    "a measured matrix, then its cast with a transpose": (transposes, 1, (2, 2)),
    "a cast of a transpose": (lambda x: by_row(x.t()), 1, (2, 2)),
    "a cast beside a sum of squares": (lambda x: (by_row(x), x.float().square().sum(-1)), 1, (0, 1)),
    "an RMSNorm, then a cast by rows": (lambda x, w: by_row(normed(x, w)), 2, (0, 1)),
    "an RMSNorm, then one scale": (lambda x, w: transposes(normed(x, w)), 2, (0, 2)),
    "a SwiGLU, then a cast": (lambda x, w: by_row(F.silu(x) * x), 2, (0, 1)),
    "a sum of two matrices, then a cast": (lambda x: by_row(x + x.flip(0)), 1, (0, 1)),
    "weights of columns, then a cast": (lambda x, w: by_row(x * w), 2, (0, 1)),
    "no cast": (lambda x, w: normed(x, w), 2, (0, 1)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_kernel_that_only_casts_is_found(name: str) -> None:
    from tests.helpers.inductor_code import triton_code

    function, num_inputs, expected = PLANTED[name]

    def inputs() -> list[Tensor]:
        shapes = [(ROWS, COLUMNS), (COLUMNS,)][:num_inputs]
        return [torch.empty(shape, dtype=torch.bfloat16, device=DEVICE) for shape in shapes]

    kernels = triton_code(function, inputs)
    matrix = [kernel for kernel in kernels if any(read.num_elements == ROWS * COLUMNS for read in kernel.reads)]
    assert (sum(kernel.only_casts for kernel in matrix), len(matrix)) == expected, kernels
    assert not [kernel for kernel in kernels if kernel.only_casts and kernel not in matrix], kernels


def test_forward_and_backward_are_written_with_what_they_read_and_write() -> None:
    from tests.helpers.inductor_code import triton_code

    def inputs() -> list[Tensor]:
        return [torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)]

    apply = torch.compiler.allow_in_graph(lambda x: TwoCasts.apply(x))
    forward, backward = triton_code(lambda x: apply(x), inputs)
    assert (forward.phase, backward.phase) == ("forward", "backward")
    assert [(access.dtype, access.nbytes) for access in forward.reads] == [(torch.bfloat16, 2 * ROWS * COLUMNS)]
    assert [(access.dtype, access.nbytes) for access in forward.writes] == [(torch.float32, 4 * ROWS * COLUMNS)]
    assert "tl.float8e4nv" in forward.source


@pytest.mark.parametrize(
    ("recipe", "avoidable", "most"),
    [
        # in backward the gradient of the residual stream, which is needed in BF16 too
        ("tensorwise", (0, 1), 1350),
        pytest.param("rowwise", (0, 2), 1310, marks=pytest.mark.exhaustive),
        pytest.param("rowwise_bf16_wgrad", (0, 0), 1020, marks=pytest.mark.exhaustive),
    ],
)
def test_the_casts_of_a_llama_block_are_in_the_kernels_that_make_what_is_cast(
    recipe: str, avoidable: tuple[int, int], most: float
) -> None:
    """RMSNorm, SwiGLU and their backward; attention's results and the block's own gradient come from outside."""
    kernels = fused_casts.kernels_of(recipe)
    forward, backward = (fused_casts.count(kernels, phase) for phase in ("forward", "backward"))
    assert (forward.avoidable, backward.avoidable) == avoidable
    assert forward.casting == (2 if recipe == "tensorwise" else 1), "of attention's output, once for q, k and v"
    assert forward.mib + backward.mib < most
    before = sum(fused_casts.opaque_mib("before").values())
    assert before == pytest.approx(924, abs=1)
    for kernel in kernels:  # Triton 3.8 spoils the transpose of an FP8 tile after a clamp that propagates NaN
        stores_float8 = any(access.dtype.itemsize == 1 and access.dtype.is_floating_point for access in kernel.writes)
        assert not (stores_float8 and "clamp" in kernel.source)
