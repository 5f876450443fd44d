"""The work of one rank among very many, none of which is started."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtrain.cli.resolve import compose
from dtrain.config.precision import LossScale
from dtrain.distributed.communicator import GradientSend
from dtrain.distributed.transport.choose import make_communicator
from dtrain.distributed.transport.process_group import ProcessGroup
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.engine.run_state import RunState
from dtrain.engine.vote.finalize import StepFinalizer
from dtrain.engine.vote.skips import SkipCounter
from dtrain.engine.vote.tensors import VoteTensors
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.planning.devices import find_device
from dtrain.planning.planned_run import PlannedRun
from dtrain.precision.loss_scale import LossScaleState
from dtrain.sharding.accumulate import GradientSum
from dtrain.sharding.gradients import ExchangedSending, FlatGradient
from dtrain.sharding.layout import CHUNK, ArenaSegment, ParamSpec, flat_layouts
from tests.helpers.vote_records import rank_records

LLAMA_8B = ("model=llama-8b", "model.vocab_size=128256", "model.recompute=full", "precision=bf16")


def planned_run(num_ranks: int, *keys: str, model: Sequence[str] = LLAMA_8B) -> PlannedRun:
    """Returns a run on GPUs with one sample a rank and step."""
    config = compose([*model, "train.micro_batch_size=1", f"train.global_batch_size={num_ranks}", *keys])
    tokens = torch.zeros(1, config.model.max_seq_len, dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens}
    return PlannedRun(config, find_device("h100-80gb", num_ranks), num_ranks, batch, config.model.vocab_size or 1)


class Texts(SingleRank):
    """A rank among ``world_size``; all send its own text, or rank by rank ``texts``."""

    def __init__(self, world_size: int, texts: Sequence[str] = ()) -> None:
        super().__init__(torch.device("cpu"))
        self.world_size, self._texts = world_size, list(texts)

    def exchange_text(self, text: str) -> list[str]:
        return self._texts or [text] * self.world_size


def seconds(*works: Callable[[], Any], rounds: int = 1) -> list[float]:
    """Returns the fewest seconds of the processor for each of ``works``, which take turns."""
    fewest = [math.inf] * len(works)
    gc.collect()
    for _ in range(rounds):
        for index, work in enumerate(works):
            start = time.process_time()
            work()
            fewest[index] = min(fewest[index], time.process_time() - start)
    return fewest


def vote_rows(world_size: int) -> Tensor:
    """Returns what all ranks send in the vote on a step that is applied."""
    return torch.tensor([rank_records(step=4).to_row()], dtype=torch.int64).expand(world_size, -1).contiguous()


def vote_host_work(rows: Tensor) -> Callable[[], None]:
    """Returns all that the host does in a step with the ``rows`` of all ranks: the decision and its outcome."""
    scale = LossScaleState.of(LossScale.of("dynamic"))
    comm, skips = Texts(len(rows)), SkipCounter(20)
    finalizer = StepFinalizer(
        comm, RunState("", 0), scale, skips, lambda decision: None, lambda *_: None, "{}", is_synchronous=True
    )
    tensors = VoteTensors()

    def run() -> None:
        _, packed = tensors.decide(rows)
        finalizer.post(packed, ())
        finalizer.finalize_step()
        assert finalizer.outcome().applied

    return run


@contextmanager
def fake_group(ranks: int) -> Iterator[ProcessGroup]:
    """Yields the communicator of rank 0 over torch's fake process group, which sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    assert dist.group.WORLD is not None
    try:
        yield ProcessGroup(dist.group.WORLD, torch.device("cpu"), make_communicator)
    finally:
        dist.destroy_process_group()


class _NoSum(GradientSum):
    def push(self, grads: Any, weights: Any, *, is_last: bool = False) -> None:
        """Reads the offsets of the gradients, as one launch on a GPU does, and sums nothing."""
        assert grads[1].storage_offset() > grads[0].storage_offset()


@contextmanager
def sent_gradient(ranks: int) -> Iterator[tuple[Callable[[], None], Callable[[], None], Callable[[], None]]]:
    """Yields what fills a gradient of 1,024 elements a rank, sends it, and receives those of all ranks, unsummed."""
    numel = ranks * CHUNK
    (layout,) = flat_layouts("block", [ParamSpec("weight", (ranks, CHUNK), torch.bfloat16)], ranks)
    weight = Weight(torch.ones(()), is_one=True)
    grad = torch.ones(ranks, CHUNK, dtype=torch.bfloat16)
    with fake_group(ranks) as comm:
        exchange = comm.gradient_exchange([GradientSend("block", numel, torch.bfloat16, ((0, numel),))], 0)
        segment, main_grad = ArenaSegment(layout, *layout.shard(0)), torch.zeros(CHUNK)
        sending = ExchangedSending(layout, exchange, 0)
        sent = FlatGradient(segment, comm, main_grad, sending, _NoSum(main_grad))

        def fill() -> None:
            exchange.begin(weight.value)
            sending.receive([0], [grad], weight, is_first=True)

        yield fill, sent.reduce, lambda: sent.finish_reduction(is_last=True)
