"""A warning for ``torch.nn.utils.clip_grad_norm_`` on parameters of an engine, which clips them itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.nn.utils import clip_grad

from dtrain.engine.interface import Engine

_CLIP = "_clip_grads_with_norm_"
"""Function that ``clip_grad_norm_`` looks up in its module at each call, so that earlier references to it warn too."""

_not_warned: WeakSet[Engine] = WeakSet()


def warn_of_clipping(engine: Engine) -> None:
    """Lets ``clip_grad_norm_`` warn once if it is called for parameters of ``engine``."""
    _not_warned.add(engine)
    original = getattr(clip_grad, _CLIP, None)  # private: another torch may have no such function
    if original is not None and not hasattr(original, "_warns_of_engines"):
        setattr(clip_grad, _CLIP, _warning(original))


def _warning(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        _warn({id(parameter): parameter.grad is not None for parameter in given})
        original(given, *args, **kwargs)

    clip._warns_of_engines = True  # type: ignore[attr-defined]
    return clip


def _warn(has_gradient: Mapping[int, bool]) -> None:
    """Warns of engines whose parameters are given, by ``id``: if they have gradients, or if no parameter has any."""
    for engine in list(_not_warned):
        own = [has_gradient[id(p)] for p in engine.module.parameters() if id(p) in has_gradient]
        if not own or (any(has_gradient.values()) and not any(own)):
            continue
        _not_warned.discard(engine)
        found = "sums that are not averaged yet, which it changes" if any(own) else "no gradient, so it has no effect"
        warnings.warn(
            f"torch.nn.utils.clip_grad_norm_ on parameters of engine={engine.name} finds {found}; remove the call: the "
            f"engine clips the global norm itself, before its update (dtrain.initialize(..., max_grad_norm=...))",
            stacklevel=5,  # this function, the one above, clip_grad_norm_ and its decorator
        )
