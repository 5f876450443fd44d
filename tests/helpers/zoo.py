"""Small models that each break some assumption about models, with deterministic micro-batches.

    entry = make("gru")
    model = entry.build(0)                              # the same weights for the same seed, in any process
    loss = entry.loss(model, entry.batch(3))            # ``model`` may as well be an engine; the loss is FP32

``entry.loss`` and the micro-batches fit ``Oracle(model, loss=entry.loss)``. Everything is at module level, so a test
passes a name to its ranks and each of them calls ``make``. No training loss depends on a buffer that a forward writes,
so the order of micro-batches over ranks changes no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers import zoo_models as models
from tests.helpers.oracle import extract_loss


class Micro(NamedTuple):
    """One micro-batch: arguments of the model, and the target if the caller computes the loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor | None = None


@dataclass(frozen=True)
class ZooEntry:
    """One model of the zoo."""

    name: str
    build: Callable[[int], nn.Module]  # seed -> a new model in FP32; the global random state stays as it was
    batch: Callable[[int], Micro]  # index -> the micro-batch with that index, always the same

    def loss(self, model: Callable[..., Any], micro: Micro) -> Tensor:
        """Runs the forward of ``model``, or of an engine around it, and returns the mean loss of the micro-batch."""
        output = model(*micro.args, **micro.kwargs)
        return extract_loss(output) if micro.target is None else F.mse_loss(models.at_least_fp32(output), micro.target)


def _generator(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + index)


def _vectors(index: int, in_dim: int, out_dim: int, size: int = 4) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, in_dim, generator=_generator(index))
    mix = torch.randn(in_dim, out_dim, generator=_generator(-1))
    return x, torch.sin(x @ mix)


def _tokens(index: int) -> Tensor:
    start = torch.randint(models.VOCAB, (3, 1), generator=_generator(index))
    return start * 5 ** torch.arange(models.LENGTH) % models.VOCAB


def vector_batch(index: int, in_dim: int = 8, out_dim: int = 4) -> Micro:
    """The model returns a prediction, and the caller computes the loss."""
    x, y = _vectors(index, in_dim, out_dim)
    return Micro((x,), {}, y)


def token_batch(index: int) -> Micro:
    return Micro((), {"tokens": _tokens(index)})


def image_batch(index: int) -> Micro:
    images = torch.randn(4, 3, 6, 6, generator=_generator(index))
    return Micro((), {"images": images, "labels": (images.mean((1, 2, 3)) > 0).long()})


def sometimes_batch(index: int) -> Micro:
    x, y = _vectors(index, 8, 4)
    return Micro((x,), {"use_expert": index % 3 == 0}, y)


def mixed_batch(index: int) -> Micro:
    x, y = _vectors(index, 8, 4)
    return Micro((x, (x[:, :3], x[:, 3:6])), {"target": y, "gain": 0.5})


def labelled_batch(index: int) -> Micro:
    x, y = _vectors(index, 8, 4)
    return Micro((), {"x": x, "y": y})


def _build(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


def _entry(name: str, factory: Callable[[], nn.Module], batch: Callable[[int], Micro]) -> ZooEntry:
    return ZooEntry(name, functools.partial(_build, factory), batch)


_ENTRIES = [
    _entry("mlp", models.mlp, vector_batch),
    _entry("transformer", functools.partial(models.Transformer, dropout=0.2), token_batch),
    _entry("tied", functools.partial(models.Transformer, tied=True), token_batch),
    _entry("partly_frozen", models.PartlyFrozen, token_batch),
    _entry("unused", models.unused, vector_batch),
    _entry("sometimes_used", models.SometimesUsed, sometimes_batch),
    _entry("reused", functools.partial(models.Transformer, num_blocks=1, passes=2), token_batch),
    _entry("gru", models.recurrent, token_batch),
    _entry("attention", models.Attention, token_batch),
    _entry("conv_group_norm", functools.partial(models.conv_net, functools.partial(nn.GroupNorm, 2)), image_batch),
    _entry("conv_batch_norm", functools.partial(models.conv_net, nn.BatchNorm2d), image_batch),
    _entry("buffers", models.Buffers, vector_batch),
    _entry("mixed_arguments", models.mixed_arguments, mixed_batch),
    _entry("object_output", models.object_output, labelled_batch),
    _entry("odd_sizes", models.OddSizes, functools.partial(vector_batch, in_dim=7, out_dim=5)),
    _entry("nested", models.Nested, vector_batch),
    _entry("weight_norm", models.weight_norm, vector_batch),
]
ZOO = {entry.name: entry for entry in _ENTRIES}


def make(name: str) -> ZooEntry:
    """The entry of that name; ``ZOO`` holds them all."""
    return ZOO[name]
