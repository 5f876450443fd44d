"""Where a model holds its parameters, to notice one that was replaced, added or removed after ``initialize``."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from dtrain.errors import UsageError


class ParameterPlaces:
    """The attributes of a model's modules that hold parameters or modules.

    Args:
        model: as the engine has prepared it.

    Attributes:
        held: module, key and parameter of each place; tied parameters have several, None stands for none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = dict(model.named_parameters(remove_duplicate=False))
        modules = list(model.modules())
        self.held = [(module, key, p) for module in modules for key, p in module._parameters.items()]
        self._modules = modules
        self._children = [(module._modules, key, child) for module in modules for key, child in module._modules.items()]
        self._tables = [module._modules for module in modules]

    def check(self, stand_ins: Iterable[nn.Parameter]) -> None:
        """Checks that the model holds the parameters that it held first, or ``stand_ins`` of its library.

        Raises:
            UsageError: naming one that was replaced, added or removed.
        """
        # what changes few bytes is compared first; names are formed only if something differs
        moved = [place for place in self.held if place[0]._parameters.get(place[1]) is not place[2]]
        if not moved and self._has_same_modules():
            return
        allowed = {id(p) for p in stand_ins}
        if all(id(module._parameters.get(key)) in allowed for module, key, _ in moved) and self._has_same_modules():
            return
        current = dict(self._model.named_parameters(remove_duplicate=False))
        for name, parameter in self._names.items():
            found = current.pop(name, None)
            if found is None:
                raise UsageError(
                    f"parameter '{name}' was removed after dtrain.initialize, and the engine would go on to save it; "
                    f"leave it in the model, or build a new engine"
                )
            if found is not parameter and id(found) not in allowed:
                raise replaced(name)
        for name in current:
            raise UsageError(
                f"parameter '{name}' was added after dtrain.initialize, so the engine neither trains nor saves it; add "
                f"it before (lazy modules: run a forward before), or build a new engine"
            )
        # modules without parameters have changed
        self.__init__(self._model)  # type: ignore[misc]

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
