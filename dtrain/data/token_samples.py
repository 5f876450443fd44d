"""Samples of one folder of token shards: the stream in equal windows, or whole documents packed by a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtrain.data.dataset import SampleSource
from dtrain.data.growing import cut_rows
from dtrain.data.packing import Packing
from dtrain.data.sampling import Indices
from dtrain.tasks import IGNORE_INDEX

if TYPE_CHECKING:
    from dtrain.data.shards.reader import TokenShards

_SAMPLES_OF_CONTEXT, _TOKENS_OF_CONTEXT = 256, 1 << 19

Int64 = NDArray[np.int64]


class TokenStream(Protocol):
    """Tokens that are read by their position, such as ``dtrain.data.shards.reader.TokenShards``."""

    def read_ranges(self, starts: Int64, lengths: Int64) -> Int64:
        """Returns the tokens of ranges of different lengths, one after another."""


@dataclass(frozen=True, eq=False)
class ShardWindows(SampleSource):
    """Windows of ``seq_len + 1`` tokens with stride ``seq_len``: each token except the first is a target once.

    Attributes:
        masks_documents: give positions, which restart with each document, and count no target across a border.
    """

    shards: TokenShards
    seq_len: int
    masks_documents: bool

    @property
    def num_samples(self) -> int:
        return max(0, self.shards.num_tokens - 1) // self.seq_len

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        begins = sample_ids * self.seq_len
        windows = self.shards.read(begins, self.seq_len + 1)
        tokens, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
        if not self.masks_documents:
            return {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}
        rows, columns = self._borders(begins)
        targets[rows, columns - 1] = IGNORE_INDEX
        inside = columns < self.seq_len
        return _batch(tokens, targets, rows[inside], columns[inside])

    def _borders(self, begins: Int64) -> tuple[Int64, Int64]:
        """Returns row and column of the first tokens of documents; columns 1 to ``seq_len``."""
        ends = self.shards.document_ends
        documents = ends.search(np.concatenate((begins, begins + self.seq_len)))
        first, last = documents[: len(begins)], documents[len(begins) :]
        rows = np.repeat(np.arange(len(begins)), last - first)
        return rows, ends.take(_ranges(first, last - first)) - begins[rows]


@dataclass(frozen=True, eq=False)
class PackedDocuments(SampleSource):
    """The samples of a plan: fragments of documents, each with its own positions, then padding that does not count."""

    stream: TokenStream
    packing: Packing
    seq_len: int

    @property
    def num_samples(self) -> int:
        return self.packing.num_samples

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        bounds = self.packing.bounds
        counts = bounds[sample_ids + 1] - bounds[sample_ids]
        ends = np.cumsum(counts)
        fragments = _ranges(bounds[sample_ids], counts)
        rows = np.repeat(np.arange(len(sample_ids)), counts)
        lengths = self.packing.lengths[fragments].astype(np.int64)
        places = np.cumsum(lengths) - lengths  # among the pairs of the batch
        columns = places - places[ends - counts][rows]
        used = np.add.reduceat(lengths, ends - counts)

        stream = self.stream.read_ranges(self.packing.starts[fragments], lengths + 1)
        is_input = np.ones(len(stream), dtype=np.bool_)
        is_input[np.cumsum(lengths + 1) - 1] = False  # the last token of a fragment is a target only
        filled = np.arange(self.seq_len) < used[:, None]
        tokens = np.zeros(filled.shape, np.int64)
        targets = np.full(filled.shape, IGNORE_INDEX, np.int64)
        tokens[filled], targets[filled] = stream[is_input], stream[1:][is_input[:-1]]
        padded = np.flatnonzero(used < self.seq_len)
        return _batch(tokens, targets, np.concatenate((rows, padded)), np.concatenate((columns, used[padded])))


def _ranges(starts: Int64, counts: Int64) -> Int64:
    """Returns ``counts`` numbers from each of ``starts``, one range after another."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)


def _batch(tokens: Int64, targets: Int64, rows: Int64, columns: Int64) -> dict[str, Tensor]:
    """Returns a batch with positions that restart at these columns of these rows, and with each row."""
    begins = np.zeros(tokens.shape, np.int64)
    begins[rows, columns] = columns
    positions = np.arange(tokens.shape[1]) - np.maximum.accumulate(begins, axis=1)
    arrays = {"tokens": tokens, "targets": targets, "positions": positions}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def mean_context(source: SampleSource, seq_len: int | None = None) -> float:
    """Returns the mean over tokens of the length of their document in their sample, from some of the samples.

    Args:
        source: whose samples have positions.
        seq_len: of the rows into which samples are cut; None: they are not.
    """
    total = num_tokens = 0
    for sample in source.order(0, np.arange(min(_SAMPLES_OF_CONTEXT, source.num_samples))):
        batch = source.batch(np.array([sample]))
        positions = (batch if seq_len is None else cut_rows(batch, seq_len))["positions"]
        total += int((2 * positions + 1).sum())  # over a document of n tokens, the sum is n x n
        num_tokens += positions.numel()
        if num_tokens >= _TOKENS_OF_CONTEXT:
            break
    return total / num_tokens
