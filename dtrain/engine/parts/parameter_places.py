"""Where a model holds its parameters, to notice one that was replaced, added or removed after ``initialize``."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from dtrain.errors import UsageError


class ParameterPlaces:
    """The attributes of a model's modules that hold parameters or modules.

    A parameter may get another place: its module is wrapped, or holds it under a second name.

    Args:
        model: as the engine has prepared it.
        parameters: of the engine, by name.
        unshared: names of those that may get no second place.

    Attributes:
        names: the engine's name of each parameter, by its name now; tied parameters have several.
        held: module, key and parameter of each place; tied parameters have several, None stands for none.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], unshared: Collection[str]) -> None:
        self._model = model
        self._parameters = parameters
        self._unshared = {id(parameters[name]) for name in unshared}
        self._take({id(p): name for name, p in parameters.items()})

    def _take(self, owners: Mapping[int, str]) -> None:
        """Takes the places as they are now; ``owners``: names of the engine's parameters by id."""
        model = self._model
        every = dict(model.named_parameters(remove_duplicate=False))
        self.names = {place: owners[id(p)] for place, p in every.items() if id(p) in owners}
        self._others = {place: p for place, p in every.items() if id(p) not in owners}
        self._modules = modules = list(model.modules())
        places = [(module, key, p) for module in modules for key, p in module._parameters.items()]
        # what a library holds for a short time stands for the engine's own
        self.held = [(m, key, self._parameters[owners[id(p)]] if id(p) in owners else p) for m, key, p in places]
        self._children = [(module._modules, key, child) for module in modules for key, child in module._modules.items()]
        self._tables = [module._modules for module in modules]

    def check(self, stand_ins: Mapping[str, nn.Parameter]) -> None:
        """Checks that the model holds the engine's parameters, or ``stand_ins`` of its library, and trains no others.

        Raises:
            UsageError: naming one that was replaced, added or removed.
        """
        # what changes few bytes is compared first; names are formed only if something differs
        moved = [place for place in self.held if place[0]._parameters.get(place[1]) is not place[2]]
        allowed = {id(p) for p in stand_ins.values()} if moved else ()
        if all(id(module._parameters.get(key)) in allowed for module, key, _ in moved) and self._has_same_modules():
            if any(p.requires_grad for p in self._others.values()):
                raise added(next(place for place, p in self._others.items() if p.requires_grad))
            return
        owners = {id(p): name for own in (self._parameters, stand_ins) for name, p in own.items()}
        current = dict(self._model.named_parameters(remove_duplicate=False))
        for place, name in self.names.items():
            if place in current and owners.get(id(current[place])) != name:
                raise replaced(place)
        found = {owners.get(id(p)) for p in current.values()}
        for name in self._parameters:
            if name not in found:
                raise UsageError(
                    f"parameter '{name}' was removed after dtrain.initialize, and the engine would go on to save it; "
                    f"leave it in the model (a wrapper of its module must hold that module as an attribute), or build "
                    f"a new engine"
                )
        for place, parameter in current.items():
            if parameter.requires_grad and id(parameter) not in owners:
                raise added(place)
        before = {(id(module), key) for module, key, p in self.held if p is not None}
        for prefix, module in self._model.named_modules():
            for key, p in module._parameters.items():
                if id(p) in self._unshared and (id(module), key) not in before:
                    place = f"{prefix}.{key}".lstrip(".")
                    raise UsageError(
                        f"parameter '{owners[id(p)]}' was given a second name after dtrain.initialize, '{place}', and "
                        f"the engine frees its values outside its unit; tie it before, or read it by its first name"
                    )
        self._take(owners)

    def _has_same_modules(self) -> bool:
        # sums of sizes: what is missing has been found already, so one that is added makes a sum larger
        return (
            not [key for table, key, child in self._children if table.get(key) is not child]
            and sum(map(len, self._tables)) == len(self._children)
            and sum([len(module._parameters) for module in self._modules]) == len(self.held)
        )


def replaced(name: str) -> UsageError:
    return UsageError(
        f"parameter '{name}' was replaced after dtrain.initialize, so the engine does not train what the model "
        f"computes with; write it in place (load_state_dict without assign=True), or build a new engine"
    )


def added(name: str) -> UsageError:
    return UsageError(
        f"parameter '{name}' was added after dtrain.initialize, so the engine neither trains nor saves it; add it "
        f"before (lazy modules: run a forward before), freeze it (requires_grad_(False)), or build a new engine"
    )
