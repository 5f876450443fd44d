"""Whole weights of an engine's model, under the names of its ``state_dict``."""

from __future__ import annotations

from torch import Tensor

from dtrain.engine.interface import Engine
from dtrain.engine.parts.buffers import persistent_buffers


def whole_state_dict(engine: Engine) -> dict[str, Tensor]:
    """Returns {name: full tensor on CPU} on rank 0, {} elsewhere; all ranks call.

    Trained parameters are their FP32 masters; frozen ones and persistent buffers have their own dtypes. A tied
    parameter has all of its names, which share one tensor.
    """
    states, values = engine.states, engine.master_state()
    with engine.comm.schedule.method("whole_state_dict"):
        for name, tensor in states.full_frozen():
            if engine.rank == 0:
                values[name] = tensor.detach().clone().cpu()
    if engine.rank != 0:
        return {}
    names = {id(p): name for own in (states.parameters, states.unsharded_parameters()) for name, p in own.items()}
    buffers = {name: buffer.clone().cpu() for name, buffer in persistent_buffers(engine.module)}
    found: dict[str, Tensor | None] = {}
    for prefix, module in engine.module.named_modules(remove_duplicate=False):
        path = f"{prefix}." if prefix else ""
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in names:  # frozen, and added since
                names[id(parameter)] = path + key
                values[path + key] = parameter.detach().clone().cpu()
            found[path + key] = values.get(names.get(id(parameter), ""))
        found |= {path + key: buffers.get(path + key) for key in module._buffers}
    return {name: value for name, value in found.items() if value is not None}
