"""Training data: the text, the order of samples, and the loader of micro-batches."""

from dtrain.data.loader import BatchLoader, SampleSource, validation_batches
from dtrain.data.sampling import micro_batch_indices, sample_id, sample_ids
from dtrain.data.text import END_OF_DOCUMENT, TextDataset, TokenWindows, load_dataset

__all__ = [
    "END_OF_DOCUMENT",
    "BatchLoader",
    "SampleSource",
    "TextDataset",
    "TokenWindows",
    "load_dataset",
    "micro_batch_indices",
    "sample_id",
    "sample_ids",
    "validation_batches",
]
