"""One rank's row of a vote, built and changed by the names of its fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dtrain.engine.vote.decide import DecodedDecision
from dtrain.engine.vote.record import DeviceRecord, HostRecord

HOST_FIELDS = tuple(field.name for field in fields(HostRecord))
DEVICE_FIELDS = tuple(field.name for field in fields(DeviceRecord))
FLOATS = {field.name for record in (HostRecord, DeviceRecord) for field in fields(record) if field.type == "float"}

# two micro-batches of weight 1 and loss 2
_CLEAN = {
    "step": 4, "config_hash": 1 << 55, "num_micro_batches": 2, "schedule_hash": 77, "data_cursor": 640, "lr": 1e-3,
    "loss_scale": 8.0, "max_grad_norm": math.inf, "grad_factor": 1.0, "written_weights": 0, "stop_requested": 0,
    "save_failed": 0, "busy_s": 0.0, "sum_weights": 2.0, "sum_weighted_loss": 4.0, "sum_squares": 100.0,
}  # fmt: skip


@dataclass(frozen=True)
class RankRecords:
    """The two records of one rank."""

    host: HostRecord
    device: DeviceRecord

    def __getitem__(self, name: str) -> Any:
        return getattr(self.host if name in HOST_FIELDS else self.device, name)

    def replaced(self, **values: Any) -> RankRecords:
        return rank_records(**{**vars(self.host), **vars(self.device), **values})

    def to_row(self) -> list[int]:
        return [*self.host.to_row(), *self.device.to_row()]


def rank_records(**values: Any) -> RankRecords:
    """The records of a clean rank, except for ``values``."""
    values = {**_CLEAN, **values}
    host = HostRecord(**{name: values.pop(name) for name in HOST_FIELDS})
    return RankRecords(host, DeviceRecord(**values))


def table(records: Sequence[RankRecords], device: torch.device | None = None) -> Tensor:
    return torch.tensor([one.to_row() for one in records], dtype=torch.int64, device=device)


def decoded(reason: str | None, loss: float, grad_norm: float, records: Sequence[RankRecords]) -> DecodedDecision:
    return DecodedDecision.of(reason, loss, grad_norm, table(records).numpy())


def ranks_of(decision: DecodedDecision) -> list[RankRecords]:
    return [RankRecords(host, device) for host, device in zip(decision.hosts, decision.devices, strict=True)]
