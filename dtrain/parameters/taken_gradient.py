"""What a parameter shows as its ``.grad`` once an engine has taken the gradient."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dtrain.errors import UsageError
from dtrain.parameters.running_backward import is_in_backward, require_running

INSTEAD = (
    "change gradients in a hook (parameter.register_hook), clip by max_grad_norm= of dtrain.initialize or engine.step "
    "(accelerator.clip_grad_norm_), and read the norm as engine.step().grad_norm"
)
"""What to write instead of lines that read or write gradients; the end of a message."""
_CLEARING = frozenset({torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default})


@dataclass
class Readers:
    """What is known of those who read the gradients of one engine.

    Attributes:
        engine: its name.
        is_warned: whether the warning was given.
        is_over: whether the step is over, so that gradients may be cleared.
    """

    engine: str
    is_warned: bool = False
    is_over: bool = False


class TakenGradient(Tensor):
    """A tensor without memory: its shape, dtype and device are the gradient's, its values are not there.

    They are weighted, scaled, summed over ranks or sharded elsewhere. So a read gives NaN and warns once, and a write
    is a ``UsageError``. Views of it are such tensors too.

    Attributes:
        of: name of the parameter.
        readers: shared by all gradients of an engine.
        held: the sum so far, for an engine whose library keeps it in ``.grad``.
    """

    of: str
    readers: Readers
    held: Tensor | None

    @staticmethod
    def __new__(cls, like: Tensor, of: str, readers: Readers) -> TakenGradient:
        dtype = getattr(like, "grad_dtype", None) or like.dtype  # a parameter's gradient may have another dtype
        made: TakenGradient = Tensor._make_wrapper_subclass(cls, like.shape, dtype=dtype, device=like.device)
        made.of, made.readers, made.held = of, readers, None
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given = (args, kwargs or {})
        tensors = [value for value in pytree.tree_leaves(given) if isinstance(value, Tensor)]
        taken = [value for value in tensors if isinstance(value, TakenGradient)]
        own = taken[0]
        if func in _CLEARING and all(one.readers.is_over for one in taken):
            for grad in tensors:
                if not isinstance(grad, TakenGradient):
                    grad.zero_()
            return args[0] if func is torch.ops.aten.zero_.default else None
        if func._schema.is_mutable and func is not torch.ops.aten.detach_.default:
            own._refuse(func)
        if not func.is_view:
            own._warn()
        args, kwargs = pytree.tree_map_only(TakenGradient, _nan, given)
        found = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, own._view, found) if func.is_view else found

    def _view(self, like: Tensor) -> TakenGradient:
        return TakenGradient(like, self.of, self.readers)

    def _refuse(self, func: Any) -> None:
        if is_in_backward():
            require_running(self.of)  # it is accumulated, by a backward of the user's own
        raise UsageError(
            f"'{self.of}'.grad is given to {func}, which writes, after engine.backward: engine={self.readers.engine} "
            f"has taken the gradient, so the write would be lost, or would write NaN. Remove the line; {INSTEAD}"
        )

    def _warn(self) -> None:
        if self.readers.is_warned:
            return
        self.readers.is_warned = True
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "dtrain.")):
            level, frame = level + 1, frame.f_back  # to the user's line
        warnings.warn(
            f"'{self.of}'.grad is read after engine.backward, and is NaN: engine={self.readers.engine} has taken the "
            f"gradient, which is summed over micro-batches and ranks, and unscaled, only in engine.step; {INSTEAD}",
            stacklevel=level,
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TakenGradient('{self.of}', shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def numpy(self, **options: Any) -> Any:
        return self.clone().numpy(**options)

    def tolist(self) -> Any:
        return self.clone().tolist()

    def to_local(self) -> Tensor:
        """Returns itself: under ``fsdp2`` gradients are expected to be DTensors."""
        return self

    def full_tensor(self) -> Tensor:
        """Returns itself, like ``to_local``."""
        return self


def held_gradient(parameter: Tensor) -> Tensor | None:
    """Returns the sum that an engine's library keeps in the ``.grad`` of a parameter, also while that shows nothing."""
    grad = parameter.grad
    return grad.held if isinstance(grad, TakenGradient) else grad


def _nan(like: Tensor) -> Tensor:
    return torch.full(like.shape, torch.nan, dtype=like.dtype, device=like.device)
