"""Assertions of PyTorch's tests of DistributedDataParallel and of its sharded optimizer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import dtrain
from tests.corpus.assertions.accelerate_micro_batches import (
    a_rank_without_data_takes_part_by_a_dummy_that_counts_for_nothing,
)
from tests.corpus.assertions.deepspeed_gradients import PLAIN_SGD, X, dot_engine, expect_weight, step_on
from tests.corpus.assertions.megatron_states import an_override_of_decay_by_name_acts_on_what_matches_only
from tests.corpus.rows import assertion
from tests.engines.checks.optimizers import follows_torch
from tests.engines.matrix import Trial

SHARDED = "pytorch/pytorch test/distributed/optim/test_zero_redundancy_optimizer.py::TestZeroRedundancyOptimizer"

assertion(
    f"{SHARDED}Distributed::test_local_optimizer_parity",
    "A sharded optimizer trains to the same weights as the same optimizer without sharding.",
)(follows_torch)


@assertion(
    f"{SHARDED}SingleRank::test_state_dict",
    "After a load, SGD of momentum 0.9, buffer 1, gradient 1 and rate 0.1 moves a weight from 0.9 to 0.71.",
)
def a_loaded_momentum_goes_on_from_its_value(trial: Trial) -> None:
    sgd = dtrain.SGD(lr=0.1, momentum=0.9, weight_decay=0.0)
    engine = dot_engine(trial, torch.ones(3), optimizer=sgd)
    assert step_on(engine, [torch.ones(3)] * trial.ranks).applied
    expect_weight(engine, torch.full((3,), 0.9))
    folder = engine.save(trial.folder)
    other = dot_engine(trial, torch.zeros(3), optimizer=sgd)
    other.load(folder)
    assert step_on(other, [torch.ones(3)] * trial.ranks).applied
    expect_weight(other, torch.full((3,), 0.71))


@assertion(
    f"{SHARDED}Distributed::test_lr_scheduler",
    "A scheduler of torch over a sharded optimizer gives the weights that it gives over one that is not sharded.",
)
def a_scheduler_of_torch_moves_sharded_weights_as_whole_ones(trial: Trial) -> None:
    schedule = dtrain.TorchSchedule(StepLR, step_size=1, gamma=0.1)
    engine, plain = dot_engine(trial, schedule=schedule), nn.Parameter(torch.zeros(5))
    theirs = torch.optim.SGD([plain], lr=PLAIN_SGD.lr)
    scheduler = StepLR(theirs, step_size=1, gamma=0.1)
    for _ in range(4):
        theirs.zero_grad()
        (plain * X).sum().backward()
        theirs.step()
        scheduler.step()
        assert step_on(engine, [X] * trial.ranks).applied
        expect_weight(engine, plain.detach().clone())


class Task(nn.Module):
    """A weight whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.p * x


class Tasks(nn.Module):
    """Three modules, of which a forward uses the one it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = nn.ModuleList([Task() for _ in range(3)])

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.tasks[task](x).sum()


@assertion(
    "pytorch/pytorch test/distributed/test_c10d_gloo.py::DistributedDataParallelTest::"
    "test_global_local_unused_params_grad",
    "A parameter that only one rank uses has a gradient on all ranks; one that no rank uses has none.",
    ranks=(2,),
    refused=dict.fromkeys(("native-3", "fsdp2", "deepspeed-2", "deepspeed-3"), "the ranks have diverged"),
)
def a_parameter_that_one_rank_uses_is_trained_and_one_that_none_uses_is_not(trial: Trial) -> None:
    decayed = dtrain.AdamW(lr=0.5, groups={"tasks.*": {"weight_decay": 0.1}})
    engine = trial.engine(Tasks(), optimizer=decayed, max_grad_norm=None)
    engine.backward(engine(torch.ones(3), task=trial.rank))
    assert engine.step().applied
    if masters := engine.master_state():
        for name, weight in masters.items():
            moved = 0.0 if name == "tasks.2.p" else 0.5 + 0.5 * 0.1
            torch.testing.assert_close(weight, torch.full((3,), 1 - moved), rtol=0, atol=1e-6)


assertion(
    "pytorch/pytorch "
    "torch/testing/_internal/distributed/distributed_test.py::DistributedTest::test_ddp_grad_div_uneven_inputs",
    "If a rank has run out of data, the gradient is the mean over the ranks that still have some.",
)(a_rank_without_data_takes_part_by_a_dummy_that_counts_for_nothing)

assertion(
    f"{SHARDED}Distributed::test_multiple_param_groups",
    "Groups with their own weight decay, such as on biases, train as under an optimizer that is not sharded.",
)(an_override_of_decay_by_name_acts_on_what_matches_only)
