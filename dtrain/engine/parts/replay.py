"""Computes one micro-batch twice more, from the same bits, and compares: arithmetic that is wrong at times shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from dtrain.checkpoint.format.device_fingerprint import fingerprint_tensor, flat
from dtrain.config.audit import Audit
from dtrain.distributed.consensus import on_every_rank
from dtrain.engine.deterministic import deterministic_kernels
from dtrain.engine.forward import ModelForward
from dtrain.engine.parts.forward_calls import REPLAYED, KeptForwards, kept_buffers
from dtrain.engine.parts.part import Forward, StepPart, StepUnderWay
from dtrain.errors import Corruption, CorruptionError, UsageError
from dtrain.parameters.model_states import ModelStates
from dtrain.parameters.running_backward import backward_of
from dtrain.precision.forward import find_loss
from dtrain.precision.module_values import named_tensors

Seen = Callable[[str, str, Tensor], None]  # kind, name, value
_NUM_LISTED = 8  # tensors in the message


@dataclass
class _Pass:
    """What one forward and backward computed, in its order: (kind, name) and the fingerprint of each tensor."""

    keys: list[tuple[str, str]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def add(self, kind: str, name: str, tensor: Tensor) -> None:
        values = flat(tensor)
        if values.numel():
            self.keys.append((kind, name))
            self.values.append(fingerprint_tensor([(values, 0)], values.device)[0])


class MicroBatchReplay(StepPart):
    """Replays the first micro-batch of a step on each rank, before the update.

    No gradient reaches a main grad, because it is no backward of the engine: [Note: another engine's backward]. Buffers
    and random numbers are as before afterwards.

    Args:
        settings: which steps are replayed.
        forward: runs the forwards.
        states: of the model.
        calls: those of the step under way.
    """

    def __init__(self, settings: Audit, forward: ModelForward, states: ModelStates, calls: KeptForwards) -> None:
        self._settings, self._states = settings, states
        self.forward, self.calls = forward, calls

    def before_update(self, step: StepUnderWay) -> None:
        """Compares two passes, if the step is replayed; all ranks call together, because forwards may communicate.

        Raises:
            CorruptionError: a rank's passes differ; the same on every rank.
            UsageError: a pass failed on a rank.
        """
        if not self._settings.replays(step.number + 1):
            return
        calls = self.calls.of(step.number, REPLAYED)
        found = on_every_rank(
            self.forward.comm,
            "audit.replay_every: computing a micro-batch again",
            lambda: self._compare(calls, step.loss_scale),
            UsageError,
        )
        corruptions = [
            Corruption((rank,), name, kind, "two passes over one micro-batch gave different bits")
            for rank, differing in enumerate(found)
            for kind, name in differing
        ]
        if corruptions:
            ranks = sorted({rank for corruption in corruptions for rank in corruption.ranks})
            listed = "; ".join(map(str, corruptions[:_NUM_LISTED]))
            more = f"; and {len(corruptions) - _NUM_LISTED} more" if len(corruptions) > _NUM_LISTED else ""
            raise CorruptionError(
                f"step {step.number}: forward and backward of micro-batch {REPLAYED}, computed twice "
                f"from the same weights, inputs and random numbers, differ on rank {' and '.join(map(str, ranks))}; in "
                f"the order of computation: {listed}{more}. Nothing was updated. The arithmetic of that machine is "
                f"wrong at times, or a module of the model depends on something else than its inputs",
                corruptions,
            )

    def _compare(self, calls: Sequence[Forward], loss_scale: float) -> list[tuple[str, str]]:
        """Returns kind and name of the tensors that differ, in the order of computation."""
        try:
            with deterministic_kernels():
                first, second = _Pass(), _Pass()
                for one in (first, second):
                    self.run(calls, loss_scale, one.add)
        finally:
            self.forward.discard()
        if first.keys != second.keys:
            pairs = zip(first.keys, second.keys, strict=False)
            shorter = min(len(first.keys), len(second.keys))
            longer = max(first.keys, second.keys, key=len)
            return [next((one for one, other in pairs if one != other), None) or longer[shorter]]
        if not first.keys:
            return []
        differs = (torch.stack(first.values) != torch.stack(second.values)).tolist()
        return [key for key, other in zip(first.keys, differs, strict=True) if other]

    def run(self, calls: Sequence[Forward], loss_scale: float, seen: Seen) -> None:
        """Runs forwards and their backward; ``seen`` gets losses, outputs, gradients before any reduction, buffers."""
        forward = self.forward
        with ExitStack() as stack:
            stack.enter_context(kept_buffers(forward.module))
            roots: list[Tensor] = []
            with torch.enable_grad():
                for number, call in enumerate(calls):
                    # a forward in eval mode has no key: both passes need the same numbers, and the caller's kept
                    key = number if call.key is None else call.key
                    output = forward.run(key, call.args, call.kwargs)
                    loss = find_loss(output)
                    for name, tensor in named_tensors(f"forward {number}" if number else "forward", output):
                        seen("loss" if tensor is loss else "output", name, tensor)
                        if tensor.requires_grad and (loss is None or tensor is loss):
                            roots.append(tensor)
            for name, parameter in self._parameters().items():
                stack.callback(parameter.register_hook(partial(_add_gradient, seen, name)).remove)
            if roots:
                with backward_of(self), forward.backward_precision():
                    torch.autograd.backward(roots, [torch.full_like(root, loss_scale) for root in roots])
            for name, buffer in forward.module.named_buffers():
                seen("buffer", name, buffer)

    def _parameters(self) -> Mapping[str, nn.Parameter]:
        """Returns the tensors at which the gradients of the trained parameters arrive."""
        found = self._states.parameters | self._states.unsharded_parameters()
        return {name: p for name, p in found.items() if p.requires_grad and not hasattr(p, "device_mesh")}


def _add_gradient(seen: Seen, name: str, grad: Tensor | None) -> None:
    if grad is not None:
        seen("gradient", name, grad)
