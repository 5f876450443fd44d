"""Which parameters weight decay acts on."""

from __future__ import annotations

from torch import nn

from dtrain.precision.rules import is_fp32_class


def decayed_names(model: nn.Module) -> set[str]:
    """The trainable parameters of more than one dimension that belong to no norm, by the names they are kept under."""
    norms = {id(p) for module in model.modules() if is_fp32_class(module) for p in module.parameters(recurse=False)}
    return {name for name, p in model.named_parameters() if p.requires_grad and p.dim() > 1 and id(p) not in norms}
