"""Finds what made a step fail. All ranks search together, after a step was skipped.

The vote names the first gradient of each rank that was not finite; only then are the main grads searched for its
elements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.communicator import Communicator
from dtrain.engine.outcome import Culprit
from dtrain.engine.vote.decide import DecodedDecision


@dataclass(frozen=True)
class Finding:
    """The elements that are not finite in one rank's shard of one parameter's main grad.

    Attributes:
        name: name of the parameter.
        rank: owner of the shard.
        start: first element that is not finite, in the parameter's row-major order.
        stop: one past the last of them.
    """

    name: str
    rank: int
    start: int
    stop: int
    num_inf: int
    num_nan: int


def locate_culprit(
    decision: DecodedDecision,
    comm: Communicator,
    main_grads: Iterable[TensorShard],
    backward_names: Sequence[str],
    *,
    is_only_backward: bool,
) -> Culprit | None:
    """Returns the culprit of a step that was skipped for a number that is not finite, else None; all ranks call.

    Args:
        decision: on the step.
        comm: the ranks.
        main_grads: this rank's shards of the main grads, read only if a gradient is at fault.
        backward_names: the names of all parameters in the order of backward.
        is_only_backward: see ``locate_bad_gradient``.
    """
    if decision.reason == "nonfinite_loss":
        return locate_bad_loss(decision)
    if decision.reason != "overflow":
        return None
    own = [f for shard in main_grads for f in find_nonfinite(shard.name, comm.rank, shard.start, shard.data)]
    # every rank comes here, because all derived the same reason
    findings = gather_findings(comm, own)
    return locate_bad_gradient(decision, findings, backward_names, is_only_backward=is_only_backward)


def find_nonfinite(name: str, rank: int, start: int, values: Tensor) -> list[Finding]:
    """Searches ``values`` FP32 [n], which ``rank`` owns: the main grad of ``name`` from element ``start`` on."""
    bad = (~values.isfinite()).nonzero().flatten()
    if not len(bad):
        return []
    infinite = int(values.isinf().sum())
    return [Finding(name, rank, start + int(bad[0]), start + int(bad[-1]) + 1, infinite, len(bad) - infinite)]


def gather_findings(comm: Communicator, own: Sequence[Finding]) -> list[Finding]:
    """Returns the findings of all ranks, in rank order; all ranks call."""
    # text, because the number of findings differs from rank to rank
    texts = comm.exchange_text(json.dumps([asdict(finding) for finding in own]))
    return [Finding(**values) for text in texts for values in json.loads(text)]


def locate_bad_loss(decision: DecodedDecision) -> Culprit:
    """Returns the first micro-batch, in the order of the global index, whose loss was not finite."""
    bad = [(found.bad_micro_batch, rank) for rank, found in enumerate(decision.devices) if found.num_bad_losses]
    micro_batch, rank = min(bad)  # global index = micro-batch x world size + rank
    is_nan = math.isnan(decision.devices[rank].bad_loss)
    return Culprit(
        rank=rank,
        step=decision.step,
        phase="forward loss",
        micro_batch=micro_batch,
        num_inf=int(not is_nan),
        num_nan=int(is_nan),
        num_bad_losses=decision.num_bad_losses,
    )


def locate_bad_gradient(
    decision: DecodedDecision, findings: Sequence[Finding], backward_names: Sequence[str], *, is_only_backward: bool
) -> Culprit:
    """Returns the first gradient that was not finite: by micro-batch, then in the order of backward, then by rank.

    The first gradient in backward is nearest to the cause, because a bad one infects all that come after it.

    Args:
        decision: on the step.
        findings: of all ranks.
        backward_names: the names of all parameters in the order of backward, which numbers the gradients.
        is_only_backward: the step had one micro-batch over all ranks, so no gradient was recorded.
    """
    name = rank = micro_batch = None
    found = {finding.name for finding in findings}
    bad = [
        (device.bad_gradient, rank)
        for rank, device in enumerate(decision.devices)
        # a monitor's sum may overflow over finite elements, and such a rank must not be named for another's Inf
        if device.bad_gradient >= 0 and backward_names[device.bad_gradient % len(backward_names)] in found
    ]
    if bad:
        number, rank = min(bad)  # numbers grow by micro-batch, then in the order of backward
        micro_batch, index = divmod(number, len(backward_names))
        name = backward_names[index]
    elif is_only_backward:
        rank, micro_batch = 0, 0
    if name is None:
        name = next((other for other in backward_names if other in found), None)
    own = [finding for finding in findings if finding.name == name]
    return Culprit(
        rank=rank if rank is not None else own[0].rank if own else -1,
        step=decision.step,
        phase="reduced gradient" if micro_batch is None else "local gradient",
        micro_batch=micro_batch,
        tensor=name,
        start=min((finding.start for finding in own), default=None),
        stop=max((finding.stop for finding in own), default=None),
        num_inf=sum(finding.num_inf for finding in own),
        num_nan=sum(finding.num_nan for finding in own),
    )
