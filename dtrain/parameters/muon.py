"""Which parameters Muon updates, and the matrices that fused ones hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from dtrain.config.optim import Muon
from dtrain.errors import ConfigError
from dtrain.parameters.groups import CONTAINERS, decayed_names, matching_parameters

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def muon_parameters(model: nn.Module, record: Muon) -> dict[str, tuple[int, ...]]:
    """Returns the parameters that Muon updates, with the rows of the matrices that each holds.

    They are the trained 2-D parameters of hidden layers: in no embedding, output layer or norm, and not named by
    ``record.adamw``. A module names the matrices of a fused weight in ``muon_splits``: {name of the weight, relative to
    the module: rows of each}; ``record.splits`` goes first.

    Raises:
        ConfigError: a pattern of ``adamw`` or ``splits`` matches nothing, or rows do not sum to those of the weight.
    """
    trained = dict(model.named_parameters())
    matrices = {name for name in decayed_names(model) if trained[name].dim() == 2 and trained[name].numel()}
    matrices -= _outer_layers(model)
    matrices -= matching_parameters(model, record.adamw, "adamw")
    splits = _declared_splits(model)
    for pattern, sizes in reversed(record.splits.items()):  # the first pattern that matches wins
        found = matching_parameters(model, [pattern], "splits") & matrices
        if not found:
            raise ConfigError(f"splits pattern '{pattern}' matches no weight that Muon updates; remove it")
        splits |= dict.fromkeys(found, tuple(sizes))
    return {
        name: _checked(name, tuple(parameter.shape), splits.get(name, (parameter.shape[0],)))
        for name, parameter in trained.items()
        if name in matrices
    }


def _checked(name: str, shape: tuple[int, ...], sizes: Sequence[int]) -> tuple[int, ...]:
    if any(type(size) is not int or size < 1 for size in sizes) or sum(sizes) != shape[0]:
        raise ConfigError(
            f"splits of '{name}' are {list(sizes)}; expected positive integers that sum to its first dim, {shape[0]}"
        )
    return tuple(sizes)


def _declared_splits(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns what the modules' ``muon_splits`` name, under the names that masters have."""
    kept = {id(p): name for name, p in model.named_parameters()}
    found = {}
    for module in model.modules():
        declared: Mapping[str, Sequence[int]] = getattr(module, "muon_splits", {})
        for name, sizes in declared.items():
            found[kept[id(module.get_parameter(name))]] = tuple(sizes)
    return found


def _outer_layers(model: nn.Module) -> set[str]:
    """Returns the parameters of embeddings and output layers, those tied to them included.

    An output layer has a row for each row of an embedding, and is in no block: an element of a ``ModuleList`` or
    ``Sequential`` with modules of its own, none of them such an embedding. The width of a block may by chance be the
    number of positions.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    kept = {id(p): name for name, p in model.named_parameters()}
    embeddings = {name: module for name, module in modules.items() if isinstance(module, _EMBEDDINGS)}
    found = {kept[id(p)] for module in embeddings.values() for p in module.parameters(recurse=False)}
    for rows in {embedding.num_embeddings for embedding in embeddings.values()}:
        equal = [name for name, embedding in embeddings.items() if embedding.num_embeddings == rows]
        blocks = tuple(b for b in _composite_elements(modules) if not any(name.startswith(b) for name in equal))
        found |= {
            kept[id(p)]
            for name, module in modules.items()
            if not f"{name}.".startswith(blocks)
            for p in module.parameters(recurse=False)
            if p.dim() == 2 and p.shape[0] == rows
        }
    return found


def _composite_elements(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yields the prefix of the names in each element of a container that has modules of its own."""
    for name, module in modules.items():
        if isinstance(module, CONTAINERS):
            for child, element in module.named_children():
                if any(True for _ in element.children()):
                    yield f"{name}.{child}.".lstrip(".")
