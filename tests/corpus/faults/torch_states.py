"""Buffers, averages and states that PyTorch's wrappers leave behind, or load without a word about the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tests.corpus.faults.torch_gradients import Mixed, inputs
from tests.corpus.rows import fault
from tests.corpus.training import SETTINGS, compare_masters, seeded, start, step_of
from tests.engines.matrix import ENGINES, Trial
from tests.helpers.oracle import Oracle


class Averaging(nn.Module):
    """A running mean that each forward replaces by another tensor, and does not write in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.75 * self.mean + 0.25 * x.detach().mean(0)
        return self.linear(x - self.mean).float().square().mean()  # type: ignore[no-any-return]


@fault(
    "pytorch/pytorch#63916",
    "A buffer that the forward replaces by a new tensor is not copied to the other ranks: they get its first value.",
    peers="DDP with broadcast_buffers",
)
def a_buffer_that_forwards_replace_is_copied_and_saved_as_it_is_now(trial: Trial) -> list[float]:
    """All ranks and the checkpoint have the value that rank 0 has computed."""
    engine, want = start(trial, seeded(Averaging)), torch.zeros(5)
    for micro_batches in inputs(2):
        step_of(engine, micro_batches)
        for micro_batch, _ in micro_batches[:: trial.ranks]:
            want = 0.75 * want + 0.25 * micro_batch["x"].mean(0)
    engine.save(trial.folder)
    engine.copy_buffers()
    assert torch.equal(engine.module.mean, want)
    resumed = start(trial, seeded(Averaging))
    resumed.load(trial.folder)
    assert torch.equal(resumed.module.mean, want)
    return want.tolist()


@fault(
    "pytorch/pytorch#111138",
    "Buffers that differ between ranks at the start stay different, because only parameters are copied from rank 0.",
    peers="DDP 2.1 with broadcast_buffers=False",
)
def all_ranks_begin_with_the_weights_and_buffers_of_rank_0(trial: Trial) -> list[float]:
    model = seeded(Mixed, seed=trial.rank)
    model.register_buffer("offset", torch.full((3,), float(trial.rank + 1)))
    engine, oracle = start(trial, model), Oracle(seeded(Mixed), optimizer=SETTINGS)
    before = oracle.masters()
    oracle.step(inputs(1)[0])
    step_of(engine, inputs(1)[0])
    if masters := engine.master_state():
        compare_masters(masters, oracle.masters(), before, 1e-5)
    assert engine.module.offset.tolist() == [1.0] * 3
    return engine.module.offset.tolist()  # type: ignore[no-any-return]


@fault(
    "pytorch/pytorch#84053",
    "An averaged model keeps the buffers of the moment of its creation, so its evaluation is that of another model.",
    peers="AveragedModel of torch with use_buffers=False",
)
def an_average_of_the_weights_is_evaluated_with_the_buffers_of_now(trial: Trial) -> None:
    engine, plain = start(trial, seeded(Averaging), ema_decay=0.5), Oracle(seeded(Averaging), optimizer=SETTINGS)
    # the forwards of the ranks see their own means, so every rank has the same samples
    pairs = [[pairs[0]] * 6 for pairs in inputs(3)]
    average = plain.masters()
    for micro_batches in pairs:
        step_of(engine, micro_batches)
        plain.step(micro_batches[: 6 // trial.ranks])
        average = {name: (average[name] + master) / 2 for name, master in plain.masters().items()}
    with engine.ema(), engine.eval():
        found = engine(x=torch.ones(2, 5))
    plain.model.load_state_dict(average, strict=False)
    torch.testing.assert_close(found, plain.model.eval()(torch.ones(2, 5)), rtol=1e-5, atol=1e-6)


class Bigger(Mixed):
    """One block more."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5)))


@fault(
    "pytorch/pytorch#148252",
    "A checkpoint with more weights than the model is loaded without a warning; those that are left over are ignored.",
    peers="DCP of torch",
    refused=dict.fromkeys(ENGINES, "which the model lacks"),
)
def a_checkpoint_of_a_bigger_model_is_refused(trial: Trial) -> None:
    engine = start(trial, seeded(Bigger))
    step_of(engine, inputs(1)[0])
    engine.save(trial.folder)
    start(trial, seeded(Mixed)).load(trial.folder)


class Overflowing(Mixed):
    """Multiplies the gradient of its single-element weight by ``factor``, while the loss stays finite."""

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        loss: Tensor = super().forward(x)
        gain = self.gain * 1
        if gain.requires_grad:
            gain.register_hook(lambda grad: grad * factor)
        return loss + gain.sum()


@fault(
    "pytorch/pytorch#115710",
    "If gradients are offloaded to the CPU, an Inf on one rank does not stop the others' update or lower their scale.",
    peers="FSDP with its own GradScaler",
    engines=("native", "deepspeed"),
    stages=(1, 2, 3),
)
def an_infinity_among_offloaded_gradients_stops_all_ranks(trial: Trial) -> str | None:
    """Only engines that offload; a single element is infinite, so that one rank's shard has it."""
    engine = start(trial, seeded(Overflowing), offload="cpu")
    first, second = inputs(2)
    assert step_of(engine, first).applied
    masters = engine.master_state()
    bad = [({**micro_batch, "factor": math.inf if i == 5 else 1.0}, w) for i, (micro_batch, w) in enumerate(second)]
    outcome = step_of(engine, bad)
    after = engine.master_state()
    assert not outcome.applied
    assert math.isfinite(outcome.loss)
    assert all(torch.equal(after[name], masters[name]) for name in masters)
    assert step_of(engine, second).applied
    return outcome.reason
