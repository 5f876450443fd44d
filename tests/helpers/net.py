"""A module of named parts whose forward is a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Net(nn.Module):
    """Its forward is ``run(net, ...)``; the parts, such as modules and parameters, are its attributes."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self._run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, *args, **kwargs)
