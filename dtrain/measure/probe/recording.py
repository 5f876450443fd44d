"""Records what the modules of a model compute in one FP32 forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dtrain.engine.rng import generators_of, keyed_rng, rng_key
from dtrain.precision.forward import find_loss
from dtrain.precision.module_calls import ModuleCall, watch_calls


@dataclass
class Call:
    """One call of a module.

    Attributes:
        args, kwargs: detached inputs.
        versions: version counters of the inputs' tensors when the call ended.
        random_state: states of the generators when the call began.
        gradients: of the loss to each floating tensor of the output; None until backward, or if none reaches it.
        needs_dx: whether the first input needs a gradient.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[int]
    random_state: list[Tensor]
    gradients: list[Tensor | None]
    needs_dx: bool

    @property
    def was_overwritten(self) -> bool:
        """Whether an input has been changed in place since."""
        return self.versions != _versions((self.args, self.kwargs))


@dataclass
class Recording:
    """The calls of one micro-batch in the order of the forward, and its gradients by parameter."""

    calls: list[Call] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def record(
    model: nn.Module, modules: dict[str, nn.Module], loss_of: Callable[[], Tensor], device: torch.device, key: int
) -> Recording:
    """Runs forward and backward of one micro-batch, and records the calls of ``modules``; ``.grad`` stays as it is.

    Args:
        loss_of: runs the forward and returns the loss.
        key: of the random numbers.
    """
    recording = Recording()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def begin(call: ModuleCall) -> tuple[list[Tensor], Any]:
        # such as nn.ReLU(inplace=True)
        is_inplace = getattr(call.module, "inplace", False)
        states = [generator.get_state() for generator in generators_of(device)]
        return states, pytree.tree_map(_clone, (call.args, call.kwargs)) if is_inplace else None

    def end(watched: ModuleCall) -> None:
        needs_dx = any(isinstance(a, Tensor) and a.requires_grad for a in watched.args[:1])
        state, copies = watched.begun
        args, kwargs = copies or pytree.tree_map(_detach, (watched.args, watched.kwargs))
        call = Call(watched.name, args, kwargs, _versions((args, kwargs)), state, [], needs_dx)
        for index, tensor in enumerate(floats_of(watched.output)):
            call.gradients.append(None)
            if tensor.requires_grad:
                tensor.register_hook(_keep(call.gradients, index))
        recording.calls.append(call)

    with keyed_rng(device, key), torch.enable_grad():
        with watch_calls(modules, begin, end):
            loss = loss_of()
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    recording.gradients = {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}
    return recording


def _keep(gradients: list[Tensor | None], index: int) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        gradients[index] = gradient.detach()

    return hook


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _versions(values: Any) -> list[int]:
    return [value._version for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def floats_of(output: Any) -> list[Tensor]:
    """Returns the floating tensors in a module's output, which may be an object with a loss."""
    flat = pytree.tree_leaves(output)
    floats = [value for value in flat if isinstance(value, Tensor) and value.is_floating_point()]
    loss = find_loss(output)
    return floats or ([] if loss is None else [loss])


@contextmanager
def same_random_numbers(device: torch.device, states: Collection[Tensor]) -> Iterator[None]:
    """Inside, the generators continue from ``states``; then from where they were."""
    with keyed_rng(device, 0):
        for generator, state in zip(generators_of(device), states, strict=True):
            generator.set_state(state)
        yield


def micro_batch_key(seed: int, index: int) -> int:
    """Returns the key of the random numbers of a micro-batch; the same in every forward of the probe."""
    return rng_key(seed, 0, index)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restores the buffers of ``model`` (the running statistics of norms) at the end."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
