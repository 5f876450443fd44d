"""AdamW by a hand-written Triton kernel, over any number of segments in one launch."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import accumulate

import torch

from dtrain.config.optim import AdamW
from dtrain.errors import ConfigError
from dtrain.kernels.adamw import FIELDS, KINDS, NUM_WARPS, PAIR, TILE, adamw
from dtrain.kernels.tiles import TileTable
from dtrain.optim.rule import WIDE, UpdateScalars, UpdateSlice
from dtrain.precision.remainder import QUIET_NAN, RemainderPair


class TiledAdamW:
    """The update of the segments of an arena, any number of them in one launch; compiled before the first step.

    Args:
        record: hyper-parameters.
        segments: the slices of each segment, of any update classes.

    Raises:
        ConfigError: Triton failed to compile or to launch.
    """

    def __init__(self, record: AdamW, segments: Sequence[Sequence[UpdateSlice]]) -> None:
        self._record = record
        self._slices = [part for segment in segments for part in segment]  # keeps what the table points to
        self._rows = list(accumulate(map(len, segments), initial=0))  # of the first slice of each segment
        self._table = None
        if self._slices:  # a rank may have no segments
            num_tiles = [-(-part.master.numel() // TILE) for part in self._slices]
            self._table = TileTable(list(map(_row, self._slices)), num_tiles, self._slices[0].master.device)
            self._build(len(segments), self._slices[0].master.device)

    def _build(self, num_segments: int, device: torch.device) -> None:
        """Compiles by a skipped update, which changes no bit of a state."""
        # as in a Decision: Triton compiles for the dtypes of the scalars, and for their alignment
        code, _, _, divisor = torch.ones(4, dtype=torch.float64, device=device).unbind()
        try:
            self.update(range(num_segments), UpdateScalars(0.0, 1, grad_divisor=divisor, found_inf=code))
        except Exception as error:  # Triton's errors, and those of the C compiler that it runs
            raise build_error(error, device) from error

    def update(self, numbers: Sequence[int], scalars: UpdateScalars) -> None:
        """Updates the segments ``numbers``, with a launch for each run of adjacent ones; keeps the main grads."""
        beta1, beta2 = self._record.betas
        table = self._table
        if table is None:
            return
        own = scalars.on_device(self._numbers)
        for low, high in runs(numbers):
            table.launch(
                adamw,
                scalars.grad_divisor,
                scalars.found_inf,
                own,
                1 - beta1,
                beta2,
                1 - beta2,
                self._record.eps,
                first=self._rows[low],
                last=self._rows[high],
                FIELDS=FIELDS,
                TILE=TILE,
                WIDE=WIDE,
                PAIR=PAIR,
                NAN=QUIET_NAN,
                num_warps=NUM_WARPS,
            )

    def _numbers(self, lr: float, step: int) -> Sequence[float]:
        correction1, correction2 = (_bias_correction(beta, step) for beta in self._record.betas)
        return lr, lr / correction1, correction2**0.5


def build_error(error: Exception, device: torch.device) -> ConfigError:
    """Returns what to raise if a kernel of the optimizer phase fails before the first step."""
    reason = str(error).strip().partition("\n")[0]
    return ConfigError(
        f"Triton cannot compile the update for {device} ({type(error).__name__}: {reason}); it needs a C compiler, and "
        f"a directory that it can write to (TRITON_CACHE_DIR); or set optim.compile=false, AdamW(compile=False)"
    )


def _bias_correction(beta: float, step: int) -> float:
    """Returns 1 - beta^step without the cancellation of the difference."""
    return -math.expm1(step * math.log(beta)) if beta else 1.0


def _row(part: UpdateSlice) -> list[int]:
    master, replica = part.master, part.replica
    kind = PAIR if isinstance(master, RemainderPair) else KINDS[None if replica is None else replica.dtype]
    if isinstance(master, RemainderPair):
        replica, master = master.weight, master.remainder
    pointers = (master, part.main_grad, *part.states, replica)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in pointers]
    numel = part.master.numel()
    if numel % 16 or any(address % 16 for address in addresses):
        raise ValueError(f"{numel} elements of an update lie at {addresses}; expected multiples of 16")
    update_class = part.update_class
    scalars = _float_bits(update_class.weight_decay), _float_bits(update_class.lr_factor)
    return [*addresses, numel, kind, *scalars, int(part.main_grad.dtype == torch.bfloat16)]


def _float_bits(value: float) -> int:
    """Returns the bits of ``value`` in FP32, because a row holds integers."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the (first, one past the last) of each run of adjacent ``numbers``, which ascend."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
