"""Whole weights of an engine's model, under the names of its ``state_dict``."""

from __future__ import annotations

from torch import Tensor

from dtrain.engine.interface import Engine
from dtrain.engine.parts.checkpoint.compatibility import replicated_tensors
from dtrain.parameters.groups import aliases


def whole_state_dict(engine: Engine) -> dict[str, Tensor]:
    """Returns {name: full tensor on CPU} on rank 0, {} elsewhere; all ranks call.

    Trained parameters are their FP32 masters; frozen ones and persistent buffers have their own dtypes. A tied
    parameter has all of its names, which share one tensor.
    """
    values = engine.master_state()
    with engine.comm.schedule.method("whole_state_dict"):
        for name, tensor in engine.states.full_frozen():
            if engine.rank == 0:
                values[name] = tensor.detach().clone().cpu()
    if engine.rank != 0:
        return {}
    for _, name, tensor in replicated_tensors(engine.states, has_frozen=False):
        values[name] = tensor.clone().cpu()
    values |= {name: values[kept] for name, kept in aliases(engine.module).items()}
    ordered = []
    for prefix, module in engine.module.named_modules(remove_duplicate=False):
        ordered += [f"{prefix}.{name}" if prefix else name for name in (*module._parameters, *module._buffers)]
    return {name: values[name] for name in ordered if name in values}
