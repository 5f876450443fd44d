"""The choice of a transport, for the ranks of a run, for the axes of their mesh, and for a second thread."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from dtrain.distributed.communicator import Communicator
from dtrain.distributed.logging import logger
from dtrain.distributed.transport.gloo_group import GlooGroup
from dtrain.distributed.transport.host_memory import HostMemory
from dtrain.distributed.transport.process_group import ProcessGroup
from dtrain.distributed.transport.shared_memory import compare_hosts
from dtrain.distributed.transport.single_rank import SingleRank


def make_communicator(
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    world: Communicator | None = None,
    shared_memory: bool = True,
) -> Communicator:
    """Returns the communicator over ``group``; None or a group of one: over a single rank. All its ranks call.

    Args:
        group: the ranks.
        device: where the tensors of the collectives live.
        world: if this is an axis of a mesh, the communicator over all ranks, whose schedule it shares; all of them
            call, each with its own group.
        shared_memory: let CPU ranks of one host read each other's buffers; the same on all ranks.

    Raises:
        DivergenceError: ``shared_memory`` differs between the ranks.
        CommunicationError: CPU ranks of ``group`` have failed before.
    """
    if group is None or dist.get_world_size(group) == 1:
        return SingleRank(device)
    choose = partial(make_communicator, shared_memory=shared_memory)
    schedule = None if world is None else world.schedule
    if device.type != "cpu":
        return ProcessGroup(group, device, choose, schedule)
    comm = GlooGroup(group, device, choose, schedule)
    reason = compare_hosts(comm.exchange_text, is_allowed=shared_memory)
    if world is not None:  # all groups of an axis alike: transports issue different collectives
        reason = "".join(world.exchange_text(reason))
    elif not reason:
        logger.info("the ranks share memory: buffers are read in place")
    elif shared_memory:
        logger.info(f"buffers are sent through sockets, not shared memory: {reason}")
    return comm if reason else HostMemory(group, device, choose, comm.schedule, comm.messages, world)
