"""Proof of the FP8 cast kernels on the device at hand: at first use their bits are compared with those of tensor code.

A compiler may get a kernel wrong in some launch shapes only: Triton 3.8 stores garbage in the transpose of a clamped
FP8 tile. So each variant of a kernel is compared on tiles of its own alignment and order before the first tensor is
cast with it. A variant that fails is named once, and tensor code casts in its place, with the same bits and more time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dtrain.distributed.logging import logger
from dtrain.precision.fake import is_fake
from dtrain.precision.float8 import cast
from dtrain.precision.float8.matmul import ALIGNMENT, operand

_ROWS, _COLUMNS = 256, 192  # more than a tile of each kernel in both directions
_found: dict[tuple[Any, ...], str] = {}


def failed_proofs() -> list[str]:
    """Returns a line for each variant of a kernel that gave other bits than tensor code in this process."""
    return [reason for reason in _found.values() if reason]


def proves_quantize(x: Tensor, dtype: torch.dtype, *, rowwise: bool, both: bool) -> bool:
    """Whether ``kernels.quantize`` gives the bits of tensor code for tensors like ``x``."""
    is_turned = x.stride(0) == 1 and x.stride(1) != 1
    shape = _like(x.shape[0], _ROWS), _like(x.shape[1], _COLUMNS)
    key = ("quantize", x.dtype, dtype, rowwise, both, is_turned, shape)
    return _prove(
        key, x, lambda: check_quantize(shape, x.dtype, dtype, x.device, rowwise=rowwise, both=both, turned=is_turned)
    )


def proves_weights(on: Tensor, *, rowwise: bool) -> bool:
    """Whether the kernels of FP8 weights give the bits of tensor code; ``on`` lies on their device."""
    return _prove(("weights", rowwise), on, lambda: check_weights(on.device, rowwise=rowwise))


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
    *,
    rowwise: bool,
    both: bool,
    turned: bool = False,
) -> str:
    """Compares ``kernels.quantize`` with tensor code; returns what differs, or an empty string.

    Args:
        shape: of the tensor that is cast.
        source: dtype of it.
        dtype: E4M3 or E5M2.
        device: where both run.
        rowwise: whether each row has its own scale.
        both: whether the transpose is cast too.
        turned: whether the tensor is a transposed view.
    """
    from dtrain.kernels.quantize import quantize

    for non_finite in (None, math.inf, math.nan):
        x = adversarial(shape, non_finite).to(source).to(device)
        x = x.t().contiguous().t() if turned else x
        want = cast.quantized_both(x, dtype, rowwise) if both else cast.quantized(x, dtype, rowwise)
        got = quantize(x, dtype, rowwise=rowwise, both=both)
        for name, own, expected in zip(("values", "scale", "transpose", "its scale"), got, want, strict=False):
            if different := _num_different(own, expected):
                what = (
                    f"quantize({source}{list(shape)}{' transposed' if turned else ''} to {dtype}, {rowwise=}, {both=})"
                )
                return _reason(what, name, different, expected, non_finite)
    return ""


def check_weights(device: torch.device, *, rowwise: bool) -> str:
    """Compares the kernels that measure, cast and transpose FP8 weights with tensor code, as ``check_quantize``."""
    from dtrain.kernels.float8 import ShardCasts, Transposes, WeightShard, set_scales

    for shape in ((_ROWS + 16, _COLUMNS + 16), (_ROWS + 3, _COLUMNS + 3)):
        for non_finite in (None, math.nan):
            master = adversarial(shape, non_finite).to(device)
            copies = [torch.zeros(master.numel(), dtype=cast.E4M3, device=device) for _ in range(1 + rowwise)]
            first_scales = [0, shape[0]] if rowwise else [0]
            casts = ShardCasts([WeightShard(master.flatten(), copies, 0, shape[1], first_scales)], rowwise=rowwise)
            amax = torch.zeros(sum(shape) if rowwise else 1, device=device)
            scale = torch.zeros_like(amax)
            casts.measure(amax)
            set_scales(amax, scale)
            casts.cast(scale)
            size = master.abs().nan_to_num(nan=math.inf)
            largest = torch.cat([size.amax(dim=1), size.amax(dim=0)]) if rowwise else size.amax().view(1)
            scales = cast.scale_of(largest, cast.E4M3)
            by_row = scales[: shape[0], None] if rowwise else scales
            values = cast.cast(master, by_row, cast.E4M3)
            by_column = cast.cast(master, scales[shape[0] :], cast.E4M3) if rowwise else values
            transpose = Transposes([copies[0].view(shape)], ALIGNMENT)(copies[0].view(shape))[0]
            turned = operand(copies[0].view(shape), emulate=False, transposed=True)
            pairs = {"amax": (amax, largest), "scale": (scale, scales), "values": (copies[0].view(shape), values)}
            pairs |= {"column copy": (copies[-1].view(shape), by_column), "transpose": (transpose, turned)}
            for name, (own, expected) in pairs.items():
                if different := _num_different(own, expected):
                    return _reason(
                        f"the casts of weights {list(shape)}, {rowwise=}", name, different, expected, non_finite
                    )
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


def _num_different(got: Tensor, want: Tensor) -> int:
    """Counts the elements whose bits differ; two NaN are equal."""
    own, expected = got.float(), want.float()
    same = (own.view(torch.int32) == expected.view(torch.int32)) | (own.isnan() & expected.isnan())
    return int((~same).sum())


def _reason(what: str, name: str, different: int, of: Tensor, non_finite: float | None) -> str:
    import triton

    tile = "" if non_finite is None else f", with {non_finite} in it"
    return f"Triton {triton.__version__}: {what} differs from tensor code in {different} of {of.numel()} {name}{tile}"
