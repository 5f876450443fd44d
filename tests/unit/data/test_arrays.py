from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import dtrain
from dtrain.config.data import ArraysDataConfig, FriedmanDataConfig
from dtrain.data import BatchLoader, Dataset, arrays, load_dataset, validation_batches
from dtrain.errors import ConfigError
from dtrain.tasks import Classification, Regression


def write(path: Path, **tensors: Tensor) -> str:
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path)
    return str(path)


def all_rows(dataset: Dataset, side: str) -> dict[str, Tensor]:
    source = getattr(dataset, side)
    return source.batch(np.arange(source.num_samples))


def test_columns_are_standardized_by_the_training_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_CHUNK_VALUES", 100)  # many chunks, the last of them short
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(501, 4, generator=rng, dtype=torch.float64) * torch.tensor([1.0, 2.0, 50.0, 0.0])
    x += torch.tensor([0.0, 1.7e9, -3.0, 0.1])  # FP32 has steps of 128 there
    y = 100 + 10 * torch.randn(501, 2, generator=rng)
    dataset = load_dataset(ArraysDataConfig(path=write(tmp_path / "a.safetensors", x=x, y=y)), 0)
    train, validation = all_rows(dataset, "train"), all_rows(dataset, "validation")
    assert len(train["inputs"]) + len(validation["inputs"]) == 501
    assert 10 <= len(validation["inputs"]) <= 45
    assert train["inputs"].dtype == train["targets"].dtype == torch.float32
    for values in (train["inputs"][:, :3], train["targets"]):
        torch.testing.assert_close(values.mean(0), torch.zeros(values.shape[1]), atol=1e-5, rtol=0)
        torch.testing.assert_close(values.std(0, correction=0), torch.ones(values.shape[1]), atol=1e-5, rtol=0)
    assert not train["inputs"][:, 3].any()  # the constant column
    task = dataset.task
    assert isinstance(task, Regression)
    assert task.input_shape == (4,)
    # the task turns targets back into the data's own unit
    targets = torch.cat([train["targets"], validation["targets"]])
    restored = targets * torch.tensor(task.std) + torch.tensor(task.mean)
    torch.testing.assert_close(restored.sort(0).values, y.sort(0).values, atol=1e-3, rtol=0)


def test_whole_numbers_are_classes_and_any_type_of_inputs_is_read(tmp_path: Path) -> None:
    x = torch.arange(40 * 3 * 2 * 2).view(40, 3, 2, 2)
    for dtype in (torch.uint8, torch.bfloat16, torch.float64):
        path = write(tmp_path / "b.safetensors", x=(x % 100).to(dtype), y=(torch.arange(40) % 5).to(torch.uint8))
        dataset = load_dataset(ArraysDataConfig(path=path, standardize=False), 0)
        assert isinstance(dataset.task, Classification)
        assert dataset.task.labels == ("0", "1", "2", "3", "4")
        assert dataset.task.input_shape == (3, 2, 2)
        train = all_rows(dataset, "train")
        assert train["targets"].dtype == torch.int64
        rows = dataset.train.rows  # type: ignore[attr-defined]
        assert torch.equal(train["inputs"], (x % 100).float()[rows])
        assert train["targets"].tolist() == [row % 5 for row in rows]
    standardized = all_rows(load_dataset(ArraysDataConfig(path=path), 0), "train")["inputs"]
    torch.testing.assert_close(standardized.mean((0, 2, 3)), torch.zeros(3), atol=1e-6, rtol=0)  # by channel


def test_a_row_is_on_the_same_side_at_any_size_of_the_table_and_order_is_that_of_the_seed(tmp_path: Path) -> None:
    held_out = []
    for size in (300, 900):
        values = torch.arange(size, dtype=torch.float32)
        path = write(tmp_path / "c.safetensors", x=values[:, None], y=values)
        dataset = load_dataset(ArraysDataConfig(path=path, validation_percent=20, standardize=False), 0)
        held_out.append({row for row in all_rows(dataset, "validation")["targets"].flatten().tolist() if row < 300})
    assert held_out[0] == held_out[1]
    assert 30 < len(held_out[0]) < 90
    whole = next(BatchLoader(dataset.train, 3, 12, 1))[0]["targets"]
    parts = [next(BatchLoader(dataset.train, 3, 4, 1, rank, 3))[0]["targets"] for rank in range(3)]
    assert torch.equal(whole, torch.cat(parts))
    rows = torch.cat([batch["targets"] for batch, _ in validation_batches(dataset.validation, 7, None)])
    assert torch.equal(rows.sort(0).values, all_rows(dataset, "validation")["targets"].sort(0).values)


def test_a_file_of_its_own_to_validate_on_is_scaled_like_the_training_data(tmp_path: Path) -> None:
    x = torch.randn(30, 2)
    path = write(tmp_path / "train.safetensors", x=x, y=x.sum(1))
    other = write(tmp_path / "validation.safetensors", x=x + 1, y=x.sum(1))
    dataset = load_dataset(ArraysDataConfig(path=path, validation_path=other), 0)
    assert (dataset.train.num_samples, dataset.validation.num_samples) == (30, 30)
    shift = all_rows(dataset, "validation")["inputs"] - all_rows(dataset, "train")["inputs"]
    torch.testing.assert_close(shift, (1 / x.std(0, correction=0)).expand(30, 2))
    changed = write(tmp_path / "validation.safetensors", x=x + 2, y=x.sum(1))
    assert load_dataset(ArraysDataConfig(path=path, validation_path=changed), 0).fingerprint != dataset.fingerprint


