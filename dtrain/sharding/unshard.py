"""Stage 3: a parameter group is unsharded before its modules compute, and resharded after.

A group is unsharded by one of three events:

- Forward: hooks on the modules. The root group is unsharded for the whole forward and backward, a unit's group for its
  call.
- Backward: autograd's saved-tensor hooks. A view of an unsharded buffer is saved as a reference, which is resolved when
  backward needs it. Hooks on outputs would miss outputs that are not tensors, and activation checkpointing.
- A module that reads its parameter while backward recomputes part of the forward.

The next groups are prefetched in the order in which the last pass used them. Every rank runs the same modules, so all
ranks start the all-gathers in one order; the vote compares it, and a branch that only some ranks take ends the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from dtrain.config.engines import Native
from dtrain.errors import ModelError, UsageError
from dtrain.parameters.escapes import kept_tensors, tensors_in
from dtrain.parameters.groups import callable_parts
from dtrain.parameters.running_backward import is_in_backward, join_backward
from dtrain.sharding.execution_order import ExecutionOrder
from dtrain.sharding.group import ParameterGroup
from dtrain.sharding.hooks import ModuleHook, UnitParameters, reads_attributes
from dtrain.sharding.saved_tensors import SavedTensors


class UnshardScheduler:
    """Unshards and reshards the groups of a model whose compute replicas are sharded.

    Besides the root group and groups whose forward is running, at most ``1 + prefetch`` groups are unsharded at a time;
    without ``reshard_after_forward`` more are, between forward and backward.

    Args:
        model: hooks are installed on its modules.
        groups: all parameter groups, sharded.
        options: ``reshard_after_forward`` and ``prefetch``.

    Attributes:
        peak: largest number of groups, besides the root, that were unsharded at a time.
    """

    def __init__(self, model: nn.Module, groups: Sequence[ParameterGroup], options: Native) -> None:
        self._reshard_after_forward = options.reshard_after_forward
        self._num_ahead = options.prefetch
        self._groups = list(groups)
        self._forward = ExecutionOrder([group for group in groups if group.name])
        self._order = self._forward  # of the pass that runs, if any
        # None: no backward of this engine, or not of this engine, has been yet
        self._backward: ExecutionOrder | None = None
        self._others_backward: ExecutionOrder | None = None
        self._unsharded: dict[ParameterGroup, None] = {}  # or will be; the last used comes last
        self._names = {group: {id(p): name for name, p in group.parameters.items()} for group in groups}
        self._saved = SavedTensors(self._require_saved)
        self._depth = 0  # forwards of the model that are running
        self._records_graph = False
        self._open: Collection[str] = ()  # parameters that hold whole masters now
        self._saving: saved_tensors_hooks | None = None
        self.peak = 0
        self._kept: set[tuple[tuple[int, str], int]] | None = None  # tensors that modules kept before any forward
        self._module_names = {id(module): name for name, module in model.named_modules()}
        self._checked: set[tuple[int, bool]] = set()  # modules whose attributes were looked at, by their mode
        self._install(model)

    # -- hooks -----------------------------------------------------------------------------------------------------

    def _install(self, model: nn.Module) -> None:
        # prepended hooks run last to first, so those of one module run in the order model, unit, owner of a parameter
        owners = {id(p): (group, name) for group in self._groups for name, p in group.parameters.items()}
        for module in model.modules():
            guards = {key: owners[id(p)] for key, p in module._parameters.items() if id(p) in owners}
            if guards:
                self._guard(module, guards)
        for group in self._groups:
            for module in callable_parts(model.get_submodule(group.name)) if group.name else ():
                module.register_forward_pre_hook(
                    ModuleHook(lambda *_, group=group: self._enter_unit(group)), prepend=True
                )
                # always_call: a forward that raises must not leave its group open
                leave = ModuleHook(lambda module, args, output, group=group: self._leave_unit(module, group, output))
                module.register_forward_hook(leave, always_call=True)
        model.register_forward_pre_hook(ModuleHook(lambda module, _: self._enter_model(module)), prepend=True)
        leave_model = ModuleHook(lambda module, args, output: self._leave_model(module, output))
        model.register_forward_hook(leave_model, always_call=True)

    def _guard(self, module: nn.Module, guards: Mapping[str, tuple[ParameterGroup, str]]) -> None:
        """Guards a module's parameters, and its forward, if that may bypass ``_parameters``."""

        def require_all(*_: Any) -> None:
            if torch.compiler.is_compiling():  # the hooks of a compiled block are outside its graph, and ran before
                return
            for group, name in guards.values():
                self._require(group, name)

        def refuse_load(_: Any, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
            for key, (_, name) in guards.items():
                if name not in self._open and f"{prefix}{key}" in state_dict:
                    raise UsageError(
                        f"load_state_dict while '{name}' is sharded (zero_stage=3) would be lost; call it inside `with "
                        f"engine.modify_weights():`, or load a checkpoint with engine.load"
                    )

        module.__dict__["_parameters"] = UnitParameters(module._parameters, guards, self._require)
        if not reads_attributes(module):
            module.register_forward_pre_hook(ModuleHook(require_all), prepend=True)
        module.register_load_state_dict_pre_hook(ModuleHook(refuse_load))

    def _require(self, group: ParameterGroup, name: str) -> None:
        """Makes parameter ``name`` readable, or raises if a forward reads it outside that of its unit.

        Outside any forward it may be had, and is guarded: [Note: guarded parameters].
        """
        if group.may_be_read or name in self._open:
            return
        self._join_backward()
        if self._in_backward:  # activation checkpointing runs modules without their unit
            if not self._is_current(group):  # also if it is still unsharded, so that the next one is prefetched
                self._use(group)
        elif self._depth:
            raise ModelError(
                f"'{name}' is read outside the forward of '{group.name}', whose parameters are sharded meanwhile "
                f"(zero_stage=3); read it there, or keep it gathered: keep_gathered=['{name}']"
            )

    def open_weights(self, names: Collection[str]) -> None:
        """Lets the parameters called ``names`` be read and written outside a forward; no names end it."""
        self.reshard()
        self._open = names

    def _enter_model(self, model: nn.Module) -> None:
        if self._open:
            raise UsageError("the model is called inside engine.modify_weights; call engine(...) after the with block")
        if self._kept is None:
            self._kept = {(place, id(tensor)) for _, place, tensor in kept_tensors(model)}
        self._depth += 1
        if self._depth > 1:
            return
        if torch.is_grad_enabled():
            self._saving = saved_tensors_hooks(self._saved.pack, self._saved.unpack)
            self._saving.__enter__()
        if not self._in_backward:
            self._records_graph = torch.is_grad_enabled()
            self._forward.begin()
            self._prefetch(self._forward)
        for group in self._groups:
            if not group.name:
                self._use(group)

    def _leave_model(self, module: nn.Module, output: Any) -> None:
        if not self._depth:  # another hook failed before this forward began
            return
        self._depth -= 1
        if self._depth:
            return
        if self._saving is not None:
            self._saving.__exit__()
            self._saving = None
        if self._in_backward:
            return
        self._forward.end()
        for group in self._groups:
            # a prefetched group that was not used is not ready; its all-gather is waited for: [Note: buffer reuse]
            if not (self._records_graph and group.is_ready):
                self._reshard(group)
        for group in self._groups:
            if not group.name and not group.is_ready:
                self._check_escapes(module, group, output)

    def _enter_unit(self, group: ParameterGroup) -> None:
        self._join_backward()
        if not self._depth and not self._in_backward:
            raise UsageError(
                f"'{group.name}' is called outside a forward of the engine, and its parameters are sharded meanwhile "
                f"(zero_stage=3); call engine(...)"
            )
        group.num_forwards += 1
        if not (self._in_backward and self._is_current(group)):
            self._use(group)

    def _leave_unit(self, module: nn.Module, group: ParameterGroup, output: Any) -> None:
        group.num_forwards = max(group.num_forwards - 1, 0)  # 0 if another pre-hook failed before this forward began
        if group.num_forwards or self._in_backward or not group.is_unsharding:
            return
        self._check_escapes(module, group, output)
        if not self._records_graph:  # else it stays until others need its room, because backward begins with the last
            self._reshard(group)

    def _check_escapes(self, module: nn.Module, group: ParameterGroup, output: Any) -> None:
        """Raises ``ModelError`` if a parameter itself leaves its unit's forward: it would be read as NaN."""
        names, unit = self._names[group], group.name
        found = next((names[id(tensor)] for tensor in tensors_in(output) if id(tensor) in names), None)
        what = (f"'{unit}'" if unit else "the model") + f" returns its parameter '{found}'"
        if found is None and unit and (id(module), module.training) not in self._checked:
            self._checked.add((id(module), module.training))
            for attribute, place, tensor in kept_tensors(module, self._module_names[id(module)]):
                if id(tensor) in names and (place, id(tensor)) not in (self._kept or ()):
                    found = names[id(tensor)]
                    what = f"'{unit}' keeps its parameter '{found}' as '{attribute}'"
        if found is not None:
            raise ModelError(
                f"{what}, which is sharded outside its forward (zero_stage=3); take a view or a copy"
                + (f", or keep it gathered: keep_gathered=['{found}']" if unit else "")
            )

    # -- backward --------------------------------------------------------------------------------------------------

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of one micro-batch's backward; reshards all groups after it."""
        if self._backward is None:  # later passes follow the last backward, recomputations included
            self._backward = ExecutionOrder(self._forward.used[::-1])
        with self._unsharding_in(self._backward):
            yield

    def _join_backward(self) -> None:
        """Unshards for a backward that is not this engine's, if one runs: another engine's, or the user's own."""
        if self._in_backward or self._depth or not is_in_backward():
            return
        if self._others_backward is None:
            self._others_backward = ExecutionOrder(self._forward.used[::-1])
        join_backward(self._unsharding_in(self._others_backward))

    @contextmanager
    def _unsharding_in(self, order: ExecutionOrder) -> Iterator[None]:
        order.begin()
        self._prefetch(order)
        self._order = order
        try:
            yield
        finally:
            self._order = self._forward
            order.end()
            self.reshard()  # also what was prefetched in vain: [Note: buffer reuse]

    @property
    def _in_backward(self) -> bool:
        """Whether a backward runs that unshards: this engine's, or another engine's."""
        return self._order is not self._forward

    def gradients_taken(self, group: ParameterGroup) -> None:
        """Reshards ``group`` after its last gradient, if backward no longer needs it."""
        # the root group stays for the whole backward; frozen weights may be needed after the last gradient
        if group.name and not group.num_missing and len(group.replicas) == len(group.buffers):
            self._reshard(group)

    def reshard(self) -> None:
        """Reshards all groups; called before the shards change."""
        for group in self._groups:
            self._reshard(group)

    def _require_saved(self, group: ParameterGroup) -> None:
        """Unshards ``group``, of which backward needs a view."""
        if not self._in_backward:
            self._join_backward()
        if not self._is_current(group):
            self._use(group)

    # -- groups ----------------------------------------------------------------------------------------------------

    def _is_current(self, group: ParameterGroup) -> bool:
        """Whether ``group`` is unsharded and the pass has noted its use."""
        return group.is_ready and (not group.name or self._order.current is group)

    def _use(self, group: ParameterGroup) -> None:
        """Unshards ``group`` and starts the groups that follow it."""
        if group.name:
            self._order.use(group)
            self._prefetch(self._order, group)
        group.unshard()  # after the prefetch, whose all-gathers run while this one is waited for
        self._saved.add(group)

    def _prefetch(self, order: ExecutionOrder, *current: ParameterGroup) -> None:
        """Starts ``current`` and the groups expected next; reshards the least recently used groups for them."""
        wanted = [*current, *order.following(self._num_ahead)]
        if self._reshard_after_forward:
            # the least recently used first; a group whose forward is running must stay
            others = [group for group in self._unsharded if group not in wanted and not group.num_forwards]
            allowed = 1 + self._num_ahead - len(wanted)
            for group in others[: max(len(others) - allowed, 0)]:
                self._reshard(group)
        for group in reversed(wanted):  # the one that is needed first becomes the most recently used
            self._unsharded.pop(group, None)
            self._unsharded[group] = None
        for group in wanted:  # in the order of use, which is that of the collectives on all ranks
            group.start_unshard()
        self.peak = max(self.peak, len(self._unsharded))

    def _reshard(self, group: ParameterGroup) -> None:
        if group.is_unsharding:
            self._saved.remove(group)
            group.reshard()
            self._unsharded.pop(group, None)
