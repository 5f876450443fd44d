"""FP8: scales that are too old, zeros that become NaN, recomputation in another format, a load that rounds twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtrain
from tests.corpus.rows import fault
from tests.corpus.training import follows_oracle, seeded, start, step_of
from tests.engines.helpers import digest
from tests.engines.matrix import Trial

ROWWISE = dtrain.PrecisionPolicy.named("fp8", float8=dtrain.Float8(recipe="rowwise"))
RECIPES: dict[str, dict[str, Any]] = {"tensorwise": {}, "rowwise": {"precision": ROWWISE}}


class Stack(nn.Module):
    """Two FP8 Linears between two in BF16, without biases and dropout."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.first = nn.Linear(16, 32, bias=False)
        self.inner = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))
        self.last = nn.Linear(32, 1, bias=False)

    def outputs(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.inner:
            x = torch.tanh(checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return self.last(x).float()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x).square().mean()


def stack(seed: int = 0, **options: Any) -> Stack:
    return seeded(lambda: Stack(**options), seed)


def micro_batches(count: int = 6) -> list[tuple[dict[str, Tensor], float]]:
    draw = torch.Generator().manual_seed(1)
    return [({"x": torch.randn(4, 16, generator=draw)}, 1.0) for _ in range(count)]


def checked(engine: Any) -> Any:
    """The engine, whose inner Linears multiply in FP8."""
    assert engine.contract.float8_modules == ("inner.0", "inner.1")
    return engine


@fault(
    "NVIDIA/TransformerEngine#1047",
    "From the second micro-batch of a step on the outputs are wrong, since the cached FP8 weight has the scale of "
    "another step.",
    peers="TransformerEngine 1.7",
    precisions=("fp8",),
    variants=RECIPES,
)
def every_micro_batch_multiplies_by_the_float8_weight_of_its_step(trial: Trial) -> None:
    """The weights grow in the first steps by more than E4M3 has room for above a scale that is too old."""
    engine = checked(start(trial, stack(), optimizer=dtrain.AdamW(lr=0.5, weight_decay=0.0)))
    (sample, _), *_ = micro_batches(1)
    for _ in range(3):
        losses, masters = [], engine.master_state()
        for _ in engine.accumulate(range(3)):
            losses.append(engine(**sample))
            engine.backward(losses[-1])
        assert engine.step().applied
        assert all(torch.equal(loss, losses[0]) for loss in losses), losses
        if masters:
            exact = torch.func.functional_call(stack(), masters, kwargs=sample)
            torch.testing.assert_close(losses[0].detach(), exact, rtol=0.15, atol=0)


@fault(
    "pytorch/ao#4713",
    "A tensor of zeros, or a row of zeros with a scale of its own, becomes NaN in FP8.",
    peers="torchao",
    precisions=("fp8",),
    variants=RECIPES,
)
def zeros_stay_zeros_in_float8(trial: Trial) -> None:
    """A padded sample has activations and gradients of zero, and so has a padded micro-batch."""
    batches = micro_batches()
    batches[0][0]["x"][1:3] = 0.0
    batches[3][0]["x"].zero_()
    checked(follows_oracle(trial, stack, [batches, batches]))


@fault(
    "NVIDIA/Megatron-LM#7538",
    "A checkpointed block is computed in FP8 in the forward, and in BF16 when it is computed again.",
    peers="Megatron-LM core",
    precisions=("fp8",),
    variants=RECIPES,
)
def a_float8_block_that_is_computed_again_gives_the_same_bits(trial: Trial) -> None:
    def train(recompute: bool) -> list[Any]:
        engine = checked(start(trial, stack(recompute=recompute)))
        outcomes = [step_of(engine, micro_batches()) for _ in range(2)]
        numbers = [number for outcome in outcomes for number in (outcome.loss, outcome.grad_norm)]
        return [*numbers, *(digest(master) for master in engine.master_state().values())]

    assert train(recompute=True) == train(recompute=False)


@fault(
    "NVIDIA/Megatron-LM#6666",
    "After a load the FP8 weights are cast from values that were FP8 before, not from the FP32 masters, and differ "
    "from those that were saved.",
    peers="Megatron-LM core",
    precisions=("fp8",),
    variants=RECIPES,
)
def float8_weights_have_the_same_bits_after_a_load(trial: Trial) -> None:
    """Into an engine that began with other weights, and into the same one after it has trained on."""
    (sample, _), *_ = micro_batches(1)

    def evaluated(engine: Any) -> Tensor:
        with engine.eval():
            return engine(**sample)  # type: ignore[no-any-return]

    def trained(engine: Any) -> tuple[Any, ...]:
        outcome = step_of(engine, micro_batches())
        return outcome.loss, outcome.grad_norm, [digest(master) for master in engine.master_state().values()]

    engine, other = checked(start(trial, stack())), checked(start(trial, stack(seed=7)))
    for _ in range(2):
        step_of(engine, micro_batches())
    engine.save(trial.folder)
    saved, before = evaluated(engine), evaluated(other)
    after = trained(engine)
    assert not torch.equal(evaluated(engine), saved)
    assert not torch.equal(before, saved)
    for loaded in (engine, other):
        loaded.load(trial.folder)
        assert torch.equal(evaluated(loaded), saved)
        assert trained(loaded) == after
