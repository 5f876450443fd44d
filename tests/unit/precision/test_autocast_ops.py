"""Autocast kernels that PyTorch lacks: on CPU with real tensors, for CUDA with fake tensors of the same dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, linalg, nn
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


LOWEST = torch.finfo(FP32).min
MASK, ROWS = torch.eye(4, dtype=torch.bool), torch.zeros(4, dtype=torch.long)
FILLS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "masked_fill": lambda x, value: x.masked_fill(MASK, value),
    "masked_fill_": lambda x, value: x.masked_fill_(MASK, value),
    "masked_fill by a tensor": lambda x, value: x.masked_fill(MASK, torch.tensor(value)),
    "masked_fill_ by a tensor": lambda x, value: x.masked_fill_(MASK, torch.tensor(value)),
    "fill_": lambda x, value: x.fill_(value),
    "fill_diagonal": lambda x, value: x.index_fill(0, ROWS[:1], value),
    "full_like": torch.full_like,
    "new_full": lambda x, value: x.new_full((2,), value),
    "full": lambda x, value: torch.full((2,), value, dtype=x.dtype),
    "where": lambda x, value: torch.where(MASK, x, value),
    "where, the other way": lambda x, value: torch.where(MASK, value, x),
    "scatter_": lambda x, value: x.scatter_(0, ROWS[None], value),
    "pad": lambda x, value: F.pad(x, (1, 0), value=value),
    "init.constant_": nn.init.constant_,
}
CLAMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda x: x.clamp(LOWEST, -LOWEST),
    "clamp, by name": lambda x: x.clamp(max=-LOWEST),
    "clamp_": lambda x: x.clamp_(min=LOWEST),
    "clamp_min": lambda x: x.clamp_min(LOWEST),
    "clip": lambda x: x.clip(LOWEST),
}


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_fill_value_beyond_the_range_of_16_bits_is_their_lowest_number(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    with autocast("cpu", dtype), autocast_ops.enabled("cpu"):
        for name, fill in FILLS.items():
            for value, expected in ((LOWEST, info.min), (-LOWEST, info.max), (-torch.inf, -torch.inf), (-2.0, -2.0)):
                filled = fill(torch.zeros(4, 4, dtype=dtype), value)
                assert (filled.dtype, filled.float().flatten().abs().max().item()) == (dtype, abs(expected)), name
                assert filled.float().sum().sign() == math.copysign(1, expected), name
        for name, clamp in CLAMPS.items():
            assert torch.equal(clamp(torch.ones(4, dtype=dtype)), torch.ones(4, dtype=dtype)), name
        assert torch.zeros(4).masked_fill_(MASK[0], LOWEST).min() == LOWEST, "FP32 has the range"
        assert torch.zeros(4, dtype=torch.float64).fill_(-1e300).min() == -1e300
        assert torch.full_like(torch.ones(4, dtype=dtype), LOWEST, dtype=FP32).min() == LOWEST
        assert torch.arange(4).masked_fill(MASK[0], 9).tolist() == [9, 1, 2, 3]
    with autocast("cpu", dtype), pytest.raises(RuntimeError, match="without overflow"):
        torch.zeros(4, 4, dtype=dtype).masked_fill(MASK, LOWEST)  # a user's own autocast


def rows(x: Tensor) -> Tensor:
    return torch.zeros(4, dtype=torch.long, device=x.device)


def mask(x: Tensor) -> Tensor:
    return torch.eye(4, dtype=torch.bool, device=x.device)


WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add": lambda x, source: x.index_add(0, rows(x), source),
    "index_copy": lambda x, source: x.index_copy(0, rows(x), source),
    "index_put": lambda x, source: x.index_put((rows(x),), source),
    "scatter": lambda x, source: x.scatter(0, rows(x).unsqueeze(1).expand(4, 4), source),
    "scatter_add": lambda x, source: x.scatter_add(0, rows(x).unsqueeze(1).expand(4, 4), source),
    "scatter_reduce": lambda x, source: x.scatter_reduce(0, rows(x).unsqueeze(1).expand(4, 4), source, "amax"),
    "masked_scatter": lambda x, source: x.masked_scatter(mask(x), source),
    "lerp": lambda x, source: x.lerp(source, 0.5),
    "lerp by a tensor": lambda x, source: x.lerp(source, source),
    "cross": lambda x, source: linalg.cross(x.narrow(1, 0, 3), source.narrow(1, 0, 3)),
}
WRITES_IN_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add_": lambda x, source: x.index_add_(0, rows(x), source),
    "index_copy_": lambda x, source: x.index_copy_(0, rows(x), source),
    "x[rows] = source": lambda x, source: setitem(x, rows(x), source),
    "x[mask] = source": lambda x, source: setitem(x, mask(x), source[0]),
    "scatter_": lambda x, source: x.scatter_(0, rows(x).unsqueeze(1).expand(4, 4), source),
    "scatter_add_": lambda x, source: x.scatter_add_(0, rows(x).unsqueeze(1).expand(4, 4), source),
    "scatter_reduce_": lambda x, source: x.scatter_reduce_(0, rows(x).unsqueeze(1).expand(4, 4), source, "sum"),
    "masked_scatter_": lambda x, source: x.masked_scatter_(mask(x), source),
}


def setitem(x: Tensor, index: Tensor, source: Tensor) -> Tensor:
    x[index] = source
    return x


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tensors_of_16_and_of_32_bits_meet(device: str) -> None:
    with FakeTensorMode() if device == "cuda" else nullcontext(), autocast(device), autocast_ops.enabled(device):
        for dtypes in ((BF16, FP32), (FP32, BF16), (BF16, BF16), (torch.float64, torch.float64)):
            for name, write in (WRITES | WRITES_IN_PLACE).items():
                if device == "cuda" and name.startswith("x["):
                    continue  # indexing needs a device
                x, source = (torch.ones(4, 4, dtype=dtype, device=device) for dtype in dtypes)
                expected = dtypes[0] if name in WRITES_IN_PLACE or dtypes[0] == dtypes[1] else FP32
                assert write(x, source).dtype == expected, (name, dtypes)


def test_their_gradients_have_their_own_dtypes() -> None:
    x, source = torch.ones(4, 4, dtype=BF16, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    with autocast("cpu"), autocast_ops.enabled("cpu"):
        (x * 2).index_add_(0, ROWS, source).masked_fill(MASK, LOWEST).clamp(-1).float().sum().backward()
    assert x.grad is not None
    assert source.grad is not None
    assert (x.grad.dtype, source.grad.dtype) == (BF16, FP32)
    assert torch.equal(x.grad, 2 * ~MASK)
    assert torch.equal(source.grad, (~MASK[0]).float().expand(4, 4))


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


def test_compiled_code_fills_and_writes_alike() -> None:
    def function(x: Tensor, source: Tensor) -> Tensor:
        out = x.new_zeros(4, 4).index_add_(0, ROWS, source)
        return torch.where(MASK, out.masked_fill(MASK, LOWEST), x.clamp(LOWEST))

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with autocast("cpu"), autocast_ops.enabled("cpu"):
        inputs = torch.eye(4, dtype=BF16), torch.ones(4, 4)
        assert compiled(*inputs).dtype == BF16
        assert torch.equal(compiled(*inputs), function(*inputs))
