"""Autocast kernels that PyTorch lacks: on CPU with real tensors, for CUDA with fake tensors of the same dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, linalg
from torch._subclasses.fake_tensor import FakeTensorMode

from dtrain.precision import autocast_ops

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Function = Callable[[Tensor], Any]  # of a BF16 [4, 4], positive definite


def methods(*names: str, **arguments: Any) -> dict[str, Function]:
    return {name: lambda x, name=name: getattr(x, name)(**arguments) for name in names}


def first_of(name: str, num_inputs: int = 1) -> Function:
    return lambda x: getattr(linalg, name)(*[x] * num_inputs)[0]


REDUCTIONS: dict[str, Function] = {
    **methods("sum", "nansum", "mean", "nanmean", "var", "cov", "trace", "norm"),
    **methods("prod", "std", "cumsum", "cumprod", "logcumsumexp", "logsumexp", dim=0),
    "sum of rows": lambda x: x.sum(1),
    "mean of rows": lambda x: x.mean(-1, keepdim=True),
    "var of rows": lambda x: x.var(1, unbiased=False),
    "var_mean": lambda x: torch.var_mean(x, dim=1),
    "std_mean": torch.std_mean,
    "norm of rows": lambda x: torch.norm(x, 3, 1),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "vector_norm": linalg.vector_norm,
    "matrix_norm": linalg.matrix_norm,
    "matrix_norm 2": lambda x: linalg.matrix_norm(x, 2),
    "linalg.norm nuc": lambda x: linalg.norm(x, "nuc"),
    "dist": lambda x: torch.dist(x, x.flip(0)),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0)),
    "normalize": lambda x: F.normalize(x).sum(),
    "global average": lambda x: F.adaptive_avg_pool2d(x[None], 1),
    "einsum that only sums": lambda x: torch.einsum("ij->i", x),
}
LINALG: dict[str, Function] = {
    **{name: getattr(linalg, name) for name in ("inv", "pinv", "matrix_exp", "det", "slogdet", "cholesky", "qr")},
    **{name: getattr(linalg, name) for name in ("svd", "svdvals", "eigh", "eigvalsh", "lu", "cond")},
    **{name: first_of(name) for name in ("inv_ex", "cholesky_ex", "lu_factor", "ldl_factor")},
    **{name: first_of(name, 2) for name in ("solve_ex", "lstsq")},
    "solve": lambda x: linalg.solve(x, x),
    "inverse": torch.inverse,
    "pinv hermitian": lambda x: linalg.pinv(x, hermitian=True, rtol=1e-6),
    "solve_triangular": lambda x: linalg.solve_triangular(x, x, upper=True),
    "matrix_power": lambda x: linalg.matrix_power(x, 3),
    "Tensor.det": lambda x: x.det(),
    "logdet": torch.logdet,
    "cholesky_inverse": torch.cholesky_inverse,
    "cholesky_solve": lambda x: torch.cholesky_solve(x, x),
    "householder_product": lambda x: linalg.householder_product(x, x[0]),
    "torch.svd": torch.svd,
    "lu_solve": lambda x: linalg.lu_solve(*linalg.lu_factor(x), x),
}
OTHERS: dict[str, Function] = {
    **methods("softmax", "log_softmax", dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance_norm": lambda x: F.instance_norm(x[None]),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "huber_loss": lambda x: F.huber_loss(x, x),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "kl_div": lambda x: F.kl_div(x, x.abs(), reduction="batchmean"),
    "triplet": lambda x: F.triplet_margin_loss(x, x, x + 1),
    "gaussian_nll": lambda x: F.gaussian_nll_loss(x, x, x * x + 1),
}
FP32_FUNCTIONS = REDUCTIONS | LINALG | OTHERS
NOT_FAKE = {"cov", "global average", "lstsq", "householder_product", "instance_norm", "gaussian_nll"}
"""Functions that fake tensors do not support."""
CUDA_DIFFERS = {"matrix_norm 2", "linalg.norm nuc", "einsum that only sums"}
"""On CUDA's own lists, and there the first two refuse reduced-precision inputs, and the last is a matmul."""


@contextmanager
def autocast(device: str, dtype: torch.dtype = BF16) -> Iterator[None]:
    """As torch.autocast, which refuses CUDA on a machine without."""
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)


def test_reductions_linalg_norms_and_losses_are_fp32_on_cuda() -> None:
    with FakeTensorMode(), autocast("cuda"), autocast_ops.enabled("cuda"):
        x = 3 * torch.eye(4, dtype=BF16, device="cuda") + 0.3
        for name in FP32_FUNCTIONS.keys() - NOT_FAKE - CUDA_DIFFERS:
            output = FP32_FUNCTIONS[name](x)
            assert {part.dtype for part in (output if isinstance(output, tuple) else (output,))} == {FP32}, name


