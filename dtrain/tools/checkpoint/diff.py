"""``dtrain checkpoint diff``: differences of two checkpoints, computed in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dtrain.checkpoint.format.integrity import scan_file, verify_checkpoint
from dtrain.checkpoint.format.manifest import TensorEntry
from dtrain.checkpoint.format.safetensors_file import dtype_name
from dtrain.checkpoint.inspection import newest_checkpoint, path_in_errors
from dtrain.checkpoint.reader import CheckpointReader
from dtrain.checkpoint.state_diff import StateDifference, state_differences
from dtrain.errors import CheckpointError, nearest

_BLOCK_ELEMENTS = 1 << 20
_LEAST = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class ValueDifference:
    """Difference of one tensor's values.

    Attributes:
        label: ``kind:name``.
        num_different: number of elements whose bits differ.
        first: row-major index of the first of them.
        max_abs: largest |a - b|; NaN if a value is NaN.
        max_rel: largest |a - b| / |b|; infinite if a b is 0 or one of the two is infinite.
        normwise: ||a - b|| / ||b||, Euclidean, in FP64, with ||b|| over the finite values; infinite if those are all 0.
    """

    label: str
    numel: int
    num_different: int
    first: int
    max_abs: float
    max_rel: float
    normwise: float


@dataclass(frozen=True)
class Difference:
    """Differences between checkpoints a and b.

    Attributes:
        only_a: ``kind:name`` of tensors that only a holds.
        reshaped: (``kind:name``, dtype and shape in a, those in b) of tensors whose dtype or shape differ.
        values: tensors of equal shape and dtype whose values differ.
        state: differences of the state; two checkpoints of one run always differ here.
        num_compared: number of tensors of equal shape and dtype.
        num_read: number of those whose values were compared: their fingerprints differ, or ``every_byte`` is set.
        is_verified: whether every byte of both was verified.
    """

    a: Path
    b: Path
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    reshaped: tuple[tuple[str, str, str], ...]
    values: tuple[ValueDifference, ...]
    state: tuple[StateDifference, ...]
    num_compared: int
    num_read: int
    is_verified: bool

    @property
    def tensors_equal(self) -> bool:
        return not (self.only_a or self.only_b or self.reshaped or self.values)


def diff(
    a: Path | str, b: Path | str, *, kinds: Sequence[str] = (), every_byte: bool = False, verify: bool = True
) -> Difference:
    """Compares two checkpoints of any world sizes and engines.

    Verifies both completely first: a fingerprint in a manifest says nothing about a file that was damaged later.

    Args:
        a: one checkpoint, or a run directory or directory of checkpoints (the newest one is used).
        b: the same.
        kinds: compare only tensors of these kinds, such as ``master``; all by default.
        every_byte: also compare the values of tensors with equal fingerprints.
        verify: False verifies manifests, sizes and headers only, and the hash of each file whose values are compared.

    Raises:
        DamageError: a checkpoint does not verify; the message names it.
        CheckpointError: a path has no checkpoint, no tensor has one of ``kinds``, or a file cannot be read.
    """
    sides = [_Side(newest_checkpoint(path), verify=verify) for path in (a, b)]
    left, right = (side.tensors(kinds) for side in sides)
    for kind in kinds:
        if not any(entry.kind == kind for entry in (*left.values(), *right.values())):
            known = {entry.kind for side in sides for entry in side.manifest.tensors}
            raise CheckpointError(f"neither checkpoint holds a tensor of kind '{kind}'{nearest(kind, known)}")
    both = [(left[key], right[key]) for key in left.keys() & right.keys()]
    both.sort(key=lambda pair: (pair[0].kind, pair[0].name))
    same = [(x, y) for x, y in both if _format(x) == _format(y)]
    read = [(x, y) for x, y in same if every_byte or x.fingerprint != y.fingerprint]
    if not verify:
        sides[0].verify_files([x for x, _ in read])
        sides[1].verify_files([y for _, y in read])
    values = [_compare(sides[0].reader, sides[1].reader, entry) for entry, _ in read]
    return Difference(
        a=sides[0].path,
        b=sides[1].path,
        only_a=tuple(sorted(left[key].label for key in left.keys() - right.keys())),
        only_b=tuple(sorted(right[key].label for key in right.keys() - left.keys())),
        reshaped=tuple((x.label, _format(x), _format(y)) for x, y in both if _format(x) != _format(y)),
        values=tuple(value for value in values if value is not None),
        state=tuple(state_differences(sides[0].facts, sides[1].facts)),
        num_compared=len(same),
        num_read=len(read),
        is_verified=verify,
    )


class _Side:
    """One of the two checkpoints, verified, perhaps except for its data."""

    def __init__(self, path: Path, *, verify: bool) -> None:
        self.path = path
        with path_in_errors(path):
            self.manifest = verify_checkpoint(path, fast=not verify)
        self.reader = CheckpointReader(path, self.manifest)
        self.facts = {"step": self.manifest.step, **self.manifest.state}

    def tensors(self, kinds: Sequence[str]) -> dict[tuple[str, str], TensorEntry]:
        return {key: entry for key, entry in self.manifest.index.items() if not kinds or entry.kind in kinds}

    def verify_files(self, entries: Sequence[TensorEntry]) -> None:
        needed = {chunk.file for entry in entries for chunk in entry.chunks}
        with path_in_errors(self.path):
            for file in self.manifest.files:
                if file.name in needed:
                    scan_file(self.path, self.manifest, file)


def _format(entry: TensorEntry) -> str:
    return f"{dtype_name(entry.dtype)} {list(entry.shape)}"


def _compare(a: CheckpointReader, b: CheckpointReader, entry: TensorEntry) -> ValueDifference | None:
    """Returns the difference of one tensor's values, or None if every bit is equal."""
    num_different, first = 0, -1
    max_abs = max_rel = torch.zeros((), dtype=torch.float64)
    squares_difference = squares_b = 0.0
    for start in range(0, entry.numel, _BLOCK_ELEMENTS):
        stop = min(start + _BLOCK_ELEMENTS, entry.numel)
        x, y = (side.read(entry.kind, entry.name, start, stop) for side in (a, b))
        differs = _differs(x, y)
        sizes = y.to(_wide(entry.dtype)).abs()
        squares_b += float(sizes[sizes.isfinite()].square().sum())
        if not differs.any():
            continue
        if first < 0:
            first = start + int(differs.nonzero()[0])
        num_different += int(differs.sum())
        distance = _distance(x[differs], y[differs])
        # if only the bits differ, as for 0 and -0, the relative distance is 0 too
        relative = torch.where((distance == 0) | distance.isinf(), distance, distance / sizes[differs])
        max_abs, max_rel = torch.maximum(max_abs, distance.max()), torch.maximum(max_rel, relative.max())
        squares_difference += float(distance.square().sum())
    if first < 0:
        return None
    return ValueDifference(
        label=entry.label,
        numel=entry.numel,
        num_different=num_different,
        first=first,
        max_abs=float(max_abs),
        max_rel=float(max_rel),
        normwise=_ratio(squares_difference, squares_b),
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _distance(x: Tensor, y: Tensor) -> Tensor:
    """Returns |x - y| in FP64; integers are subtracted exactly before the conversion."""
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return (x.to(_wide(x.dtype)) - y.to(_wide(x.dtype))).abs()
    # flipping the top bit maps the order of uint64 to that of int64
    x, y = (z.view(torch.int64) ^ _LEAST if z.dtype == torch.uint64 else z.to(torch.int64) for z in (x, y))
    distance = torch.maximum(x, y) - torch.minimum(x, y)  # modulo 2^64
    return distance.to(torch.float64) + torch.where(distance < 0, 2.0**64, 0.0)


def _ratio(squares_difference: float, squares_b: float) -> float:
    if squares_b:
        return math.sqrt(squares_difference / squares_b)
    return math.inf * squares_difference if squares_difference else 0.0  # NaN stays NaN


def _differs(x: Tensor, y: Tensor) -> Tensor:
    """Returns bool [n]: whether the bits of two flat tensors of one dtype differ."""
    return (x.view(torch.uint8) != y.view(torch.uint8)).view(len(x), -1).any(dim=1)
