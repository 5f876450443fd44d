"""What a loss of transformers' Trainer divides by: the number of items of the whole step, or of its own micro-batch.

[Note: shares of a step] Trainer counts the items of a step, such as targets, over all micro-batches and ranks, and
passes their number to the model as ``num_items_in_batch``. It takes every forward with ``**kwargs`` for one that
divides a sum of losses by it. A model that ignores the number returns the mean over its own micro-batch, and the sum of
such means grows with accumulation and ranks; so does a term that is added to the loss, such as that of a router. So the
part of a loss that is divided by the number stays, and the rest is multiplied by the micro-batch's share of the items.
The part is found by forward-mode differentiation: that of ``a / n + b`` is ``-n`` times the derivative by ``n``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

_TOLERANCE = 1e-5  # of the part that is divided, relative to the loss: FP32 rounds it

Kind = Literal["divided", "mean", "mixed"]


class CountedLoss:
    """Separates the part of losses that is divided by the number of items.

    Attributes:
        kind: of the losses so far: ``divided`` by the number as a whole, a ``mean`` that ignores it, or ``mixed``; None
            before the first.
    """

    kind: Kind | None = None

    @contextmanager
    def count(self, total: Tensor) -> Iterator[Tensor]:
        """Gives the number of items for a loss that is computed and passed to ``share`` inside."""
        if self.kind in ("divided", "mean"):
            yield total
            return
        with forward_ad.dual_level():
            watched = total.as_subclass(_WatchedCount)
            value = total.detach().float()
            watched.dual = forward_ad.make_dual(value, torch.ones_like(value))
            yield watched

    def share(self, loss: Tensor, count: Tensor, share: Tensor) -> Tensor:
        """Returns ``loss``, of which the part that is not divided by ``count`` is multiplied by ``share``."""
        divided = None
        if isinstance(count, _WatchedCount):
            loss, slope = forward_ad.unpack_dual(loss)
            divided = None if slope is None else -slope * count.as_subclass(Tensor)
            if self.kind is None:
                self.kind = self._kind_of(loss, divided, is_used=count.is_used)
        if self.kind == "divided":
            return loss
        return loss * share if divided is None else divided + (loss - divided) * share

    def _kind_of(self, loss: Tensor, divided: Tensor | None, *, is_used: bool) -> Kind:
        if divided is None:
            return "divided" if is_used else "mean"  # by a number of Python, which has no derivative
        is_whole = bool((loss - divided).abs() <= _TOLERANCE * loss.abs())
        return "divided" if is_whole or not loss.isfinite() else "mixed"


class _WatchedCount(Tensor):
    """A count in whose place functions get ``dual``, and which notes that."""

    dual: Tensor
    is_used = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attribute = func.__name__ == "__get__"  # such as its device

        def plain(value: Any) -> Any:
            if not isinstance(value, cls):
                return value
            if is_attribute:
                return value.as_subclass(Tensor)
            value.is_used = True
            return value.dual

        with torch._C.DisableTorchFunctionSubclass():
            return func(*pytree.tree_map(plain, args), **pytree.tree_map(plain, kwargs or {}))


@contextmanager
def of_this_rank(args: Any) -> Iterator[None]:
    """Context in which Trainer with ``args`` neither adds counts over ranks nor multiplies losses by their number."""
    before = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = before
