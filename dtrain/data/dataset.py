"""The record of a data set, and the interfaces of what it is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dtrain.data.sampling import Indices, sample_ids
from dtrain.tasks import Codec, Language, Task


class SampleSource(ABC):
    """Samples by their id."""

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Number of samples; ids are 0 to this, exclusive."""

    @abstractmethod
    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        """Returns the model's keyword arguments for these samples: CPU tensors with the samples along dimension 0.

        Among them ``targets``: ``dtrain.tasks.IGNORE_INDEX`` does not count in the loss. ``positions``, if
        documents share a sample, restart with each of them.
        """

    def order(self, seed: int, indices: Indices) -> Indices:
        """Returns the id of the sample at each of these global indices of the endless stream of samples."""
        return sample_ids(seed, indices, self.num_samples)

    def file(self, sample_id: int) -> str:
        """Returns the name of the file that holds this sample alone; empty if there is none."""
        return ""


@dataclass(frozen=True)
class Dataset:
    """Training and validation samples of one source of data.

    Attributes:
        fingerprint: sha256 (hex) of all that decides the samples. It differs between ranks that read different data.
        description: one line about the source and the validation split.
        task: what a model learns from it.
        tokenizer_file: the ``tokenizer.json`` of its tokens, if there is one.
        mean_context: mean over tokens of the length of their document in their sample; None: the whole sample.
    """

    train: SampleSource
    validation: SampleSource
    fingerprint: str
    description: str
    task: Task
    tokenizer_file: Path | None = None
    mean_context: float | None = None

    @property
    def codec(self) -> Codec | None:
        """Text of the tokens; None if the samples have none."""
        return self.task.codec if isinstance(self.task, Language) else None
