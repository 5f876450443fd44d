"""Proof of the FP8 cast kernels on the device at hand: at first use their bits are compared with those of tensor code.

A compiler may get a kernel wrong in some launch shapes only: Triton 3.8 stores garbage in the transpose of a clamped
FP8 tile. So each variant of a kernel is compared on tiles of its own alignment and order before the first tensor is
cast with it. A variant that fails is named once, and tensor code casts in its place, with the same bits and more time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dtrain.distributed.logging import logger
from dtrain.precision.fake import is_fake
from dtrain.precision.float8 import cast
from dtrain.precision.float8.cast import Quantized, Scaling
from dtrain.precision.float8.matmul import ALIGNMENT, operand

_ROWS, _COLUMNS = 256, 192  # more than a tile of each kernel in both directions
_found: dict[tuple[Any, ...], str] = {}


def failed_proofs() -> list[str]:
    """Returns a line for each variant of a kernel that gave other bits than tensor code in this process."""
    return [reason for reason in _found.values() if reason]


def quantize(
    x: Tensor, dtype: torch.dtype, scaling: Scaling, *, both: bool, compiled: bool, traced: bool = False
) -> list[Quantized]:
    """Quantizes ``x`` as ``dtrain.precision.float8.cast.quantize``, and with ``both`` its transpose, in one read.

    ``compiled``: by Triton kernels, if ``x`` is on a GPU and they are proven; with the same bits. ``traced``: for the
    graph of a compiler, as operations that it sees, or in blocks as one operator.
    """
    tensors: Sequence[Tensor]
    has_kernel = not traced and scaling is not Scaling.SQUARES and cast.uses_kernels(x.device, compiled=compiled)
    if traced and scaling.in_blocks:
        tensors = torch.ops.dtrain.float8_quantize(x, dtype, both, compiled)
    elif has_kernel and x.numel() and proves_quantize(x, dtype, scaling, both=both):
        from dtrain.kernels import quantize as kernels  # it imports Triton, which only GPUs need

        tensors = kernels.quantize(x, dtype, scaling.value, both=both)
    else:
        tensors = (cast.quantized_both if both else cast.quantize)(x, dtype, scaling, traced=traced)
    return [Quantized(*tensors[first : first + 2]) for first in range(0, 4 if both else 2, 2)]


def proves_quantize(x: Tensor, dtype: torch.dtype, scaling: Scaling, *, both: bool) -> bool:
    """Whether ``kernels.quantize`` gives the bits of tensor code for tensors like ``x``."""
    is_turned = x.stride(0) == 1 and x.stride(1) != 1
    shape = _like(x.shape[0], _ROWS), _like(x.shape[1], _COLUMNS)
    key = ("quantize", x.dtype, dtype, scaling, both, is_turned, shape)
    return _prove(key, x, lambda: check_quantize(shape, x.dtype, dtype, x.device, scaling, both=both, turned=is_turned))


def proves_weights(on: Tensor, scaling: Scaling) -> bool:
    """Whether the kernels of FP8 weights give the bits of tensor code; ``on`` lies on their device."""
    return _prove(("weights", scaling), on, lambda: check_weights(on.device, scaling))


def _like(size: int, base: int) -> int:
    """Returns a size near ``base`` for which Triton compiles the same code as for ``size``."""
    return base + (16 if size % 16 == 0 else 3)


def _prove(key: tuple[Any, ...], on: Tensor, check: Callable[[], str]) -> bool:
    if on.device.type != "cuda" or is_fake(on):
        return True
    key = (on.device.index, *key)
    if key not in _found:
        with torch.no_grad(), _waiting_allowed():
            _found[key] = check()
        if _found[key]:
            logger.warning("%s; tensor code casts to FP8 in its place, which takes longer", _found[key])
    return not _found[key]


@contextmanager
def _waiting_allowed() -> Iterator[None]:
    """Lets the host read the comparison where a training loop forbids itself to wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def check_quantize(
    shape: tuple[int, int],
    source: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    scaling: Scaling,
    *,
    both: bool,
    turned: bool = False,
) -> str:
    """Compares ``kernels.quantize`` with tensor code; returns what differs, or an empty string.

    Both cast a tensor of ``shape`` and dtype ``source`` to ``dtype``: a transposed view if it is ``turned``. With
    ``both`` they cast its transpose too.
    """
    from dtrain.kernels import quantize as kernels

    for non_finite in (None, math.inf, math.nan):
        x = adversarial(shape, non_finite).to(source).to(device)
        x = x.t().contiguous().t() if turned else x
        want = (cast.quantized_both if both else cast.quantize)(x, dtype, scaling)
        got = kernels.quantize(x, dtype, scaling.value, both=both)
        pairs = dict(zip(("values", "scale", "transpose", "its scale"), zip(got, want, strict=False), strict=False))
        view = " transposed" if turned else ""
        what = f"quantize({source}{list(shape)}{view} to {dtype}, scales of {scaling.value}, {both=})"
        if different := _difference(what, pairs, non_finite):
            return different
    return ""


