"""Names of tensors in checkpoints: those of a model without the wrappers that some libraries put around its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile, of torch's checkpoint_wrapper


def plain_name(name: str) -> str:
    """Returns ``name`` without the parts that name a wrapper."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the plain name of each; a name stays as it is if two would become one."""
    plain = {name: plain_name(name) for name in names}
    counts = Counter(plain.values())
    return {name: other if counts[other] == 1 else name for name, other in plain.items()}
