"""Finds the blocks of a model, and replaces their forwards by recomputed or compiled ones.

[Note: order of the wrappers] From inside to outside: the block's own forward, with what the precision policy has
replaced in it; recomputation; compilation; the hooks of the engine, which unshard weights. So a graph of the compiler
holds the recomputation, which it can plan, and no hook, whose side effects it would not see.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dtrain.config.blocks import Blocks
from dtrain.distributed.communicator import Communicator
from dtrain.engine.blocks.compiled import CompiledBlocks
from dtrain.engine.blocks.recompute import recomputed
from dtrain.engine.request import StepOptions
from dtrain.errors import ConfigError
from dtrain.parameters.groups import callable_parts, find_units
from dtrain.precision.forward import own_forward, replace_forward


def find_blocks(model: nn.Module, options: Blocks, setting: str = "blocks") -> list[tuple[str, nn.Module]]:
    """Returns the blocks of ``model`` with their names, in the order of definition.

    Args:
        setting: name of ``options.blocks`` in messages.

    Raises:
        ConfigError: a pattern matches no module, ``auto`` finds none, or a module recomputes its activations itself.
    """
    if not options.is_used:
        return []
    names = find_units(model, options.blocks, setting)
    # a module that two containers share is one block
    parts = {id(part): (name, part) for name in reversed(names) for part in callable_parts(model.get_submodule(name))}
    found = list(parts.values())[::-1]
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no ModuleList or Sequential whose elements could be recomputed or compiled; "
            f"name its blocks: {setting}=[layers.*]"
        )
    if options.recompute != "none":
        for name, module in model.named_modules():
            if getattr(module, "gradient_checkpointing", False) is True:
                raise ConfigError(
                    f"'{name or type(model).__name__}' recomputes its activations itself (gradient_checkpointing=True),"
                    f" so recompute={options.recompute} would do it twice; switch one of them off"
                )
    return found


def install_blocks(
    model: nn.Module,
    options: Blocks,
    units: str | Sequence[str],
    compiled: CompiledBlocks | None,
    *,
    keeps_rng: bool = True,
) -> None:
    """Replaces the forwards of the blocks of ``model``: [Note: order of the wrappers].

    Args:
        units: name patterns of the units of sharding that have hooks, which must stay outside of compiled code and of
            selective recomputation.
        compiled: compiles the blocks; None: they run as they are.
        keeps_rng: see ``recomputed``.

    Raises:
        ConfigError: as ``find_blocks``; or a block contains a unit of sharding, and may not.
    """
    blocks = find_blocks(model, options)
    if compiled is not None or options.recompute == "selective":
        for unit in find_units(model, units):
            outer = next((name for name, _ in blocks if unit.startswith(f"{name}.")), None)
            if outer is not None:
                raise ConfigError(
                    f"block '{outer}' contains the unit of sharding '{unit}', whose hooks can be neither compiled nor "
                    f"repeated selectively; let the units be the blocks: blocks='auto', or the patterns of "
                    f"sharding_units; or take recompute='full'"
                )
    forwards = {}  # one for all blocks of a kind, so that they share a graph
    for number, (_, block) in enumerate(blocks):
        own = own_forward(block)
        recomputes = options.recompute != "none" and number % options.recompute_every == 0
        if (own, recomputes) not in forwards:
            forward = own
            if recomputes:
                mode, offloads = options.recompute, options.offload_activations
                forward = recomputed(forward, mode, offloads=offloads, keeps_rng=keeps_rng)
            forwards[own, recomputes] = forward if compiled is None else compiled.wrap(forward)
        if forwards[own, recomputes] is not own:
            replace_forward(block, forwards[own, recomputes])


def compile_blocks(model: nn.Module, options: StepOptions, comm: Communicator) -> CompiledBlocks | None:
    """Makes the blocks of ``model`` recomputed or compiled ones, as the options say; returns what compiles them."""
    blocks = options.blocks
    compiled = CompiledBlocks(comm, measures=blocks.compile == "auto") if blocks.compile != "none" else None
    units = options.engine.sharding_units if options.engine.units_have_hooks else []
    install_blocks(model, blocks, units, compiled, keeps_rng=not options.engine.graph)
    return compiled
