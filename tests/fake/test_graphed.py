"""A step is one graph: from the second step on each launches the same on the same memory, and reads nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.engine.graphs import captured
from dtrain.engine.graphs import step as graphed
from dtrain.engine.vote.ballot import Ballot
from tests.fake.device import DEVICE, HOST_READS
from tests.fake.harness import TOKENS, FakeRank, fake_engine
from tests.fake.launches import HAS_TRITON
from tests.fake.step_stream import StepStream, first_difference

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")

Forward = Callable[[Tensor], Tensor]


class _Graph:
    """Stands in for ``torch.cuda.CUDAGraph``: a capture records its stream, a replay runs nothing."""

    def __init__(self, rank: FakeRank, made: list[Any]) -> None:
        self.num_replays = 0
        self._rank = rank
        made.append(self)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local"
        # the second graph of a step reads memory of the first
        before = pool.pop() if pool else None
        self.stream = StepStream(self._rank.device, self._rank.launches, before)
        if before is None:
            pool.append(self.stream)
        self.stream.__enter__()

    def capture_end(self) -> None:
        self.stream.__exit__(None, None, None)

    def replay(self) -> None:
        self.num_replays += 1

    def register_generator_state(self, generator: Any) -> None: ...


@contextmanager
def captures(rank: FakeRank) -> Iterator[list[_Graph]]:
    """Inside, graphs are captured on the fake device; yields them."""
    made: list[_Graph] = []
    with (
        mock.patch.object(captured, "_new_graph", partial(_Graph, rank, made)),
        mock.patch.object(captured, "new_pool", list),
        mock.patch.object(graphed, "WARM_UP", 1),
        mock.patch.object(graphed, "_state", return_value=b""),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.cuda, "empty_cache"),
    ):
        yield made


def loss_of(rank: FakeRank) -> Forward:
    return lambda tokens: rank.engine(tokens, tokens).loss


def batch(num_micro_batches: int = 2) -> list[Tensor]:
    return [torch.zeros(2, TOKENS, dtype=torch.int64, device=DEVICE) for _ in range(num_micro_batches)]


def captured_twice(rank: FakeRank, forward: Forward | None = None) -> list[list[tuple[Any, ...]]]:
    """Returns the streams of two captures in the same memory: of two votes, and of two updates."""
    with captures(rank) as graphs, rank.device.no_waits():
        step, inputs = rank.engine.graphed_step(forward or loss_of(rank)), batch()
        for _ in range(2):  # the second one is captured
            step(inputs, max_grad_norm=1.0)
        (captured,) = step._captured.values()
        captured._votes, captured._updates, captured._issued = *map(_Graph, [rank] * 2, [graphs] * 2), []
        step._own.finalize()
        captured.capture(step._forward, inputs, [1.0, 1.0], {"max_grad_norm": 2.0})
        return [graphs[number].stream.entries for number in (0, 2, 1, 3)]


OPTIONS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"zero_stage": stage} for stage in range(4)},
    "one rank": {"world_size": 1},
    "fp16": {"precision": "fp16", "loss_scale": dtrain.LossScale("dynamic", growth_interval=1)},
    "fp8": {"precision": "fp8", "zero_stage": 3},
    "average, reproducible": {"ema_decay": 0.9, "reproducible": True},
    "replicas": {"shard_size": 4},
    "remainders": {"master": "remainder"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_two_steps_are_one_graph(name: str) -> None:
    options = {
        "world_size": 8,
        "graph": True,
        "schedule": dtrain.Cosine(total_steps=99, warmup_steps=9),
        **OPTIONS[name],
    }
    with fake_engine(**options) as rank:
        rank.two_steps()
        votes, vote, updates, update = captured_twice(rank)
        assert len(votes) > 100
        assert updates
        assert not first_difference(votes, vote)
        assert not first_difference(updates, update)


def read_value(rank: FakeRank) -> Forward:
    return lambda tokens: loss_of(rank)(tokens) * (2.0 if loss_of(rank)(tokens) > 0 else 1.0)


def branch_on_the_step(rank: FakeRank) -> Forward:
    return lambda tokens: loss_of(rank)(tokens) * 2.0 if rank.engine.attempted_steps % 2 else loss_of(rank)(tokens)


def number_of_the_host(rank: FakeRank) -> Forward:
    return lambda tokens: loss_of(rank)(tokens) * float(rank.engine.attempted_steps)


def reallocation(rank: FakeRank) -> Forward:
    """A buffer that outlives its step, and is another one in the next step."""
    kept = [torch.empty(8, device=DEVICE)]

    def forward(tokens: Tensor) -> Tensor:
        loss = loss_of(rank)(tokens) + kept[0].sum() * 0.0
        kept[0] = torch.empty(8, device=DEVICE)
        return loss

    return forward


@pytest.mark.parametrize("plant", [branch_on_the_step, number_of_the_host, reallocation])
def test_a_step_that_differs_from_the_last_is_found(plant: Callable[[FakeRank], Forward]) -> None:
    with fake_engine(8, graph=True) as rank:
        rank.two_steps()
        votes, vote, *_ = captured_twice(rank, plant(rank))
        assert first_difference(votes, vote)


def test_a_read_of_a_value_is_found() -> None:
    with fake_engine(8, graph=True) as rank, pytest.raises(HOST_READS):
        captured_twice(rank, read_value(rank))


def test_the_update_of_another_buffer_is_found() -> None:
    """A reallocation in the engine: the next step would update memory that the graph does not know."""
    with fake_engine(8, zero_stage=3, graph=True) as rank:
        rank.two_steps()
        own = rank.engine._launch_update

        def update(*args: Any) -> None:
            own(*args)
            vote = rank.engine._ballot.tensors
            vote.bad_gradient = rank.engine.monitor.found = torch.empty((), dtype=torch.int64, device=DEVICE)

        with mock.patch.object(rank.engine, "work", rank.engine.work._replace(update=update)):
            votes, vote, *_ = captured_twice(rank)
        assert first_difference(votes, vote)


@pytest.mark.parametrize("stage", range(4))
def test_what_outlives_a_step_keeps_its_address(stage: int) -> None:
    """Also in eager steps: nothing is allocated anew that the next step finds."""
    with fake_engine(8, zero_stage=stage) as rank:
        rank.two_steps()
        live = []
        for _ in range(3):
            rank.step(2)
            rank.engine.applied_steps  # noqa: B018 - finalizes the step
            gc.collect()
            # what is smaller holds numbers of the last step: its weights and its record
            live.append({place: size for place, size in rank.device.live("cuda").items() if size > 256})
        assert live[0] == live[1] == live[2]


def test_a_replay_does_what_the_host_does_in_a_step() -> None:
    """Counters, hash of the collectives, and the words of the vote are those of eager steps."""
    found = []
    for is_graphed in (False, True):
        with fake_engine(8, zero_stage=3, graph=True) as rank, captures(rank) as graphs:
            sent: list[list[int]] = []
            own = Ballot.words

            def words(ballot: Ballot, step: Any, own: Any = own, sent: list[list[int]] = sent) -> list[int]:
                sent.append(own(ballot, step))
                return sent[-1]

            step = rank.engine.graphed_step(loss_of(rank))
            with (
                mock.patch.object(Ballot, "words", words),
                mock.patch.object(graphed, "WARM_UP", 2 if is_graphed else 99),
            ):
                outcomes = [step(batch()).applied for _ in range(9)]
            schedule = rank.engine.comm.schedule
            found.append((sent, outcomes, schedule.hash, schedule.num_issued, rank.engine.attempted_steps))
            assert sum(graph.num_replays for graph in graphs) == (2 * 7 if is_graphed else 0)
    assert found[0] == found[1]
