"""The buffers that a model's state dict holds."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers of ``model`` that its state dict holds, such as running statistics, by name."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        if name not in transient:
            yield name, buffer.detach()
