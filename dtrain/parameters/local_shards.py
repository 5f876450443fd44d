"""What a rank holds of the trained parameters where a library below decides which part that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dtrain.checkpoint.snapshot import TensorShard
from dtrain.errors import ContractError
from dtrain.optim.adamw import AdamW, UpdateList, UpdateScalars
from dtrain.optim.fused import ListedAdamW


@dataclass
class LocalShard:
    """An interval of one parameter on this rank; the tensors are 1-D, FP32 and of one length.

    Attributes:
        name: of the parameter.
        shape: of the whole parameter.
        start: the first element, row-major.
        master: the weights that are updated, as the library holds them.
        main_grad: the reduced gradient of the step under way, where it lies now.
        decayed: whether weight decay acts on it.
        replicated: all ranks hold the same, so each answers for a share of it.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    master: Tensor
    main_grad: Tensor
    decayed: bool
    replicated: bool

    def piece(self, kind: str, values: Tensor, share: tuple[int, int] = (0, 1)) -> TensorShard:
        """The part number ``share[0]`` of ``share[1]`` equal ones of ``values`` [length]."""
        rank, count = share
        low, high = values.numel() * rank // count, values.numel() * (rank + 1) // count
        return TensorShard(
            self.name, kind, self.shape, torch.float32, self.start + low, self.start + high, values[low:high]
        )


def check_in_place(name: str, parameter: nn.Parameter, local: Tensor, own: Tensor) -> None:
    """Asserts that a parameter is trained still, and that ``local``, its values here, are what the engine updates.

    Raises:
        ContractError: it was frozen or replaced.
    """
    require_trained(name, parameter)
    if local.dtype != own.dtype or local.data_ptr() != own.data_ptr():
        raise ContractError(
            f"parameter '{name}' no longer lies where the engine updates it (it is {local.dtype} on {local.device}); "
            f"do not call .to(), .half() or assign .data after dtrain.initialize"
        )


def require_trained(name: str, parameter: nn.Parameter) -> None:
    """Refuses a parameter that has been frozen.

    Raises:
        ContractError: naming it.
    """
    if not parameter.requires_grad:
        raise ContractError(
            f"'{name}' was frozen after dtrain.initialize; its moments and decay would go on, so freeze it before, and "
            f"build a new engine"
        )


class LocalShards:
    """All that a rank holds, with its moments, and their update.

    Args:
        parts: one for each parameter that has an element here.
        rule: hyper-parameters.
        share: (rank, world size), for what is replicated.
    """

    def __init__(self, parts: Sequence[LocalShard], rule: AdamW, share: tuple[int, int]) -> None:
        self.parts = [part for part in parts if part.master.numel()]
        self._share = share
        masters = [part.master for part in self.parts]
        self._values = {
            "master": masters,
            "exp_avg": [torch.zeros_like(master) for master in masters],
            "exp_avg_sq": [torch.zeros_like(master) for master in masters],
        }
        numbers = range(len(self.parts))
        self._classes = [[n for n in numbers if self.parts[n].decayed is decayed] for decayed in (True, False)]
        self._classes = [chosen for chosen in self._classes if chosen]
        lists = [[[self._values[kind][n] for n in chosen] for kind in self._values] for chosen in self._classes]
        self._optimizer = ListedAdamW(
            rule,
            [UpdateList(self.parts[chosen[0]].decayed, *own) for chosen, own in zip(self._classes, lists, strict=True)],
        )

    def owned_shards(self, kind: str) -> Iterator[TensorShard]:
        """What this rank answers for of ``master``, ``exp_avg``, ``exp_avg_sq`` or ``main_grad``."""
        for part, values in self._of_kind(kind):
            yield part.piece(kind, values, self._share if part.replicated else (0, 1))

    def local_shards(self, kind: str) -> Iterator[TensorShard]:
        """All of ``kind`` that lies here."""
        for part, values in self._of_kind(kind):
            yield part.piece(kind, values)

    def _of_kind(self, kind: str) -> Iterator[tuple[LocalShard, Tensor]]:
        if kind == "main_grad":
            yield from ((part, part.main_grad) for part in self.parts)
        else:
            yield from zip(self.parts, self._values[kind], strict=True)

    def update(self, scalars: UpdateScalars) -> None:
        """One AdamW update of masters and moments; the main grads are left divided."""
        self._optimizer.update([[self.parts[n].main_grad for n in chosen] for chosen in self._classes], scalars)

    @property
    def masters(self) -> list[Tensor]:
        """The tensors of the masters."""
        return self._values["master"]

    @property
    def moments(self) -> list[Tensor]:
        """The tensors of both moments."""
        return [*self._values["exp_avg"], *self._values["exp_avg_sq"]]
