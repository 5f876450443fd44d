"""``with engine.full_model():``: a copy of the model with whole weights, which computes without other ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.parameters.model_states import MASTER, ModelStates
from dtrain.precision.float8.cast import E4M3

_LIBRARIES = ("torch.distributed.", "deepspeed.")
"""Modules whose hooks communicate; hooks of dtrain do nothing in a copy, and hooks of the user's are copied."""

_FSDP = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_")
"""Prefixes of the attributes that ``fully_shard`` sets; transformers synchronizes ranks where it finds them."""


@torch.no_grad()
def whole_copy(states: ModelStates) -> nn.Module:
    """Returns a copy of the engine's model in eval mode that owns its weights, in their compute dtypes.

    Trained weights whose compute dtype is FP8 are FP32. All are gathered one flat buffer at a time; all ranks call.
    """
    model, dtypes = states.module, states.contract.replica_dtypes
    states.open_weights(states.parameters.keys())  # else a library's own tensors may stand in the model
    states.open_weights(())
    parameters = states.parameters
    whole = {id(parameters[name]): _parameter(values, dtypes[name]) for name, values in states.full_state(MASTER)}
    own = states.contract.parameter_dtype  # BF16 has the values of frozen FP8 weights exactly
    whole |= {id(parameters[name]): _parameter(values, own(name)) for name, values in states.full_frozen()}
    # second places of what a library unshards, and frozen parameters that were added since
    second = ((id(p), whole[id(parameters[name])]) for name, p in states.unsharded_parameters().items())
    whole |= {key: held for key, held in second if key not in whole}
    whole |= {id(p): _parameter(p, p.dtype) for p in model.parameters() if id(p) not in whole}
    memo: dict[int, Any] = dict(whole)
    shells = []
    for module in model.modules():
        # the dict itself, because libraries replace it by one that unshards
        held = dict(module._parameters.items())
        memo[id(module._parameters)] = {key: p if p is None else whole[id(p)] for key, p in held.items()}
        for key, value in vars(module).items():
            if key.endswith("_hooks") and isinstance(value, Mapping):
                memo |= {id(hook): _nothing for hook in value.values() if _is_library(hook)}
        if any(key.startswith(_FSDP) for key in vars(module)):
            memo[id(module)] = shell = _own_class(module).__new__(_own_class(module))
            shells.append((module, shell))
    for module, shell in reversed(shells):  # inner ones first, because a compiled module asks the one that it holds
        values = {key: value for key, value in vars(module).items() if not key.startswith(_FSDP)}
        shell.__dict__.update(copy.deepcopy(values, memo))
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied.eval()


def _parameter(values: Tensor, dtype: torch.dtype) -> nn.Parameter:
    # an FP8 Linear casts its weight in each forward, to the engine's replica if it has the master
    dtype = values.dtype if dtype == E4M3 else dtype
    return nn.Parameter(values.detach().to(dtype, copy=True), requires_grad=False)


def _nothing(*_: Any) -> None:
    pass


def _is_library(hook: Any) -> bool:
    function = getattr(hook, "func", hook)
    return (getattr(function, "__module__", None) or "").startswith(_LIBRARIES)


def _own_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class of ``module`` before ``fully_shard``, which gives it one that cannot be copied."""
    bases = type(module).__mro__
    position = next((number for number, base in enumerate(bases) if base.__name__ == "FSDPModule"), -1)
    own: type[nn.Module] = bases[position + 1]
    return own
