"""Training data: the text, the order of samples, and the loader of micro-batches."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.data.dataset import Dataset, SampleSource
    from dtrain.data.load import load_dataset
    from dtrain.data.loader import BatchLoader, PrefetchedBatches, validation_batches
    from dtrain.data.sampling import micro_batch_indices, sample_id, sample_ids
    from dtrain.data.text import END_OF_DOCUMENT, TokenWindows

__all__ = [
    "END_OF_DOCUMENT",
    "BatchLoader",
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

# resolved at first use (PEP 562): the processes that tokenize import this package, and they need no torch
_MODULES = {
    "dataset": ("Dataset", "SampleSource"),
    "load": ("load_dataset",),
    "loader": ("BatchLoader", "PrefetchedBatches", "validation_batches"),
    "sampling": ("micro_batch_indices", "sample_id", "sample_ids"),
    "text": ("END_OF_DOCUMENT", "TokenWindows"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return globals().setdefault(name, getattr(import_module(f"{__name__}.{module}"), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
