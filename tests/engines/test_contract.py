"""Which engine trains with a subset of the ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtrain
from dtrain.config.capabilities import CAPABILITIES
from dtrain.distributed.setup import make_communicator
from dtrain.errors import ConfigError
from tests.helpers.ranks import run_ranks


def initialize_with_a_subset(rank: int, world: int) -> list[str]:
    """Errors of each engine with a communicator of this rank only."""
    groups = [dist.new_group([other]) for other in range(world)]
    errors = []
    for engine in CAPABILITIES:
        comm = make_communicator(groups[rank], torch.device("cpu"))
        try:
            dtrain.initialize(nn.Linear(4, 4), engine=engine, precision="fp32", seed=0, comm=comm)
            errors.append("")
        except ConfigError as error:
            errors.append(str(error))
    return errors


@pytest.mark.processes
def test_only_the_native_engine_trains_with_a_subset_of_the_ranks() -> None:
    """The libraries reduce over the whole process group, so two parts would add up each other's gradients."""
    for native, *others in run_ranks(2, initialize_with_a_subset):
        assert native == ""
        assert all(
            "trains with all ranks of the process group, 2, and got a communicator of 1" in text for text in others
        )