def check_weights(device: torch.device, scaling: Scaling) -> str:
    """Compares the kernels that measure, cast and transpose FP8 weights with tensor code, as ``check_quantize``."""
    from dtrain.kernels.float8 import ShardCasts, Transposes, WeightShard, set_scales

    shapes = ((_ROWS + 16, _COLUMNS + 16), (_ROWS + 3, _COLUMNS + 3))
    for shape, non_finite in product(shapes, (None, math.nan)):
        master = adversarial(shape, non_finite).to(device)
        values, by_row, turned_values, by_column = cast.quantized_both(master, cast.E4M3, scaling)
        scales = torch.cat((by_row, by_column)) if scaling is Scaling.ROWS else by_row.reshape(-1)
        copies = [torch.zeros(shape, dtype=cast.E4M3, device=device) for _ in range(1 + (scaling is Scaling.ROWS))]
        flat = [copy.view(-1) for copy in copies]
        casts = ShardCasts([WeightShard(master.view(-1), flat, 0, shape[1], [0, shape[0]])], scaling.value)
        amax, scale = torch.zeros_like(scales), torch.zeros_like(scales)
        casts.measure(amax)
        set_scales(amax, scale)
        casts.cast(scale)
        pairs = {"scale": (scale, scales), "values": (copies[0], values)}
        if scaling is Scaling.ROWS:
            pairs["column copy"] = copies[1], turned_values.t()
        (transpose,) = Transposes([copies[0]], ALIGNMENT)(copies[0])
        pairs["transpose"] = transpose, operand(copies[0], emulate=False, transposed=True)
        what = f"the casts of weights {list(shape)}, scales of {scaling.value}"
        if different := _difference(what, pairs, non_finite):
            return different
    return ""


def adversarial(shape: tuple[int, int], non_finite: float | None = None) -> Tensor:
    """Returns FP32 of many magnitudes: ties of FP8 and their neighbors, subnormal numbers and zeros.

    With ``non_finite`` one element is that, in the last row.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).ldexp(torch.randint(-20, 9, shape, generator=generator))
    ties = (x.view(torch.int32) & -0x40000) + torch.randint(-1, 2, shape, generator=generator, dtype=torch.int32)
    kind = torch.rand(shape, generator=generator)
    x = torch.where(kind > 0.5, ties.view(torch.float32), x)
    x[kind < 0.1] = 0.0
    x[0] = x[0] * 2.0**-30  # a row of its own scale, lost under one scale of all
    x[1] = 0.0
    if non_finite is not None:
        x[-1, -1] = non_finite
    return x


def _difference(what: str, pairs: Mapping[str, tuple[Tensor, Tensor]], non_finite: float | None) -> str:
    """Returns which of the ``pairs`` is the first with other bits, or an empty string; two NaN are equal."""
    import triton

    tile = "" if non_finite is None else f", with {non_finite} in it"
    for name, pair in pairs.items():
        got, want = (tensor.float() for tensor in pair)
        same = (got.view(torch.int32) == want.view(torch.int32)) | (got.isnan() & want.isnan())
        if count := int((~same).sum()):
            where = f"{count} of {want.numel()} {name}{tile}"
            return f"Triton {triton.__version__}: {what} differs from tensor code in {where}"
    return ""
