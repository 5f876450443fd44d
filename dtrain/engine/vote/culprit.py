"""Who made a step fail: found after the fact, by all ranks together, when a step was skipped for it.

The vote says that something was not finite, and which rank's gradient leaf was the first; only then are the main grads
searched for the tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from dtrain.distributed.communicator import Communicator
from dtrain.engine.interface import Culprit
from dtrain.engine.vote.decide import DecodedDecision


@dataclass(frozen=True)
class Finding:
    """What one rank found in its shard of one parameter's main grad.

    Attributes:
        name: of the parameter.
        rank: that owns the shard.
        start: first element that is not finite, in the parameter's row-major order.
        stop: one past the last of them.
        num_inf: how many are infinite.
        num_nan: how many are NaN.
    """

    name: str
    rank: int
    start: int
    stop: int
    num_inf: int
    num_nan: int


def search(name: str, rank: int, start: int, values: Tensor) -> list[Finding]:
    """What is not finite in ``values`` FP32 [n], which ``rank`` owns: the main grad of ``name`` from ``start`` on."""
    bad = (~values.isfinite()).nonzero().flatten()
    if not len(bad):
        return []
    infinite = int(values.isinf().sum())
    return [Finding(name, rank, start + int(bad[0]), start + int(bad[-1]) + 1, infinite, len(bad) - infinite)]


def exchange(comm: Communicator, own: Sequence[Finding]) -> list[Finding]:
    """The findings of all ranks, in rank order."""
    texts = comm.exchange_text(json.dumps([asdict(finding) for finding in own]))
    return [Finding(**values) for text in texts for values in json.loads(text)]


def locate_bad_loss(decision: DecodedDecision) -> Culprit:
    """The first micro-batch, in the order of the global index, whose loss was not finite."""
    bad = [(r.bad_micro_batch, rank) for rank, r in enumerate(decision.records) if r.num_bad_losses]
    micro_batch, rank = min(bad)
    is_nan = math.isnan(decision.records[rank].bad_loss)
    return Culprit(
        rank=rank,
        step=decision.records[0].step,
        phase="forward loss",
        micro_batch=micro_batch,
        num_inf=int(not is_nan),
        num_nan=int(is_nan),
        num_bad_losses=sum(r.num_bad_losses for r in decision.records),
    )


def locate_bad_gradient(
    decision: DecodedDecision, findings: Sequence[Finding], backward_order: Sequence[str], *, alone: bool
) -> Culprit:
    """The first gradient that was not finite: by micro-batch, then in the order of backward, then by rank.

    What comes first in backward is nearest to the cause: all that comes after may have been infected by it.

    Args:
        decision: of the step.
        findings: of all ranks.
        backward_order: the names of all parameters in that order, which numbers the gradients.
        alone: there was one micro-batch on one rank, so no gradient was watched.
    """
    name = rank = micro_batch = None
    bad = [(record.bad_gradient, rank) for rank, record in enumerate(decision.records) if record.bad_gradient >= 0]
    if bad:
        number, rank = min(bad)
        micro_batch, index = divmod(number, len(backward_order))
        name = backward_order[index]
    elif alone:
        rank, micro_batch = 0, 0
    found = {finding.name for finding in findings}
    if name not in found:  # nothing was watched, or every element was finite and only their sum overflowed
        name = next((other for other in backward_order if other in found), None)
    parts = [finding for finding in findings if finding.name == name]
    return Culprit(
        rank=rank if rank is not None else parts[0].rank if parts else -1,
        step=decision.records[0].step,
        phase="reduced gradient" if micro_batch is None else "local gradient",
        micro_batch=micro_batch,
        tensor=name,
        start=min((part.start for part in parts), default=None),
        stop=max((part.stop for part in parts), default=None),
        num_inf=sum(part.num_inf for part in parts),
        num_nan=sum(part.num_nan for part in parts),
    )
