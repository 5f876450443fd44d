"""Best-fit packing: documents side by side in samples of equal length, as few of them cut as possible.

Documents are placed longest first, each into the fullest sample that has room for it (Ding et al., "Fewer Truncations
Improve Language Modeling", 2024, arXiv 2404.10830). A document of n tokens has n - 1 pairs of input and target; one of
more pairs than a sample has room for is cut into fragments. The plan is computed once and lies beside the shards, so
that a sample stays a function of its number.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dtrain.data.shards.format import sha256_of
from dtrain.errors import ConfigError

_VERSION = 1
_PLAN_FILE = "plan.json"
_ARRAYS = ("starts", "lengths", "bounds")

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """Fragments of documents, in the order of the samples that they share.

    Attributes:
        starts: int64 [fragments], first token of each fragment, counted over all shards.
        lengths: int32 [fragments], number of its pairs of input and target.
        bounds: int64 [samples + 1]; sample ``i`` has the fragments from ``bounds[i]`` to ``bounds[i + 1]``, exclusive.
    """

    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    bounds: NDArray[np.int64]

    @property
    def num_samples(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_targets(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))


def pack_documents(document_ends: Int64, seq_len: int) -> Packing:
    """Packs documents, given the end of each in the stream of tokens, into samples of ``seq_len`` pairs."""
    starts, lengths = _cut(document_ends, seq_len)
    samples, num_samples = assign_samples(lengths, seq_len)
    order = np.argsort(samples, kind="stable")
    bounds = np.zeros(num_samples + 1, np.int64)
    np.cumsum(np.bincount(samples, minlength=num_samples), out=bounds[1:])
    return Packing(starts[order], lengths[order].astype(np.int32), bounds)


def _cut(document_ends: Int64, seq_len: int) -> tuple[Int64, Int64]:
    """Returns first token and number of pairs of each fragment, in the order of the stream."""
    begins = np.concatenate(([0], document_ends[:-1]))
    pairs = np.maximum(document_ends - begins - 1, 0)
    fragments = -(-pairs // seq_len)
    before = np.repeat(np.cumsum(fragments) - fragments, fragments)
    offsets = (np.arange(len(before)) - before) * seq_len  # within the document
    return np.repeat(begins, fragments) + offsets, np.minimum(np.repeat(pairs, fragments) - offsets, seq_len)


def assign_samples(lengths: Int64, seq_len: int) -> tuple[Int64, int]:
    """Returns the sample of each fragment, and the number of samples, by best-fit decreasing.

    All fragments of one length are placed together. Each of the fullest samples with room takes as many as fit, because
    after one fragment it is the fullest with room still.
    """
    samples = np.empty(len(lengths), np.int64)
    by_length = np.argsort(lengths.astype(np.min_scalar_type(seq_len)), kind="stable")  # 16 bits: a radix sort
    counts = np.bincount(lengths, minlength=seq_len + 1)
    ends = np.cumsum(counts)
    open_samples = _OpenSamples(seq_len)
    for length in np.flatnonzero(counts)[::-1].tolist():
        fragments = by_length[ends[length] - counts[length] : ends[length]]
        while len(fragments):
            found, room = open_samples.take(length, len(fragments))
            fit = room // length
            num_placed = min(len(fragments), len(found) * fit)
            full, rest = divmod(num_placed, fit)
            samples[fragments[:num_placed]] = np.repeat(found, fit)[:num_placed]
            fragments = fragments[num_placed:]
            open_samples.put(found[:full], room - fit * length)
            open_samples.put(found[full : full + 1] if rest else found[:0], room - rest * length)
            open_samples.put(found[full + (rest > 0) :], room, first=True)
    return samples, open_samples.total


class _OpenSamples:
    """Numbers of samples by the room that they have left."""

    def __init__(self, seq_len: int) -> None:
        self.total = 0
        self._seq_len = seq_len
        self._by_room: defaultdict[int, deque[Int64]] = defaultdict(deque)
        self._rooms: list[int] = []  # that have samples, ascending

    def take(self, length: int, num_fragments: int) -> tuple[Int64, int]:
        """Returns some of the fullest samples with room for ``length``, and their room; new ones if there are none."""
        place = bisect_left(self._rooms, length)
        if place == len(self._rooms):
            first = self.total
            self.total += -(-num_fragments // (self._seq_len // length))
            return np.arange(first, self.total), self._seq_len
        room = self._rooms[place]
        found = self._by_room[room].popleft()
        if not self._by_room[room]:
            del self._rooms[place]
        return found, room

    def put(self, samples: Int64, room: int, *, first: bool = False) -> None:
        if not len(samples) or not room:
            return
        numbers = self._by_room[room]
        if not numbers:
            insort(self._rooms, room)
        if first:
            numbers.appendleft(samples)
        else:
            numbers.append(samples)


def plan_folder(folder: Path, seq_len: int) -> Path:
    return folder / "packing" / str(seq_len)


def write_plan(folder: Path, packing: Packing, seq_len: int, fingerprint: str) -> dict[str, Any]:
    """Writes the plan of the shards in ``folder``, whose fingerprint is given; returns the content of its plan.json.

    plan.json is written last: without it, or if an array is not the one that it names, there is no plan.

    Raises:
        ConfigError: the files cannot be written.
    """
    target = plan_folder(folder, seq_len)
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / _PLAN_FILE).unlink(missing_ok=True)
        for name in _ARRAYS:
            _replace(target / f"{name}.npy", partial(np.save, arr=getattr(packing, name)))
        plan = {
            "version": _VERSION,
            "seq_len": seq_len,
            "shards": fingerprint,
            "samples": packing.num_samples,
            "fragments": len(packing.starts),
            "targets": packing.num_targets,
            "fill_percent": round(100 * packing.num_targets / max(1, packing.num_samples * seq_len), 3),
            "sha256": {name: sha256_of(target / f"{name}.npy") for name in _ARRAYS},
        }
        _replace(target / _PLAN_FILE, lambda file: file.write(json.dumps(plan, indent=2).encode() + b"\n"))
    except OSError as error:
        raise ConfigError(f"{target}: the plan cannot be written: {error.strerror}") from error
    return plan


def read_plan(folder: Path, seq_len: int, fingerprint: str) -> tuple[Packing, str]:
    """Returns the plan of the shards in ``folder`` by memory map, and the sha256 (hex) of its arrays.

    Raises:
        ConfigError: there is none, it is damaged, or it is of shards with another fingerprint.
    """
    target = plan_folder(folder, seq_len)
    try:
        plan = json.loads((target / _PLAN_FILE).read_bytes())
        if plan["version"] != _VERSION:
            raise _no_plan(folder, seq_len, f"has version {plan['version']!r:.40}, expected {_VERSION}")
        if plan["shards"] != fingerprint:
            raise _no_plan(folder, seq_len, "is of other shards than those that are in the folder now")
        for name in _ARRAYS:
            if (found := sha256_of(target / f"{name}.npy")) != plan["sha256"][name]:
                raise _no_plan(folder, seq_len, f"is damaged: {name}.npy has the sha256 {found[:12]}")
        arrays = {name: np.load(target / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS}
    except FileNotFoundError as error:
        raise _no_plan(folder, seq_len, f"does not exist: no file {Path(error.filename).name}") from None
    except OSError as error:
        raise _no_plan(folder, seq_len, f"cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise _no_plan(folder, seq_len, f"is damaged: {_PLAN_FILE}: {type(error).__name__}: {error!s:.80}") from None
    return Packing(**arrays), hashlib.sha256(json.dumps(plan["sha256"], sort_keys=True).encode()).hexdigest()


def _no_plan(folder: Path, seq_len: int, reason: str) -> ConfigError:
    command = f"dtrain data pack {shlex.quote(str(folder))} seq_len={seq_len}"
    return ConfigError(f"data.pack=best_fit: the plan {plan_folder(folder, seq_len)} {reason}; run {command}")


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
