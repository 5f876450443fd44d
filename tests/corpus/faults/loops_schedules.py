"""What happens between updates: the schedule of the learning rate, skipped steps, evaluations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import dtrain
from tests.corpus.faults.loops_beside import Beside, Step
from tests.corpus.rows import fault
from tests.corpus.training import SETTINGS, seeded
from tests.engines.matrix import Trial

SCHEDULE = dtrain.TorchSchedule(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.25)


def factor(updates: int) -> float:
    """Returns the factor of the learning rate after a number of updates, by ``SCHEDULE``."""
    return 0.25 ** (updates // 2)


class Rooted(nn.Module):
    """A loss that is finite and has a NaN as its gradient where ``kept`` is 0: the derivative of a root at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        return torch.sqrt(self.head(torch.tanh(self.hidden(x))).float().square().sum() * kept)


def rooted(step: int, bad: int | None = None) -> Step:
    """Six micro-batches; the gradient of the one with the number ``bad`` is NaN."""
    draw = torch.Generator().manual_seed(step)
    kept = [torch.tensor(float(index != bad)) for index in range(6)]
    return [({"x": torch.randn(4, 3, generator=draw), "kept": k}, 1.0) for k in kept]


@fault(
    "huggingface/diffusers#3954",
    "On N GPUs the schedule of the learning rate advances N times an update, so that it ends after a part of the run.",
    peers="examples of diffusers 0.17 with accelerate",
)
def the_schedule_advances_once_an_update_on_any_number_of_ranks(trial: Trial) -> None:
    both = Beside(trial, seeded(Rooted), factor=factor, schedule=SCHEDULE)
    rates = [both.step(rooted(step)).lr for step in range(4)]
    assert rates == [SETTINGS.lr * factor(updates) for updates in range(4)]


@fault(
    "huggingface/accelerate#4242",
    "With the fused AdamW, a step that is skipped for an overflow is taken for an update, and the schedule advances.",
    peers="accelerate 1.14",
)
def a_skipped_step_does_not_advance_the_schedule(trial: Trial) -> None:
    """The bad gradient is that of the last micro-batch, which is on the last rank."""
    both = Beside(trial, seeded(Rooted), factor=factor, schedule=SCHEDULE)
    for step, updates in enumerate((0, 1, 1, 2)):
        outcome = both.step(rooted(step, bad=5 if step == 1 else None))
        assert outcome.applied == (step != 1)
        assert outcome.lr == SETTINGS.lr * factor(updates)
    assert (both.engine.attempted_steps, both.engine.applied_steps) == (4, 3)


class Pretrained(nn.Module):
    """A frozen trunk that the user keeps in eval mode, with statistics of its own, below a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).requires_grad_(False)
        nn.init.constant_(self.trunk[1].running_mean, 0.7)
        nn.init.constant_(self.trunk[1].running_var, 2.0)
        self.norm, self.head = nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.trunk.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.trunk(x)))).float().square().mean()


@fault(
    "Lightning-AI/pytorch-lightning#2551",
    "After a validation all modules are in training mode, so that a frozen part changes its running statistics.",
    peers="Lightning before 2.2",
)
def an_evaluation_leaves_the_mode_of_every_module(trial: Trial) -> None:
    both = Beside(trial, seeded(Pretrained))
    trunk, norm = both.engine.module.trunk, both.engine.module.norm
    draw = torch.Generator().manual_seed(1)
    for _ in range(2):
        both.step([({"x": torch.randn(4, 3, generator=draw)}, 1.0) for _ in range(6)])
        seen = norm.num_batches_tracked.item()
        with both.engine.eval():
            assert not norm.training
            both.engine(x=torch.randn(4, 3, generator=draw))
        assert norm.training
        assert norm.num_batches_tracked.item() == seen, "an evaluation is not counted"
        assert not any(module.training for module in trunk.modules())
        assert trunk[1].running_mean.eq(torch.tensor(0.7)).all()
        assert trunk[1].num_batches_tracked.item() == 0