def test_on_a_cpu_they_compute_on_fp32_and_return_it() -> None:
    torch.manual_seed(0)
    root = torch.randn(4, 4)
    x = (root @ root.t() + torch.eye(4)).to(BF16)
    for name, function in FP32_FUNCTIONS.items():
        with autocast("cpu"), autocast_ops.enabled("cpu"):
            output = function(x)
        # elementwise parts of a function may run in BF16; reductions, decompositions and norms may not
        rtol = 2e-2 if name in ("gaussian_nll", "normalize") else 1e-6
        torch.testing.assert_close(output, function(x.float()), rtol=rtol, atol=1e-6, msg=name)


def test_matmuls_of_mixed_dtypes_are_bf16() -> None:
    narrow, wide = torch.ones(4, 4, dtype=BF16), torch.ones(4, 4)
    products: dict[str, Callable[[], Tensor]] = {
        "mv": lambda: wide.mv(narrow[0]),
        "dot": lambda: wide[0].dot(narrow[0]),
        "bilinear": lambda: F.bilinear(narrow, wide, torch.ones(2, 4, 4)),
        "multi_dot": lambda: linalg.multi_dot([narrow, wide, narrow]),
        "gru_cell": lambda: torch.gru_cell(narrow, wide, *[torch.ones(12, 4, dtype=BF16)] * 2),
        "lstm_cell": lambda: torch.lstm_cell(narrow, [wide, wide], *[torch.ones(16, 4, dtype=BF16)] * 2)[0],
    }
    with autocast("cpu"), autocast_ops.enabled("cpu"):
        assert {name: product().dtype for name, product in products.items()} == dict.fromkeys(products, BF16)


def test_explicit_dtypes_and_elementwise_operations_are_unchanged() -> None:
    integers, doubles = torch.arange(4), torch.eye(2, dtype=torch.float64)
    narrow = torch.ones(4, dtype=BF16)
    with autocast("cpu"), autocast_ops.enabled("cpu"):
        assert integers.sum().dtype == (integers > 1).sum().dtype == torch.int64
        assert doubles.mean().dtype == linalg.inv(doubles).dtype == torch.float64
        assert torch.dot(doubles[0], doubles[0]).dtype == torch.float64
        # what a user asks for is what he gets
        assert narrow.sum(dtype=BF16).dtype == narrow.softmax(0, dtype=BF16).dtype == BF16
        assert narrow.sum(dtype=torch.float64).dtype == torch.float64
        assert narrow.cumsum_(0).dtype == BF16
        assert torch.sum(narrow, 0, out=torch.empty((), dtype=BF16)).dtype == BF16
        assert narrow.amax().dtype == BF16, "it rounds nothing"
        assert (narrow + narrow).dtype == BF16


def test_a_sum_of_many_does_not_overflow_fp16() -> None:
    x = torch.full((70_000,), 1.0, dtype=FP16)
    with autocast("cpu", FP16), autocast_ops.enabled("cpu"):
        assert x.sum() == 70_000
    assert x.sum().isinf(), "a control: what happens without"


def test_gradients_come_back_in_the_dtype_of_the_input_and_errors_leave_autocast_on() -> None:
    x = (torch.eye(4) * 2).to(BF16).requires_grad_()
    with autocast("cpu"), autocast_ops.enabled("cpu"):
        loss = x.mean() + linalg.det(x)
    loss.backward()
    assert x.grad.dtype == BF16
    assert torch.equal(x.grad.float(), torch.full((4, 4), 1 / 16) + 8 * torch.eye(4))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_users_own_autocast_stays_what_it_is(device: str) -> None:
    with autocast_ops.enabled(device):
        assert torch.ones(4, dtype=BF16).sum().dtype == BF16, "nothing is cast without autocast"
    with FakeTensorMode() if device == "cuda" else nullcontext():
        x = torch.ones(4, 4, dtype=BF16, device=device)
        with autocast(device):
            for function in (Tensor.mean, Tensor.var, Tensor.nansum):
                assert function(x).dtype == BF16
            # of what torch has on its own lists nothing was replaced
            assert x.prod().dtype == FP32
            assert (x.float() @ x).dtype == BF16
    with autocast("cpu"), autocast_ops.enabled("cpu"):
        with pytest.raises(RuntimeError, match="must be batches of square matrices"):
            linalg.det(torch.ones(2, 3))
        assert torch.is_autocast_enabled("cpu")


def test_compiled_code_gives_the_same_dtypes() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cat((x.mean(0), linalg.det(x)[None]))

    x = torch.eye(4, dtype=BF16)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with autocast("cpu"), autocast_ops.enabled("cpu"):
        assert compiled(x).dtype == FP32
        assert torch.equal(compiled(x), function(x))
