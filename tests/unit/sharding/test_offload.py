"""Masters, states and main grads on the host: the bits of training are those of the same kernel without offloading.

Copies between the two memories, which are one here, are made as late as they may be. One to the host arrives when it is
waited for; until then its target is NaN. One to the device is made at once, for work that is queued behind it, and once
more when it is waited for, or before the second next one: a device may read the source until then. So a missing wait,
or a buffer that is written too early, changes bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.transport.gradient_buffers import PrivateExchange
from dtrain.sharding import offload
from dtrain.sharding.offload import ReplicaStaging
from tests.helpers.ranks import run_ranks

DIM = 32


class Late:
    """A copy that is made once, in the first wait."""

    def __init__(self, copy: Callable[[], object]) -> None:
        self._copy: Callable[[], object] | None = copy

    def wait(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy()


class LateLink(offload.DeviceLink):
    """A link between two memories that are one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._in_flight: deque[Late] = deque()

    def start_to_host(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Late:
        for target, _ in pairs:
            target.fill_(torch.nan)
        return Late(lambda: self._copy(pairs))

    def start_to_device(self, target: Tensor, source: Tensor) -> Late:
        if len(self._in_flight) == 2:
            self._in_flight.popleft().wait()
        target.copy_(source)
        self._in_flight.append(Late(lambda: target.copy_(source)))
        return self._in_flight[-1]


@contextmanager
def apart_memory() -> Iterator[None]:
    """Inside, engines are built as if the memory of their device were not the host's."""
    is_host = mock.patch.object(Communicator, "device_is_host", property(lambda self: False))
    with is_host, mock.patch.object(offload, "DeviceLink", LateLink):
        yield


class Blocks(nn.Module):
    """Four equal groups, so that copies take turns with the buffers; the norms and biases are of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()


def make(*, is_offloaded: bool, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Blocks()
    settings = {"precision": "bf16", "zero_stage": 2, "seed": 0, "optimizer": dtrain.AdamW(lr=1e-2), **options}
    with apart_memory() if is_offloaded else nullcontext():
        return dtrain.initialize(model, **{"offload": "cpu" if is_offloaded else "none", **settings})


def train(engine: Any, num_steps: int = 3, weights: Sequence[float] = (1.0, 3.0), seed: int = 1) -> list[Any]:
    """Each step has one micro-batch for each of ``weights``."""
    generator = torch.Generator().manual_seed(seed)
    outcomes = []
    for _ in range(num_steps):
        for number in engine.accumulate(range(len(weights))):
            engine.backward(engine(torch.randn(4, DIM, generator=generator)), weight=weights[number])
        outcomes.append(engine.step())
    return outcomes


def state(engine: Any) -> dict[tuple[str, str], Tensor]:
    return {
        (kind, name): t.clone() for kind in engine.states.saved_dtypes for name, t in engine.states.full_state(kind)
    }


def is_equal(one: Any, other: Any) -> bool:
    first, second = state(one), state(other)
    return first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())


CASES: list[tuple[dict[str, Any], Sequence[float]]] = [
    ({"zero_stage": 2}, (1.0, 3.0)),
    ({"zero_stage": 1, "precision": "fp32"}, (1.0,)),
    ({"zero_stage": 3, "precision": "fp16", "loss_scale": dtrain.LossScale(init=2.0**20)}, (1.0, 1.0)),
    ({"ema_decay": 0.9, "audit": 1, "optimizer": dtrain.AdamW(groups={"blocks.1": {"lr_factor": 0.1}})}, (2.0,)),
    ({"optimizer": dtrain.TorchOptimizer(torch.optim.RAdam, lr=1e-2)}, (1.0, 1.0, 1.0)),
]


@pytest.mark.parametrize(("options", "weights"), CASES, ids=range(len(CASES)))
def test_training_has_the_bits_of_an_update_where_the_replicas_are(options: Any, weights: Sequence[float]) -> None:
    """The FP16 case skips steps until its loss scale is small enough."""
    plain, offloaded = make(is_offloaded=False, **options), make(is_offloaded=True, **options)
    assert offloaded.host_kinds
    outcomes = train(plain, 5, weights)
    assert repr(outcomes) == repr(train(offloaded, 5, weights))  # as text, because a norm that is NaN equals none
    assert outcomes[-1].applied
    assert is_equal(plain, offloaded)


def test_what_lies_where() -> None:
    engine = make(is_offloaded=True)
    train(engine, 2)
    memory, formula, numel = engine.memory(), engine.memory_formula(), engine.num_parameters
    norms_and_biases = sum(p.numel() for p in engine.module.parameters() if p.dim() < 2)
    assert formula == {
        "compute": 2 * numel + 2 * norms_and_biases - 2 * 4 * DIM,  # the norms are FP32, the biases BF16
        "main_grad": 4 * numel,
        "master": 4 * numel,
        "moments": 8 * numel,
        "frozen": 0,
    }
    assert all(memory[kind] >= nbytes for kind, nbytes in formula.items())
    assert set(engine.host_kinds) == {"master", "moments", "main_grad", "staging"}
    assert memory["transfer"] == 0, "only the sum of several ranks needs memory on the device"
    planned = engine.sharded.offload.max_device_nbytes
    assert planned(1) == 0 < planned(2)
    largest = max(buffer.segment.numel * buffer.layout.dtype.itemsize for buffer in engine.sharded.buffers)
    assert memory["staging"] <= 4 * (largest + 4)


def test_a_cpu_rank_accepts_the_setting_and_says_that_it_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        engine = make(is_offloaded=False, offload="cpu")
    assert engine.host_kinds == ()
    assert caplog.text.count("offload=cpu changes nothing here: the rank's device is a CPU") == 1


def test_checkpoints_pass_between_offloaded_states_and_others(tmp_path: Path) -> None:
    offloaded, other = make(is_offloaded=True), make(is_offloaded=False)
    train(offloaded, 2)
    offloaded.save(tmp_path / "first")
    other.load(tmp_path / "first")
    assert is_equal(offloaded, other)
    train(other, 2, seed=2)
    other.save(tmp_path / "second")
    offloaded.load(tmp_path / "second")
    assert is_equal(offloaded, other)
    assert train(offloaded, 2, seed=3) == train(other, 2, seed=3)
    assert is_equal(offloaded, other)


def test_weights_that_the_user_writes_reach_the_host() -> None:
    engines = [make(is_offloaded=False), make(is_offloaded=True)]
    for engine in engines:
        train(engine, 1)
        with engine.modify_weights("blocks.1"):
            for parameter in engine.module.blocks[1].parameters():
                parameter.mul_(0.5)
        with torch.no_grad():
            engine.module.blocks[2][1].weight.mul_(2.0)
        train(engine, 1, seed=2)
    assert is_equal(*engines)


def train_stages(rank: int, world: int) -> list[str]:
    """Returns the stages whose bits differ, or whose states lie elsewhere than expected."""
    wrong = []
    for stage in (1, 2, 3):
        plain = make(is_offloaded=False, zero_stage=stage)
        here = make(is_offloaded=False, zero_stage=stage, offload="cpu")
        # one micro-batch: of several, each one's gradients are summed over the ranks before they leave the device
        apart = make(is_offloaded=True, zero_stage=stage)
        outcomes = [train(engine, 2, weights=[1.0 + rank], seed=rank) for engine in (plain, here, apart)]
        is_alike = outcomes[0] == outcomes[1] == outcomes[2] and is_equal(plain, here) and is_equal(plain, apart)
        if not is_alike or here.host_kinds or not apart.host_kinds or here.memory() != plain.memory():
            wrong.append(f"stage {stage} on rank {rank}")
    return wrong


@pytest.mark.processes
def test_two_ranks_train_the_same_bits() -> None:
    assert not any(run_ranks(2, train_stages))


ARRIVAL = offload._Arrival


def early_release(*args: Any) -> Any:
    """The exchange gets a buffer back while it is copied."""
    *rest, (_, handle) = args
    handle.release()
    return ARRIVAL(*rest, None)


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a staging buffer is written while it is copied": (ReplicaStaging, "begin", lambda *_: None),
    "a gradient is read before it has arrived": (Late, "wait", lambda *_: None),
    "a gradient's buffer is written while it is copied": (offload, "_Arrival", early_release),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_wait_changes_bits(fault: str) -> None:
    plain = make(is_offloaded=False)
    train(plain)
    # one send in flight, as of large groups
    one_send = mock.patch.object(PrivateExchange, "finish_first", lambda self: self.num_started - 2)
    with one_send, mock.patch.object(*FAULTS[fault]):
        offloaded = make(is_offloaded=True)
        train(offloaded)
    assert not is_equal(plain, offloaded)
