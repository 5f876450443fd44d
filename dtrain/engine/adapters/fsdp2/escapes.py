"""Weights that leave the forward of a unit that ``fully_shard`` reshards after it, which frees their memory.

Whatever reads freed memory ends the process. So a unit whose output holds a weight, or a view of one, stays unsharded
until its backward, and one that keeps a weight in an attribute is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtrain.distributed.logging import logger
from dtrain.errors import ModelError
from dtrain.parameters.escapes import kept_tensors, storage_key, tensors_in
from dtrain.sharding.hooks import ModuleHook


def require_unkept(model: nn.Module, replaced: Mapping[int, str]) -> None:
    """Checks that no attribute holds a parameter that ``fully_shard`` has replaced; ``replaced``: names by id.

    Raises:
        ModelError: a forward would compute with its old values.
    """
    for attribute, _, tensor in kept_tensors(model):
        if id(tensor) in replaced:
            raise _kept(attribute, replaced[id(tensor)])


def watch_escapes(
    name: str,
    module: FSDPModule,
    weights: Callable[[], Iterable[tuple[str, Tensor]]],
    on_returned: Callable[[], None] | None,
) -> None:
    """Looks for weights that leave each forward of a unit, and lets the library see all other tensors that do.

    Args:
        name: of the unit.
        module: of the unit, under ``fully_shard``.
        weights: yields its unsharded weights by name.
        on_returned: keeps the unit unsharded from now on, after the forward that runs too; None: it is always.
    """
    hooked: Any = module
    state = hooked._get_fsdp_state()
    pre_backward, register = state._pre_backward, state._register_pre_backward_hook
    is_kept = on_returned is None
    checked: set[bool] = set()  # modes: attributes are looked at in the first forward of each

    def register_tensors(output: Any) -> Any:
        registered = register(output)
        # also in objects, and dataclasses before PyTorch 2.13: else the backward of the unit would reduce nothing
        register([t for t in tensors_in(output) if pre_backward not in (t._backward_hooks or {}).values()])
        return registered

    state._register_pre_backward_hook = register_tensors

    def before_reshard(_: Any, args: Any, output: Any) -> None:
        nonlocal is_kept
        # what an operation has returned has memory of its own, unless it is a view
        candidates = [t for t in tensors_in(output) if t.grad_fn is None or t._base is not None]
        for tensor in candidates:
            _drop_hook(tensor, pre_backward)
        if is_kept or not candidates:
            return
        own = {storage_key(weight): other for other, weight in weights()}
        found = next((own[key] for key in map(storage_key, candidates) if key in own), None)
        if found is not None:
            assert on_returned is not None
            is_kept = True
            on_returned()
            logger.info(f"fsdp2: '{name}' returns its parameter '{found}', so it stays gathered until its backward")

    def after_reshard(_: Any, args: Any, output: Any) -> None:
        if is_kept or hooked.training in checked:
            return
        checked.add(hooked.training)
        own = {storage_key(weight): other for other, weight in weights()}
        for attribute, _, tensor in kept_tensors(hooked, name):
            if (found := own.get(storage_key(tensor))) is not None:
                raise _kept(attribute, found)

    hooked.register_forward_hook(ModuleHook(before_reshard), prepend=True)
    hooked.register_forward_hook(ModuleHook(after_reshard))


def _drop_hook(tensor: Tensor, hook: Callable[..., Any]) -> None:
    """Removes a hook from a tensor that outlives the graph; ``fully_shard`` adds one to each tensor of each output."""
    hooks: Any = tensor._backward_hooks
    for key in [key for key, other in (hooks or {}).items() if other == hook]:
        del hooks[key]


def _kept(attribute: str, name: str) -> ModelError:
    return ModelError(
        f"attribute '{attribute}' keeps the parameter '{name}', whose memory engine=fsdp2 frees after each use; read "
        f"the parameter by its own name in each forward, keep a copy (.clone()), or use engine=native"
    )
