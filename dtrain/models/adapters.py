"""Low-rank adapters (Hu et al., 2021) by ``peft``, over frozen weights."""

from __future__ import annotations

from torch import nn

from dtrain.config.model import Lora
from dtrain.errors import ConfigError, nearest


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Freezes a model of transformers, and adds trained FP32 adapters beside the Linears that ``lora.targets`` names.

    ``lora_A`` draws from torch's generator, ``lora_B`` is zero: the output is that of the model without adapters.

    Raises:
        ConfigError: ``peft`` is not installed; or a target is no Linear, or one with a tied weight.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from transformers.pytorch_utils import Conv1D
    except ImportError:
        raise ConfigError("model.lora needs peft: pip install 'dtrain[hf]'") from None
    chosen = _targets(model, lora.targets, (nn.Linear, Conv1D))
    settings = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=list(chosen),
        # the weights of Conv1D, in GPT-2, are [in, out]
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in chosen.values()),
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(settings, model)


def _targets(model: nn.Module, targets: list[str], kinds: tuple[type[nn.Module], ...]) -> dict[str, nn.Module]:
    """Returns the modules whose names are or end with ``targets``, by name."""
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    linears = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    last_names = dict.fromkeys(name.rpartition(".")[2] for name in linears)
    chosen: dict[str, nn.Module] = {}
    for target in targets:
        found = {name: m for name, m in linears.items() if name == target or name.endswith(f".{target}")}
        if not found:
            raise ConfigError(
                f"model.lora.targets: '{target}' is the name of no Linear of {type(model).__name__}"
                f"{nearest(target, last_names)}"
            )
        tied = next((name for name, module in found.items() if owners[id(module._parameters["weight"])] > 1), None)
        if tied is not None:
            raise ConfigError(
                f"model.lora.targets: the weight of '{tied}' is tied to that of another module, which an adapter would "
                f"part; remove '{target}'"
            )
        chosen |= found
    return chosen
