"""A check of adapters after their first update: each that has computed must have moved."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dtrain.engine.interface import Engine
from dtrain.engine.outcome import StepOutcome
from dtrain.errors import ContractError
from dtrain.parameters.model_states import MASTER

_ZEROS = ".lora_B."  # in the names of the matrices that begin as zeros


class AdapterCheck:
    """Checks after the first applied step that no ``lora_B`` of a layer that has computed is still zero.

    It begins as zeros, and its gradient is not zero. So if it stays zero, its gradient or its update was lost: training
    would go on, and change nothing. A layer that nothing reached, such as an expert without tokens, is left out.

    Args:
        engine: at its start; without adapters, or after a load, nothing is checked.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._names: list[str] = []
        self._handles: list[Any] = []
        if isinstance(engine, Engine) and not engine.attempted_steps:
            self._names = [name for name in engine.states.shapes if _ZEROS in name]
        self._has_computed = torch.zeros(len(self._names), dtype=torch.int64)
        for number, name in enumerate(self._names):
            layer = engine.module.get_submodule(name.partition(_ZEROS)[0])
            self._handles.append(layer.register_forward_pre_hook(partial(self._note, number)))

    def _note(self, number: int, module: nn.Module, inputs: Sequence[Any]) -> None:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.numel() for x in pytree.tree_leaves(inputs)):
            self._has_computed[number] = 1

    def after(self, outcome: StepOutcome) -> None:
        """Checks after a step; all ranks call.

        Raises:
            ContractError: on every rank, naming the adapters.
        """
        if not self._names or not outcome.applied or not outcome.lr:
            return
        names, self._names, engine = self._names, [], self._engine
        for handle in self._handles:
            handle.remove()
        moved = {
            shard.name for shard in engine.states.owned_shards(MASTER) if _ZEROS in shard.name and shard.data.any()
        }
        found = torch.stack([self._has_computed, torch.tensor([name in moved for name in names], dtype=torch.int64)])
        rows = engine.comm.gather_rows(found.flatten().to(engine.device), label="adapters").cpu()
        computed, has_moved = rows.amax(0).view(2, -1).tolist()
        still = [name for name, used, other in zip(names, computed, has_moved, strict=True) if used and not other]
        if still:
            raise ContractError(
                f"after the first applied step '{still[0]}' is still zero, as it began (so: {len(still)} of "
                f"{len(names)} adapters): its gradient or its update was lost, and training would not change it; "
                f"report this with the model and the engine"
            )
