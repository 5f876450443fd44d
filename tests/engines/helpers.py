"""A small odd model under any engine, and its state in bits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dtrain
from dtrain.checkpoint import open_newest
from dtrain.engine.step import StepEngine
from tests.helpers.checkpoints import ALONE

VOCAB, DIM, LENGTH = 5, 8, 4


class _Replaced(torch.autograd.Function):
    """Identity on a weight; may replace an element of its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, fault: tuple[int, float] | None) -> Tensor:
        ctx.fault = fault
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.fault is not None:
            element, value = ctx.fault
            grad = grad.clone(memory_format=torch.contiguous_format)
            grad.view(-1)[element] = value
        return grad, None


def _read(module: nn.Module, name: str) -> Tensor:
    """A parameter as the forward of its module reads it.

    A fault sits in the graph, so that no hook of an engine is passed by, and a node for it on ranks without one too:
    the graph decides in which order gradients are made.
    """
    faults: dict[str, tuple[int, float]] = getattr(module, "faults", {})
    return _Replaced.apply(getattr(module, name), faults.get(name))


class Embedding(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, _read(self, "weight"))


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, _read(self, "weight"), _read(self, "bias"))


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, _read(self, "weight"), _read(self, "bias"))


class Block(nn.Module):
    """Three rows, which two ranks do not divide."""

    def __init__(self, dropout: float, dim: int = DIM, inner: int = 3) -> None:
        super().__init__()
        self.norm = LayerNorm(dim)
        self.up = Linear(dim, inner)
        self.down = nn.Linear(inner, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class OddModel(nn.Module):
    """Tied, frozen and unused weights, buffers, five rows, a single element.

    If it is ``wide``, a block's flat buffer has ten chunks, which three ranks share unevenly, and they cut matrices.
    """

    largest: Tensor
    calls: Tensor

    def __init__(self, dropout: float = 0.0, *, wide: bool = False) -> None:
        super().__init__()
        dim, inner = (48, 100) if wide else (DIM, 3)
        self.embedding = Embedding(VOCAB, dim)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.frozen = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dropout, dim, inner) for _ in range(2))
        self.unused = nn.Linear(2, 3)
        self.mix = nn.Linear(dim, dim)
        self.head = Linear(dim, VOCAB)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        for parameter in self.frozen.parameters():
            parameter.copy_(parameter.bfloat16())  # so that a cast loses nothing
        self.register_buffer("largest", torch.tensor(0.1))
        self.register_buffer("calls", torch.tensor([3, 0]))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        if self.training:
            self.calls += 1
            self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        x = x + torch.tanh(self.frozen(x))
        for block in self.blocks:
            x = block(x)
        x = self.mix(x)
        return F.cross_entropy(self.head(x).float()[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch(index: int) -> Tensor:
    """Tokens [16, LENGTH] of the micro-batch with that global index."""
    start = torch.randint(VOCAB, (16, 1), generator=torch.Generator().manual_seed(index))
    return (start + torch.arange(LENGTH) * (1 + index % 3)) % VOCAB


def build(seed: int = 5, dropout: float = 0.0, *, wide: bool = False) -> OddModel:
    """The odd model; ``seed`` decides its weights."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        return OddModel(dropout, wide=wide)


def start(engine: str, stage: int, *, dropout: float = 0.0, seed: int = 5, wide: bool = False, **options: Any) -> Any:
    """The odd model under an engine, before its first step; ``seed`` decides its weights too."""
    torch.set_num_threads(1)
    schedule = dtrain.Cosine(warmup_steps=3, total_steps=40)
    # its norms are above 0.05: clipping is active
    settings = {"optimizer": dtrain.AdamW(lr=3e-3), "schedule": schedule, "max_grad_norm": 0.05, "seed": seed}
    settings |= {"engine": engine, "zero_stage": stage, **options}
    return dtrain.initialize(build(seed, dropout, wide=wide), **settings)


def train_step(engine: StepEngine, micro_batches: int, *, step: int | None = None) -> dtrain.StepOutcome:
    """One step on ``micro_batches`` over all ranks, those of ``step`` or else of the engine's own count."""
    step = engine.attempted_steps if step is None else step
    own = range(engine.rank, micro_batches, engine.world_size)
    for index in engine.accumulate(own):
        engine.backward(engine(tokens=batch(step * micro_batches + index)))
    engine.data_cursor += micro_batches
    return engine.step()


class Plain:
    """The same training in plain PyTorch, in one process; ``make`` gets the trained parameters by name."""

    def __init__(self, make: Callable[[dict[str, nn.Parameter]], list[torch.optim.Optimizer]], **model: Any) -> None:
        self.module = build(**model)
        self._trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self._optimizers = make(self._trained)
        self._steps = 0

    def step(self, micro_batches: int) -> None:
        for parameter in self._trained.values():
            parameter.grad = None
        for index in range(micro_batches):
            (self.module(batch(self._steps * micro_batches + index)) / micro_batches).backward()
        for optimizer in self._optimizers:
            optimizer.step()
        self._steps += 1

    def masters(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._trained.items()}


def held(engine: StepEngine) -> list[Tensor]:
    """Copies of all masters and states on this rank."""
    return [shard.data.clone() for kind in engine.states.saved_dtypes for shard in engine.states.local_shards(kind)]


def computed(engine: StepEngine) -> Tensor:
    """The output of a forward with the compute weights: 0-dim; all ranks call."""
    with engine.eval():
        return engine(tokens=batch(0))


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def digest(tensor: Tensor) -> str:
    """Digest of dtype, shape and bits."""
    content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


def state_digests(engine: StepEngine, *, buffers: bool = True) -> dict[str, str]:
    """Masters and states in full, and this rank's buffers, by ``kind:name``; all ranks call."""
    full = {
        f"{kind}:{name}": digest(state)
        for kind in engine.states.saved_dtypes
        for name, state in engine.states.full_state(kind)
    }
    own = engine.module.named_buffers() if buffers else ()
    return full | {f"buffer:{name}": digest(tensor) for name, tensor in own}


def fingerprints(folder: Path) -> dict[str, tuple[int, Any, Any]]:
    """Of all tensors of the newest checkpoint there but the frozen ones, whose dtype an engine decides."""
    reader = open_newest(folder, ALONE)
    return {t.label: (t.fingerprint, t.dtype, t.shape) for t in reader.tensors if t.kind != "frozen"}
