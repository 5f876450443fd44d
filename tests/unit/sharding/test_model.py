"""The refresh after an update: in which order buffers are updated, cast, gathered and waited for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dtrain.distributed.mesh import Mesh
from dtrain.optim.flat import BLOCK
from dtrain.precision.float8.cast import E4M3
from dtrain.sharding.model import ShardedModel

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Fake:
    """A part of a sharded model that records its calls as ``part.method``."""

    def __init__(self, name: str, events: list[str], **attributes: Any) -> None:
        self._name, self._events = name, events
        self.__dict__.update(attributes)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)

        def call(*_: Any) -> list[Any]:
            self._events.append(f"{self._name}.{method}")
            # a whole replica has nothing to gather
            gathers = method == "start_gather" and self.__dict__["is_gathered"]
            return [Fake(self._name, self._events)] if gathers else []

        return call


def make_model(
    numels: Sequence[int], *, float8: Sequence[int] = (), device: torch.device = CPU, is_gathered: bool = True
) -> tuple[Any, list[str]]:
    """Returns a model of groups 0, 1, ... of one buffer each, and its events since the first refresh."""
    events: list[str] = []
    groups = []
    for number, numel in enumerate(numels):
        fake = functools.partial(Fake, str(number), events)
        replica = fake(views=fake(), is_gathered=is_gathered, local=[])
        layout = fake(dtype=E4M3 if number in float8 else torch.bfloat16)
        buffer = fake(layout=layout, segment=fake(numel=numel), replica=replica)
        groups.append(fake(buffers=[buffer], replicas=[replica]))
    parts: list[Any] = [Fake(name, events) for name in ("reducer", "scales", "scheduler")]
    comm: Any = Fake("comm", events, device=device)
    model = ShardedModel(groups, *parts, Mesh(comm, comm, comm))  # type: ignore[arg-type]
    assert [event for event in events if "cast_master" in event] == [
        f"{number}.cast_master" for number in (*float8, *(n for n in range(len(numels)) if n not in float8))
    ], "the first refresh casts the masters as they are"
    events.clear()
    return model, events


def test_each_buffer_is_gathered_while_the_next_is_updated() -> None:
    model, events = make_model([BLOCK, BLOCK, BLOCK])
    model.refresh(lambda numbers: events.append(f"update {list(numbers)}"))
    assert events == [
        "scheduler.reshard",  # what is unsharded would keep the old values
        *("update [0]", "0.start_gather"),
        *("update [1]", "1.start_gather"),
        *("update [2]", "2.start_gather"),
        *("0.wait", "1.wait", "2.wait"),
        *("0.invalidate", "1.invalidate", "2.invalidate"),  # operands are made from gathered values
        "comm.publish",  # the shards, which stay as they are until the next update
    ]


def test_float8_weights_are_measured_first_and_cast_last() -> None:
    model, events = make_model([BLOCK] * 4, float8=[1, 3])
    model.refresh(lambda numbers: events.append(f"update {list(numbers)}"))
    assert events == [
        "scheduler.reshard",
        *("update [1, 3]", "scales.measure"),  # the maximum over the ranks is reduced during what follows
        *("update [0]", "0.start_gather"),
        *("update [2]", "2.start_gather"),
        *("scales.cast", "1.start_gather", "3.start_gather"),
        *("0.wait", "2.wait", "1.wait", "3.wait"),
        *(f"{number}.invalidate" for number in range(4)),
        "comm.publish",
    ]


def test_whole_replicas_are_waited_for_by_nobody() -> None:
    model, events = make_model([10, 10], is_gathered=False)
    model.refresh(lambda numbers: events.append("update"))
    assert not [event for event in events if "wait" in event]
    assert events[-3:] == ["0.invalidate", "1.invalidate", "comm.publish"]


def test_small_buffers_are_updated_together_on_a_cpu() -> None:
    model, _ = make_model([10, 10, BLOCK, 10, 10])
    updates: list[list[int]] = []
    model.refresh(lambda numbers: updates.append(list(numbers)))
    assert updates == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("numels", "is_gathered", "calls"),
    [
        ([10] * 8, False, [[0, 1, 2, 3, 4, 5, 6, 7]]),  # one launch
        ([10] * 8, True, [[0, 1], [2, 3], [4, 5], [6, 7]]),  # a few, so that gathers start early
        ([100, 10, 10, 10], True, [[0], [1, 2, 3]]),
        ([10, 10], True, [[0], [1]]),
        ([], True, []),
    ],
)
def test_on_a_gpu_buffers_are_updated_together(numels: list[int], is_gathered: bool, calls: list[list[int]]) -> None:
    model, _ = make_model(numels, device=GPU, is_gathered=is_gathered)
    updates: list[list[int]] = []
    model.refresh(lambda numbers: updates.append(list(numbers)))
    assert updates == calls
