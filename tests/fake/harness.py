"""Engines on fake CUDA tensors, as one rank of many, in one process and without a device.

To try an engine or an option in five lines::

    with fake_engine(world_size=1024, engine="native", zero_stage=3, precision="bf16") as rank:
        rank.step()  # set-up is done; a host read, a missing wait or a wrong size raises
        rank.collectives.clear()
        rank.step()
        print(rank.collectives.issued, rank.engine.memory())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import dtrain
from dtrain.config.model import ModelConfig
from dtrain.config.precision import Float8
from dtrain.models import build_model
from dtrain.precision.policy import PrecisionPolicy
from tests.fake.collectives import Collectives, fake_world
from tests.fake.device import DEVICE, FakeDevice, fake_cuda
from tests.fake.launches import HAS_TRITON, Launch, recorded_launches

VOCAB, TOKENS = 200, 16
CONFIG = ModelConfig(num_layers=2, hidden_dim=64, num_heads=2, max_seq_len=TOKENS)


@dataclass(frozen=True)
class FakeRank:
    """One rank of a job on fake devices."""

    engine: Any
    collectives: Collectives
    launches: list[Launch]
    device: FakeDevice

    def forward(self) -> Tensor:
        tokens = torch.zeros(2, TOKENS, dtype=torch.int64, device=DEVICE)
        return self.engine(tokens, tokens).loss  # type: ignore[no-any-return]

    def step(self, num_micro_batches: int = 2, forward: Callable[[], Tensor] | None = None) -> dtrain.StepOutcome:
        """Runs one step, in which the host may not wait for the device."""
        with self.device.no_waits():
            for _ in self.engine.accumulate(range(num_micro_batches)):
                self.engine.backward((forward or self.forward)(), weight=3.0)
            outcome: dtrain.StepOutcome = self.engine.step()
            return outcome

    def two_steps(self) -> None:
        self.step(1)
        self.step(1)


def on_fake_device(model: nn.Module) -> nn.Module:
    """Moves ``model`` from ``meta`` to the fake device, ties kept."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in moved:
                    values = torch.empty(parameter.shape, device=DEVICE)
                    moved[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                module._parameters[name] = moved[parameter]
    return model


@contextmanager
def fake_engine(
    world_size: int = 1,
    *,
    model: Callable[[], nn.Module] | None = None,
    config: ModelConfig = CONFIG,
    precision: str = "bf16",
    float8: Float8 | None = None,
    **options: Any,
) -> Iterator[FakeRank]:
    """Yields rank 0 of ``world_size`` with an engine of ``options``; by default of a language model of two blocks."""
    with torch.device("meta"):
        built = model() if model is not None else build_model(config, VOCAB, seed=0)
    # dtrain's default times products on the device
    policy = replace(PrecisionPolicy.named(precision), float8=float8 or Float8(choice="all", compile=HAS_TRITON))
    settings = {"optimizer": dtrain.AdamW(compile="auto" if HAS_TRITON else False), "seed": 0, **options}
    with ExitStack() as stack:
        device = stack.enter_context(fake_cuda())
        comm, collectives = stack.enter_context(fake_world(world_size))
        launches = stack.enter_context(recorded_launches(device, collectives))
        engine = dtrain.initialize(on_fake_device(built), comm=comm, precision=policy, **settings)
        yield FakeRank(engine, collectives, launches, device)
