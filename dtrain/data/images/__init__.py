"""Images as training data: folders of files, and glyphs of fonts; to classify, or to learn to remove noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.data.images.load import load_images

__all__ = ["load_images"]


def __getattr__(name: str) -> Any:
    # resolved at first use (PEP 562): the processes that decode import this package, and they need no torch
    if name == "load_images":
        from dtrain.data.images.load import load_images

        return globals().setdefault(name, load_images)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