FLOATS, CLASSES = torch.zeros(8, 2), torch.arange(8) % 2
NAN_X = torch.zeros(8, 2)
NAN_X[5, 1] = torch.nan


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": FLOATS}, r"data\.path=.* lacks y; expected x \[N, \.\.\.\] and y \[N\] or \[N, D\], got x"),
        ({"inputs": FLOATS, "y": CLASSES}, r"lacks x; .* got inputs, y"),
        ({"x": FLOATS, "y": CLASSES[:7]}, r"x \[8, 2\] and y \[7\], so 8 inputs and 7 targets"),
        ({"x": FLOATS[:, 0], "y": CLASSES}, r"x \[8\] and y \[8\]; expected x \[N, D\]"),
        ({"x": FLOATS, "y": FLOATS[..., None]}, r"expected .* y \[N\] or \[N, D\]"),
        ({"x": FLOATS[:0], "y": CLASSES[:0]}, "holds no value"),
        ({"x": FLOATS[:1], "y": FLOATS[:1]}, "has 1 row; training and validation need one each"),
        ({"x": FLOATS, "y": CLASSES[:, None]}, r"whole numbers in y \[8, 1\]; expected classes as \[N\]"),
        ({"x": FLOATS, "y": CLASSES - 1}, "the class -1 in row 0 of y; expected classes from 0"),
        ({"x": FLOATS, "y": CLASSES * 0}, "class 0 alone"),
        ({"x": FLOATS, "y": CLASSES * 50}, "classes up to 50 in y, more than its 8 samples"),
        ({"x": FLOATS.cfloat(), "y": CLASSES}, "complex"),
        ({"x": NAN_X, "y": CLASSES}, "has nan in row 5 of x; expected finite numbers of FP32"),
        ({"x": FLOATS, "y": torch.tensor([0.0] * 7 + [torch.inf])}, "has inf in row 7 of y"),
        ({"x": FLOATS.double() + 1e39, "y": CLASSES}, r"has 1e\+39 in row 0 of x; expected finite numbers of FP32"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    path = write(tmp_path / "d.safetensors", **tensors)
    with pytest.raises(ConfigError, match=message) as caught:
        load_dataset(ArraysDataConfig(path=path), 0)
    assert "\n" not in str(caught.value)


def test_files_that_are_missing_damaged_or_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no safetensors")
    path = write(tmp_path / "e.safetensors", x=FLOATS, y=CLASSES)
    wide = write(tmp_path / "f.safetensors", x=torch.zeros(8, 3), y=CLASSES)
    values = write(tmp_path / "g.safetensors", x=FLOATS, y=FLOATS[:, 0])
    (tmp_path / "link").symlink_to(path)
    for first, other, message in (
        ("nowhere", None, r"data\.path=nowhere is not found .*; expected a file of safetensors"),
        (tmp_path, None, "is a folder"),
        (tmp_path / "text", None, "cannot be read as safetensors"),
        (path, wide, r"validation_path=.* x \[8, 3\] .* expected equal shapes apart from the rows"),
        (path, values, r"has floats in y, but data\.path=.* whole numbers"),
        (path, tmp_path / "link", r"validation_path=.* is the file data\.path=.*, which is trained on"),
        (path, f"{tmp_path}/./e.safetensors", r"validation_path=.* is the file data\.path=.*, which is trained on"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_dataset(ArraysDataConfig(path=str(first), validation_path=None if other is None else str(other)), 0)
    calls: list[int] = []
    task = load_dataset(ArraysDataConfig(path=path), 0, on_progress=lambda: calls.append(0)).task
    assert len(calls) == 3  # the hash, the check of x, and the means of x
    assert dtrain.standardize(torch.empty(3, 2, device="meta"), task).is_meta


def test_friedmans_function_is_known_and_the_same_for_all_runs() -> None:
    table = arrays.friedman(FriedmanDataConfig(samples=4000, noise=0.0))
    x = table.x.double()
    assert 0 <= float(x.min()) < 0.01 < 0.99 < float(x.max()) < 1
    expected = 10 * (np.pi * x[:, 0] * x[:, 1]).sin() + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    torch.testing.assert_close(table.y[:, 0].double(), expected, atol=1e-5, rtol=0)
    noisy = arrays.friedman(FriedmanDataConfig(samples=4000, noise=1.0))
    noise = noisy.y - table.y
    assert torch.equal(noisy.x, table.x)
    assert abs(float(noise.mean())) < 0.05
    assert 0.95 < float(noise.std()) < 1.05
    dataset = load_dataset(FriedmanDataConfig(samples=4000), 0)
    assert isinstance(dataset.task, Regression)
    assert 4.5 < dataset.task.std[0] < 5.5
    assert dataset.fingerprint == load_dataset(FriedmanDataConfig(samples=4000), 0).fingerprint
    assert dataset.fingerprint != load_dataset(FriedmanDataConfig(samples=4000, noise=0.5), 0).fingerprint
