"""Export of low-rank adapters: a folder that ``peft`` loads, or the whole model with the adapters merged into it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint.format.manifest import Manifest, TensorEntry
from dtrain.checkpoint.huggingface.folder import HFFolder
from dtrain.checkpoint.huggingface.same_model import PREFIX, text_name
from dtrain.checkpoint.huggingface.tensor_mapping import TensorMapping, same_tensor
from dtrain.checkpoint.reader import CheckpointReader
from dtrain.config.fields import from_json
from dtrain.config.model import Lora
from dtrain.errors import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
_NAME = re.compile(rf"{re.escape(PREFIX)}(?P<module>.+)\.lora_(?P<matrix>[AB])\.default\.weight")
_BASE = ".base_layer."  # in the names of what an adapter stands beside


@dataclass(frozen=True)
class Adapters:
    """The adapters of a checkpoint of ``model=hf``.

    Attributes:
        lora: the settings of the run.
        matrices: the entries of ``A`` [r, in] and ``B`` [out, r] by the name of the module in transformers.
        transposed: the modules whose weights are [in, out] (``Conv1D`` of GPT-2).
        where: the checkpoint, for messages.
    """

    lora: Lora
    matrices: Mapping[str, Mapping[str, TensorEntry]]
    transposed: frozenset[str]
    where: str

    @staticmethod
    def of(
        values: Mapping[str, Any], weights: Mapping[str, TensorEntry], manifest: Manifest, where: str
    ) -> Adapters | None:
        """Returns the adapters of a checkpoint, given the keys of its model; None if it has none.

        Raises:
            CheckpointError: its trained tensors are not those of adapters.
        """
        lora = from_json(Lora, values.get("lora") or {}, f"{where}: model.lora")
        if not lora.r:
            return None
        matrices: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in weights.items():
            if entry.kind == "frozen":
                continue
            found = _NAME.fullmatch(name)
            if found is None or len(entry.shape) != 2:
                raise CheckpointError(f"{where}: '{name}' is no adapter of its configured model, model.lora")
            matrices.setdefault(found["module"], {})[found["matrix"]] = entry
        for module, pair in matrices.items():
            if len(pair) != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
                shapes = {name: list(entry.shape) for name, entry in pair.items()}
                raise CheckpointError(
                    f"{where}: the adapter of '{module}' has {shapes}, expected A [r, in], B [out, r]"
                )
        kinds = (manifest.state.get("contract") or {}).get("modules", {})
        transposed = (m for m in matrices if kinds.get(f"{PREFIX}{m}.base_layer", {}).get("kind") == "Conv1D")
        return Adapters(lora, matrices, frozenset(transposed), where)

    def config(self, base: str) -> dict[str, Any]:
        """Returns ``adapter_config.json`` over the model of the folder ``base``."""
        alpha = self.lora.alpha
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.lora.r,
            "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
            "lora_dropout": self.lora.dropout,
            "target_modules": self.lora.targets,
            "fan_in_fan_out": bool(self.transposed),
            "bias": "none",
            "init_lora_weights": True,
            "inference_mode": True,
        }

    def parts(self) -> tuple[TensorMapping, ...]:
        """Returns the mapping of the adapters alone, to the names of ``peft``."""
        return tuple(
            same_tensor(f"{_PEFT_PREFIX}{module}.lora_{matrix}.weight", entry.shape, entry.name)
            for module, pair in self.matrices.items()
            for matrix, entry in sorted(pair.items())
        )


class MergedReader:
    """Reads the weights of the base model with the adapters merged into them: W + alpha / r x B A, in FP32.

    Args:
        adapters: what is merged.
        reader: the checkpoint, which may hold the frozen weights.
        base: the folder of the frozen weights; None: the checkpoint holds them.

    Raises:
        CheckpointError: the base lacks the weight of an adapter.
    """

    def __init__(self, adapters: Adapters, reader: CheckpointReader, base: HFFolder | None) -> None:
        self._adapters = adapters
        self._reader = reader
        self._base = base
        self._scale = adapters.lora.alpha / adapters.lora.r
        self._modules = {self._weight_of(module): module for module in adapters.matrices}
        self._last: tuple[str, Tensor] | None = None

    @cached_property
    def _saved(self) -> dict[str, TensorEntry]:
        """The frozen weights and buffers that the checkpoint holds, by transformers' name."""
        entries = (entry for entry in self._reader.tensors if entry.kind in ("frozen", "buffer"))
        return {entry.name.removeprefix(PREFIX).replace(_BASE, "."): entry for entry in entries}

    @property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        if self._base is not None:
            return self._base.shapes
        return {name: entry.shape for name, entry in self._saved.items()}

    @cached_property
    def _names(self) -> dict[str, str]:
        """The names in the base, by themselves and by those of a text half alone."""
        return {text_name(name): name for name in self._shapes} | {name: name for name in self._shapes}

    def _weight_of(self, module: str) -> str:
        """Returns the name of a module's weight in the base; files of older models lack the first parts of names."""
        expected = tuple(self._adapters.matrices[module][matrix].shape[axis] for matrix, axis in (("B", 0), ("A", 1)))
        if module in self._adapters.transposed:
            expected = expected[::-1]
        weight = f"{module}.weight"
        parts = text_name(weight).split(".")
        candidates = (weight, *(".".join(parts[first:]) for first in range(len(parts) - 1)))
        name = next((self._names[name] for name in candidates if name in self._names), None)
        if name is None:
            raise CheckpointError(
                f"{self._adapters.where}: the base holds no weight of '{module}', which has an adapter"
            )
        if self._shapes[name] != expected:
            raise CheckpointError(
                f"{self._adapters.where}: '{name}' of the base is {list(self._shapes[name])}, the adapter of "
                f"'{module}' is for {list(expected)}"
            )
        return name

    def parts(self) -> Iterator[TensorMapping]:
        """Yields the tensors of the base, under their own names."""
        for name, shape in self._shapes.items():
            yield same_tensor(name, shape, name, dtype=self._kept_dtypes.get(name))

    @property
    def _kept_dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtypes of the tensors that are no weights, by name."""
        if self._base is not None:
            return self._base.others
        return {name: entry.dtype for name, entry in self._saved.items() if entry.kind == "buffer"}

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Returns elements ``start`` to ``stop`` of tensor ``name`` of the base, with its adapter merged."""
        if self._last is None or self._last[0] != name:  # one tensor is kept: it is read block by block
            self._last = name, self._merged(name)
        return self._last[1][start:stop]

    def _merged(self, name: str) -> Tensor:
        module = self._modules.get(name)
        if self._base is not None:
            values = self._base.read(name, accept_others=module is None)
        else:
            values = self._reader.read(self._saved[name].kind, self._saved[name].name)
        if module is None:
            return values
        a, b = (self._matrix(self._adapters.matrices[module][matrix]) for matrix in "AB")
        product = b @ a
        delta = (product.t() if module in self._adapters.transposed else product) * self._scale
        return values.float() + delta.reshape(-1)

    def _matrix(self, entry: TensorEntry) -> Tensor:
        return self._reader.read(entry.kind, entry.name).view(entry.shape).float()
