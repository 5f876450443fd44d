"""Rows of numbers with a class or values to learn: tensors of safetensors files, and a known function with noise."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dtrain.config.data import ArraysDataConfig, FriedmanDataConfig
from dtrain.data.dataset import Dataset, SampleSource
from dtrain.data.draws import CONTENT, generator, held_out_rows
from dtrain.data.paths import expanded, require_other
from dtrain.data.sampling import Indices
from dtrain.data.shards.format import sha256_of
from dtrain.errors import ConfigError
from dtrain.tasks import Classification, Regression, Task

_CHUNK_VALUES = 1 << 20
_FRIEDMAN_DIM = 10
_FRIEDMAN_ID = 1991  # of the draws: the same data at every seed, so that runs can be compared


@dataclass(frozen=True, eq=False)
class ArrayTable:
    """Inputs x [N, D, ...], and as targets y classes [N] or values [N, D].

    Attributes:
        label: key and file of the configuration, for messages.
        sha256: of the content.
    """

    x: Tensor
    y: Tensor
    label: str
    sha256: str

    @property
    def has_classes(self) -> bool:
        return not self.y.is_floating_point()

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, eq=False)
class Standardization:
    """Mean and standard deviation, FP64, at each index of dimension 1: columns of [N, D], channels of [N, C, H, W]."""

    mean: Tensor
    std: Tensor

    def apply(self, values: Tensor) -> Tensor:
        """Returns FP32 values, computed in FP64 because beside a large mean FP32 would leave few digits."""
        shape = (1, -1, *[1] * (values.dim() - 2))
        return ((values.double() - self.mean.view(shape)) / self.std.view(shape)).float()


@dataclass(frozen=True, eq=False)
class ArrayRows(SampleSource):
    """Rows of a table; ``rows`` is int64 [n]."""

    table: ArrayTable
    rows: Indices
    x_scale: Standardization
    y_scale: Standardization | None

    @property
    def num_samples(self) -> int:
        return len(self.rows)

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        """Returns ``inputs`` FP32 [B, D, ...] and ``targets``, int64 [B] of classes or FP32 [B, D] of values."""
        rows = torch.from_numpy(self.rows[sample_ids])
        targets = self.table.y[rows]
        targets = targets.long() if self.y_scale is None else self.y_scale.apply(targets)
        return {"inputs": self.x_scale.apply(self.table.x[rows]), "targets": targets}


def load_arrays(
    config: ArraysDataConfig | FriedmanDataConfig, on_progress: Callable[[], None] = lambda: None
) -> Dataset:
    """Opens the tables that ``config`` names.

    Without a file of their own, rows are held out for validation by the hash of their number.

    Args:
        on_progress: called now and then.

    Raises:
        ConfigError: a file is missing or has other tensors than ``dtrain.config.data.ArraysDataConfig`` states, or
            a value is NaN or infinite in FP32.
    """
    standardize = True
    held_out = None
    if isinstance(config, FriedmanDataConfig):
        table = friedman(config)
    else:
        table, standardize = open_table("data.path", config.path, on_progress), config.standardize
        if config.validation_path is not None:
            held_out = open_table("data.validation_path", config.validation_path, on_progress)
            require_other(config, "file")
            _require_same_kind(table, held_out)
    if held_out is not None:
        rows = np.arange(len(table)), np.arange(len(held_out))
    elif len(table) > 1:
        rows, held_out = held_out_rows(len(table), config.validation_percent), table
    else:
        raise ConfigError(f"{table.label} has {len(table)} row; training and validation need one each")
    _check_values(table, on_progress)
    if held_out is not table:
        _check_values(held_out, on_progress)
    used = rows[0] if standardize else None
    x_scale = _scale(table.x, used, on_progress)
    y_scale = None if table.has_classes else _scale(table.y, used, on_progress)
    sources = (ArrayRows(table, rows[0], x_scale, y_scale), ArrayRows(held_out, rows[1], x_scale, y_scale))
    settings = [config.validation_percent, standardize, table.sha256, held_out.sha256]
    how = "of them held out for validation" if held_out is table else f"of {held_out.label} to validate on"
    return Dataset(
        *sources,
        hashlib.sha256(json.dumps(settings).encode()).hexdigest(),
        f"{table.label}: {len(table):,} samples, {len(rows[1]):,} {how}",
        _task(table, held_out, x_scale, y_scale),
    )


def friedman(config: FriedmanDataConfig) -> ArrayTable:
    """Returns samples of Friedman's function of ten variables, of which five matter.

    y = 10 sin(pi x1 x2) + 20 (x3 - 0.5)^2 + 10 x4 + 5 x5 + noise, with x uniform in [0, 1]: Friedman, "Multivariate
    Adaptive Regression Splines", The Annals of Statistics 19 (1991), section 4.3.
    """
    rng = generator(_FRIEDMAN_ID, CONTENT)
    x = rng.random((config.samples, _FRIEDMAN_DIM), dtype=np.float32)
    x1, x2, x3, x4, x5 = x[:, :5].T.astype(np.float64)
    y = 10 * np.sin(np.pi * x1 * x2) + 20 * (x3 - 0.5) ** 2 + 10 * x4 + 5 * x5
    y += config.noise * rng.standard_normal(config.samples)
    # in FP32, so that the last bit of a sine does not tell processors apart
    values = y.astype(np.float32)[:, None]
    sha256 = hashlib.sha256(x.tobytes() + values.tobytes()).hexdigest()
    return ArrayTable(torch.from_numpy(x), torch.from_numpy(values), "data=friedman", sha256)


def open_table(key: str, name: str, on_progress: Callable[[], None] = lambda: None) -> ArrayTable:
    """Maps the tensors of a file; rows are read when they are used.

    Args:
        key: of the configuration, for messages.
        on_progress: called now and then while the file is hashed.

    Raises:
        ConfigError: there is no such file, or its tensors do not make a table.
    """
    path = Path(expanded(name))
    label = f"{key}={name}"
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "not found"
        raise ConfigError(f"{label} is {kind} (working directory {os.getcwd()}); expected a file of safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
            if missing := {"x", "y"} - set(names):
                raise ConfigError(
                    f"{label} lacks {' and '.join(sorted(missing))}; expected x [N, ...] and y [N] or [N, D], got "
                    f"{', '.join(names) or 'no tensor'}"
                )
            x, y = file.get_tensor("x"), file.get_tensor("y")
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{label} cannot be read as safetensors: {error}; write x and y with safetensors.torch.save_file"
        ) from None
    _check_shapes(x, y, label)
    if not y.is_floating_point():
        y = y.long()
    elif y.dim() == 1:
        y = y.unsqueeze(1)
    return ArrayTable(x, y, label, sha256_of(path, on_progress))


def _check_shapes(x: Tensor, y: Tensor, label: str) -> None:
    shapes = f"x {list(x.shape)} and y {list(y.shape)}"
    if x.is_complex() or y.is_complex():
        raise ConfigError(f"{label} has complex numbers; expected x and y of real ones")
    if x.dim() < 2 or not 1 <= y.dim() <= 2:
        raise ConfigError(f"{label} has {shapes}; expected x [N, D] or with more dimensions, and y [N] or [N, D]")
    if len(x) != len(y):
        raise ConfigError(f"{label} has {shapes}, so {len(x)} inputs and {len(y)} targets; expected as many of both")
    if not x.numel() or not y.numel():
        raise ConfigError(f"{label} has {shapes}, which holds no value; expected at least one sample")
    if y.dim() == 2 and not y.is_floating_point():
        raise ConfigError(
            f"{label} has whole numbers in y {list(y.shape)}; expected classes as [N], or values to learn as floats"
        )


def _require_same_kind(table: ArrayTable, held_out: ArrayTable) -> None:
    if table.has_classes != held_out.has_classes:
        kinds = {True: "whole numbers", False: "floats"}
        raise ConfigError(
            f"{held_out.label} has {kinds[held_out.has_classes]} in y, but {table.label} {kinds[table.has_classes]}; "
            "expected whole numbers (classes) in both, or floats in both"
        )
    if table.x.shape[1:] != held_out.x.shape[1:] or table.y.shape[1:] != held_out.y.shape[1:]:
        raise ConfigError(
            f"{held_out.label} has x {list(held_out.x.shape)} and y {list(held_out.y.shape)}, but {table.label} "
            f"x {list(table.x.shape)} and y {list(table.y.shape)}; expected equal shapes apart from the rows"
        )


def _chunks(values: Tensor, on_progress: Callable[[], None]) -> Iterator[tuple[int, Tensor]]:
    """Yields the first row and the values of parts of a tensor that are small in memory."""
    size = max(1, _CHUNK_VALUES // values[0].numel())
    for start in range(0, len(values), size):
        on_progress()
        yield start, values[start : start + size]


def _check_values(table: ArrayTable, on_progress: Callable[[], None]) -> None:
    for name, values in (("x", table.x), ("y", table.y)):
        if not values.is_floating_point():
            continue
        for start, chunk in _chunks(values, on_progress):
            finite = chunk.float().isfinite().flatten(1).all(dim=1)
            if not finite.all():
                row = int((~finite).nonzero()[0])
                found = chunk[row].flatten()
                value = float(found[~found.float().isfinite()][0])
                raise ConfigError(
                    f"{table.label} has {value:g} in row {start + row} of {name}; expected finite numbers of FP32: "
                    "leave that row out or fill it"
                )
    if table.has_classes and int(table.y.min()) < 0:
        row = int((table.y < 0).nonzero()[0])
        raise ConfigError(
            f"{table.label} has the class {int(table.y[row])} in row {row} of y; expected classes from 0, or floats "
            "for a regression"
        )


def _scale(values: Tensor, rows: Indices | None, on_progress: Callable[[], None]) -> Standardization:
    """Returns mean and deviation over these rows, in one pass; the deviation of a constant column is 1.

    Without rows they are 0 and 1.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
    """
    width = values.shape[1]
    mean, spread = torch.zeros(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    if rows is None:
        return Standardization(mean, torch.ones_like(spread))
    count = 0
    low, high = torch.full_like(mean, torch.inf), torch.full_like(mean, -torch.inf)
    is_used = torch.zeros(len(values), dtype=torch.bool)
    is_used[torch.from_numpy(rows)] = True
    for start, chunk in _chunks(values, on_progress):
        used = chunk[is_used[start : start + len(chunk)]].double()
        columns = used.transpose(0, 1).flatten(1)
        if not columns.numel():
            continue
        added, own = columns.shape[1], columns.mean(dim=1)
        delta = own - mean
        total = count + added
        spread += (columns - own[:, None]).square().sum(dim=1) + delta.square() * (count * added / total)
        mean += delta * (added / total)
        count = total
        low, high = low.minimum(columns.amin(dim=1)), high.maximum(columns.amax(dim=1))
    # a constant column may have a tiny deviation by rounding
    return Standardization(mean, torch.where(low == high, 1.0, (spread / count).sqrt()))


def standardize(inputs: Tensor, task: Task) -> Tensor:
    """Returns rows of numbers as a model of ``task`` takes them, with the mean and deviation of its training data.

    Args:
        inputs: [B, ...], in the unit of the data.
        task: of a model that was trained on arrays.

    Returns:
        FP32 [B, ...], the same bits as in training and validation.

    Raises:
        ConfigError: the rows have another shape than those of the data, or the task is one of images or text.

    Examples:
        >>> from dtrain.tasks import Regression  # an exported model has its own, as ``model.task``
        >>> task = Regression((2,), mean=(0.0,), std=(1.0,), input_mean=(10.0, 0.0), input_std=(2.0, 1.0))
        >>> dtrain.standardize(torch.tensor([[12.0, 3.0]]), task)
        tensor([[1., 3.]])
    """
    if task.is_image or not task.input_shape:
        instead = "; read_image prepares images" if task.is_image else ""
        raise ConfigError(f"standardize prepares rows of numbers, but this task of {task.name} has none{instead}")
    if tuple(inputs.shape[1:]) != task.input_shape:
        raise ConfigError(
            f"the inputs have shape {list(inputs.shape)}, but one sample of the data {list(task.input_shape)}; give "
            "rows of samples"
        )
    if not task.input_mean:
        return inputs.float()
    scale = (task.input_mean, task.input_std)
    mean, std = (torch.tensor(values, dtype=torch.float64, device=inputs.device) for values in scale)
    return Standardization(mean, std).apply(inputs)


def _task(table: ArrayTable, held_out: ArrayTable, x_scale: Standardization, y_scale: Standardization | None) -> Task:
    shape = tuple(table.x.shape[1:])
    mean, std = tuple(x_scale.mean.tolist()), tuple(x_scale.std.tolist())
    if y_scale is not None:
        targets = tuple(y_scale.mean.tolist()), tuple(y_scale.std.tolist())
        return Regression(shape, *targets, input_mean=mean, input_std=std)
    num = 1 + max(int(table.y.max()), int(held_out.y.max()))
    if num < 2:
        raise ConfigError(f"{table.label} has class 0 alone in y; expected at least two classes, numbered from 0")
    if num > len(table):
        raise ConfigError(
            f"{table.label} has classes up to {num - 1} in y, more than its {len(table)} samples; number them from 0, "
            "or store y as floats for a regression"
        )
    return Classification(tuple(map(str, range(num))), shape, input_mean=mean, input_std=std)
