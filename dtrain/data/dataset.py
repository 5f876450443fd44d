"""The record of a data set, and the interfaces of what it is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from dtrain.data.sampling import Indices, sample_ids

IGNORE_INDEX = -100
"""A target that does not count in the loss."""


class SampleSource(ABC):
    """Samples by their id."""

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Number of samples; ids are 0 to this, exclusive."""

    @abstractmethod
    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        """Returns the model's keyword arguments for these samples: CPU tensors with the samples along dimension 0.

        Among them ``targets``: :data:`IGNORE_INDEX` does not count in the loss. ``positions``, if documents share a
        sample, restart with each of them.
        """

    def order(self, seed: int, indices: Indices) -> Indices:
        """Returns the id of the sample at each of these global indices of the endless stream of samples."""
        return sample_ids(seed, indices, self.num_samples)


class Codec(Protocol):
    """Text of tokens.

    Attributes:
        end_id: token that ends a document, or None; a sample of text begins with it.
    """

    @property
    def end_id(self) -> int | None: ...

    def decode(self, tokens: Iterable[int] | Tensor) -> str:
        """Returns the text of 1-D ``tokens``; tokens outside of the vocabulary become U+FFFD."""


@dataclass(frozen=True)
class Dataset:
    """Training and validation samples of one source of data.

    Attributes:
        fingerprint: sha256 (hex) of all that decides the samples. It differs between ranks that read different data.
        description: one line about the source and the validation split.
        vocab_size: number of tokens that the data may contain.
        codec: text of its tokens.
        tokenizer_file: the ``tokenizer.json`` of its tokens, if there is one.
        mean_context: mean over tokens of the length of their document in their sample; None: the whole sample.
    """

    train: SampleSource
    validation: SampleSource
    fingerprint: str
    description: str
    vocab_size: int
    codec: Codec
    tokenizer_file: Path | None = None
    mean_context: float | None = None
