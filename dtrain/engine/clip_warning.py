"""A warning for ``torch.nn.utils.clip_grad_norm_`` on parameters of an engine, where it finds no gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.nn.utils import clip_grad

from dtrain.engine.interface import Engine

_CLIP = "_clip_grads_with_norm_"
"""What ``clip_grad_norm_`` calls through its module, so that a reference to it that was taken earlier warns too."""

_not_warned: WeakSet[Engine] = WeakSet()


def warn_of_clipping(engine: Engine) -> None:
    """Lets ``clip_grad_norm_`` warn once if it is called for parameters of ``engine`` and finds no gradient."""
    _not_warned.add(engine)
    original = getattr(clip_grad, _CLIP, None)  # private: another torch may have no such function
    if original is not None and not hasattr(original, "_warns_of_engines"):
        setattr(clip_grad, _CLIP, _warning(original))


def _warning(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if _not_warned and all(parameter.grad is None for parameter in given):
            _warn({id(parameter) for parameter in given})
        original(given, *args, **kwargs)

    clip._warns_of_engines = True  # type: ignore[attr-defined]
    return clip


def _warn(given: set[int]) -> None:
    for engine in list(_not_warned):
        if any(id(parameter) in given for parameter in engine.module.parameters()):
            _not_warned.discard(engine)
            warnings.warn(
                "torch.nn.utils.clip_grad_norm_ has no effect on parameters of an engine, which hold no gradient; the "
                "engine clips the global norm itself, before its update: dtrain.initialize(..., max_grad_norm=...)",
                stacklevel=5,  # this function, the one above, clip_grad_norm_ and its decorator
            )
