"""Training data: the text, the order of samples, and the loader of micro-batches."""

from dtrain.data.dataset import Codec, Dataset, SampleSource
from dtrain.data.load import load_dataset
from dtrain.data.loader import BatchLoader, PrefetchedBatches, validation_batches
from dtrain.data.sampling import micro_batch_indices, sample_id, sample_ids
from dtrain.data.text import END_OF_DOCUMENT, TokenWindows

__all__ = [
    "END_OF_DOCUMENT",
    "BatchLoader",
    "Codec",
    "Dataset",
    "PrefetchedBatches",
    "SampleSource",
    "TokenWindows",
    "load_dataset",
    "micro_batch_indices",
    "sample_id",
    "sample_ids",
    "validation_batches",
]
