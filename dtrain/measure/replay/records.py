"""Records of ``dtrain replay``: what its ranks found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dtrain.engine.outcome import Culprit, Origin

GRADIENTS, REPORT_FILE = "gradients", "replay.json"
FOUND_FIELDS = ("phase", "rank", "micro_batch", "tensor", "start", "stop", "num_inf", "num_nan", "num_bad_losses")
"""Fields of a culprit that the replay must find again."""


def micro_batch_file(index: int) -> str:
    return f"micro-batch-{index:03d}"


@dataclass(frozen=True)
class ReplayedStep:
    """A step as the replay computed it; numbers that are not finite are None, as in ``metrics.jsonl``."""

    step: int
    loss: float | None
    grad_norm: float | None
    loss_scale: float
    lr: float
    applied: bool
    reason: str | None


@dataclass(frozen=True)
class MicroBatchRecord:
    """A micro-batch of the replayed step.

    Attributes:
        index: global index.
        samples: numbers of its samples in the training data.
        loss: None if it is not finite.
        weight: of the loss in the mean.
        text: of each sample, after the name of its file if it has its own.
        first_nonfinite: the first tensor in the forward that is not finite; empty if none is.
    """

    index: int
    samples: list[int]
    loss: float | None
    weight: float
    text: list[str]
    first_nonfinite: str


@dataclass(frozen=True)
class GradientRecord:
    """The reduced gradient of a parameter, unscaled.

    Attributes:
        min: least finite element; None without any.
        max: largest finite element; None without any.
        norm: L2 norm; None if it is not finite.
        histogram: see ``dtrain.precision.histogram.Histogram.to_dict``.
    """

    name: str
    numel: int
    min: float | None
    max: float | None
    num_inf: int
    num_nan: int
    norm: float | None
    histogram: dict[str, Any]


@dataclass(frozen=True)
class ReplayResult:
    """Results of the ranks.

    Attributes:
        checkpoint: that was loaded; None: the replay began from the seed.
        steps: all replayed steps, the last of which is the one asked for.
        culprit: as a dictionary, in the ranks of the replay; None if the step was applied.
        micro_batches: of the last step, in the order of their global index.
        gradients: of the last step.
        device: name of the first rank's device.
    """

    checkpoint: str | None
    steps: list[ReplayedStep]
    culprit: dict[str, Any] | None
    micro_batches: list[MicroBatchRecord]
    gradients: list[GradientRecord]
    device: str


@dataclass(frozen=True)
class NumberDifference:
    """A number that differs from the one in ``metrics.jsonl``."""

    step: int
    field: str
    logged: float | None
    replayed: float | None

    @property
    def relative(self) -> float:
        if self.logged is None or self.replayed is None:
            return math.inf
        return abs(self.replayed - self.logged) / max(abs(self.logged), 1e-30)


@dataclass(frozen=True)
class ReplayReport:
    """A replay, compared with what the run has logged.

    Attributes:
        run: its directory.
        step: see above.
        ranks: of the replay.
        world_size: of the run; None: unknown.
        promises_bits: whether dtrain promises the bits of the run here: it is reproducible, and no other device or
            version of PyTorch is known to have trained it.
        result: what the replay computed.
        num_compared: logged steps that were replayed.
        differences: of their numbers, in the order of steps.
        culprit: in the ranks of the run.
        recorded: culprit in ``failures/step-N.json``, in the same form; None without the file.
        differing_fields: fields of the two that differ.
        notes: what a reader should know.
    """

    run: str
    step: int
    ranks: int
    world_size: int | None
    promises_bits: bool
    result: ReplayResult
    num_compared: int
    differences: list[NumberDifference]
    culprit: dict[str, Any] | None
    recorded: dict[str, Any] | None
    differing_fields: list[str]
    notes: list[str]

    @property
    def agrees(self) -> bool:
        """Whether nothing differs that must be equal."""
        return not self.promises_bits or not (self.differences or self.differing_fields)


def culprit_from_dict(values: Mapping[str, Any]) -> Culprit:
    origin = values.get("origin")
    return Culprit(**{**values, "origin": None if origin is None else Origin.from_dict(origin)})


def on_other_ranks(culprit: Culprit, ranks: int, world_size: int | None) -> Culprit:
    """Returns a culprit found on ``ranks`` ranks as ``world_size`` ranks would name it."""
    if culprit.micro_batch is None or world_size is None:  # the owner of a shard of a sum
        return culprit
    index = culprit.micro_batch * ranks + culprit.rank
    return replace(culprit, rank=index % world_size, micro_batch=index // world_size)


def differing_fields(found: Culprit | None, recorded: Culprit | None) -> list[str]:
    """Returns the fields in which two culprits of one number of ranks differ."""
    if found is None or recorded is None:
        return [] if found is recorded else ["culprit"]
    # a reduced gradient's rank is the owner of a shard, which depends on the number of ranks
    names = [name for name in FOUND_FIELDS if name != "rank" or recorded.micro_batch is not None]
    return [name for name in names if getattr(found, name) != getattr(recorded, name)]
