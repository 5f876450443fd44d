from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn.functional import grid_sample

from dtrain.config.data import GlyphsDataConfig, ImagesDataConfig
from dtrain.data import Dataset, load_dataset, validation_batches
from dtrain.data.images import glyphs
from dtrain.errors import ConfigError
from dtrain.tasks import Classification, Denoising
from dtrain.tasks.denoising import signal_shares


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset(GlyphsDataConfig(size=16), 0)


def test_the_samples_are_images_of_62_classes_in_fonts_that_are_trained_on_or_validated_on(dataset: Dataset) -> None:
    assert isinstance(dataset.task, Classification)
    assert "".join(dataset.task.labels) == "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert dataset.task.input_shape == (1, 16, 16)
    assert (dataset.train.num_samples, dataset.validation.num_samples) == (20 * 62 * 16, 992)
    assert not set(glyphs.TRAINING_FONTS) & set(glyphs.VALIDATION_FONTS)
    batch = dataset.train.batch(dataset.train.order(0, np.arange(2000)))
    assert list(batch) == ["inputs", "targets"]
    assert (batch["inputs"].shape, batch["inputs"].dtype) == ((2000, 1, 16, 16), torch.float32)
    assert abs(float(batch["inputs"].mean())) < 0.3
    assert 0.8 < float(batch["inputs"].std()) < 1.2
    targets = dataset.validation.batch(np.arange(992))["targets"]
    assert set(Counter(targets.tolist()).values()) == {16}, "of each character"


@settings(max_examples=20)
@given(seed=st.integers(0, 2**63 - 1), start=st.integers(0, 10**9), places=st.permutations(range(6)))
def test_a_sample_has_the_same_bits_in_any_batch(dataset: Dataset, seed: int, start: int, places: list[int]) -> None:
    ids = dataset.train.order(seed, start + np.arange(6))
    together = dataset.train.batch(ids)
    shuffled = dataset.train.batch(ids[places])
    for name, values in together.items():
        assert torch.equal(values[places], shuffled[name])
        assert torch.equal(values[2:3], dataset.train.batch(ids[2:3])[name])


def test_epochs_and_seeds_differ_and_validation_does_not(dataset: Dataset) -> None:
    train, validation, size = dataset.train, dataset.validation, dataset.train.num_samples
    epochs = [train.order(seed, epoch * size + np.arange(size)) for seed in (0, 1) for epoch in (0, 1)]
    assert all(set(ids % size) == set(range(size)) for ids in epochs)  # each has all samples,
    assert len(set(np.concatenate(epochs).tolist())) == 4 * size  # but in other draws
    same_sample = np.array([ids[ids % size == 7][0] for ids in epochs])
    assert len(train.batch(same_sample)["inputs"].flatten(1).unique(dim=0)) == 4
    assert len(train.batch(same_sample)["targets"].unique()) == 1
    first, second = (validation.batch(validation.order(0, epoch * 992 + np.arange(992))) for epoch in (0, 5))
    order = [values.flatten(1).double().sum(1).sort().values for values in (first["inputs"], second["inputs"])]
    assert torch.equal(*order)
    rows = [batch["inputs"] for batch, _ in validation_batches(validation, 100, None)]
    assert len(torch.cat(rows).flatten(1).unique(dim=0)) == 992


def test_the_interpolation_is_that_of_torch() -> None:
    rng = np.random.default_rng(0)
    bitmaps = np.zeros((3, 20, 20), np.uint8)
    bitmaps[:, 1:-1, 1:-1] = rng.integers(0, 256, (3, 18, 18))
    maps = rng.uniform(-1.2, 1.2, (8, 2, 3))
    chosen = rng.integers(0, 3, 8)
    ours = glyphs._interpolate(glyphs._corners(bitmaps), chosen, maps, 12)
    grid = torch.nn.functional.affine_grid(torch.from_numpy(maps).float(), [8, 1, 12, 12], align_corners=False)
    images = torch.from_numpy(bitmaps[chosen, None] / np.float32(255))
    expected = grid_sample(images, grid, padding_mode="border", align_corners=False)
    torch.testing.assert_close(torch.from_numpy(ours), expected.flatten(1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [8, 33])
def test_any_size_shows_whole_characters(size: int) -> None:
    drawn = glyphs.draw_glyphs("digits", size, ("DejaVuSans", "cmr10"))
    assert drawn.shape[:2] == (2, 10)
    for bitmap in drawn.reshape(-1, *drawn.shape[2:]):
        rows, columns = np.nonzero(bitmap > 64)
        side = len(bitmap)
        assert min(rows.min(), columns.min()) > 0.05 * side
        assert max(rows.max(), columns.max()) < 0.95 * side
        assert rows.max() - rows.min() > 0.4 * side
    source = load_dataset(GlyphsDataConfig(size=size, characters="digits"), 0).validation
    assert source.batch(np.arange(4))["inputs"].shape == (4, 1, size, size)


def test_the_fingerprint_tells_settings_apart_and_a_missing_font_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[dict[str, Any]] = [{"size": size, "validation_percent": p} for size in (8, 9) for p in (0, 5)]
    changes.append({"size": 8, "task": "denoising"})
    configs = [GlyphsDataConfig(characters="digits", **own) for own in changes]
    datasets = [load_dataset(config, 0) for config in configs]
    assert len({dataset.fingerprint for dataset in datasets}) == 5
    assert datasets[0].validation.num_samples == 10  # one of each class
    assert load_dataset(configs[0], 0).fingerprint == datasets[0].fingerprint
    monkeypatch.setattr(glyphs, "TRAINING_FONTS", ("DejaVuSans", "NoSuchFont"))
    with pytest.raises(ConfigError, match=r"cannot read the font .*NoSuchFont\.ttf.*install matplotlib again"):
        load_dataset(configs[0], 0)


@pytest.fixture(scope="module")
def noisy() -> Dataset:
    return load_dataset(GlyphsDataConfig(task="denoising", size=16, characters="digits"), 0)


def parts(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The image and the noise whose sum and velocity the batch has."""
    share = signal_shares(1000)[batch["times"]].view(-1, 1, 1, 1)
    signal, rest = share.sqrt(), (1 - share).sqrt()
    noisy, velocity = batch["noisy"], batch["targets"]
    return signal * noisy - rest * velocity, rest * noisy + signal * velocity


def test_a_batch_is_an_image_with_the_noise_of_its_time(noisy: Dataset) -> None:
    task = noisy.task
    assert isinstance(task, Denoising)
    assert (task.labels, task.input_shape) == (tuple("0123456789"), (1, 16, 16))
    ids = noisy.train.order(0, np.arange(512))
    batch = noisy.train.batch(ids)
    assert list(batch) == ["noisy", "times", "classes", "targets"]
    assert [batch[name].dtype for name in batch] == [torch.float32, torch.int64, torch.int64, torch.float32]
    images, noise = parts(batch)
    assert max(abs(float(noise.mean())), abs(float(noise.std()) - 1)) < 0.02
    times = batch["times"].double()
    assert 0 <= int(times.min()) < 20 < 980 < int(times.max()) < 1000
    assert abs(float(times.mean()) - 500) < 60
    assert images.aminmax() == pytest.approx((-1, 1), abs=1e-3)
    reversed_ids = noisy.train.batch(ids[::-1])
    assert all(torch.equal(values.flip(0), reversed_ids[name]) for name, values in batch.items())
    epochs = noisy.train.batch(7 + noisy.train.num_samples * np.array([0, 1, 5]))
    assert len(epochs["targets"].flatten(1).unique(dim=0)) == len(epochs["times"].unique()) == 3
    # beneath the noise are the glyphs that a classifier would be shown
    shown = load_dataset(GlyphsDataConfig(size=16, characters="digits"), 0).train.batch(ids)
    assert torch.equal(shown["targets"], batch["classes"])
    pairs = zip(images.flatten(1), shown["inputs"].flatten(1), strict=True)
    assert min(float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in pairs) > 0.8


def test_validation_is_fixed_and_its_times_are_evenly_spread(noisy: Dataset) -> None:
    count = noisy.validation.num_samples
    rows = [batch for batch, _ in validation_batches(noisy.validation, 64, None)]
    assert sum(len(batch["times"]) for batch in rows) == count
    again = [batch for batch, _ in validation_batches(noisy.validation, 64, None)]
    assert all(torch.equal(one[name], two[name]) for one, two in zip(rows, again, strict=True) for name in one)
    times = torch.cat([batch["times"] for batch in rows]).sort().values.double()
    even = (torch.arange(count) + 0.5) * 1000 / count
    assert float((times - even).abs().max()) < 3 * 1000 / count


def test_images_of_files_get_noise_too(tmp_path: Path) -> None:
    for number, label in enumerate(("a", "b")):
        (tmp_path / label).mkdir()
        for index in range(4):
            Image.new("RGB", (9, 9), (255 * number,) * 3).save(tmp_path / label / f"{index}.png")
    dataset = load_dataset(ImagesDataConfig(path=str(tmp_path), task="denoising", size=4, workers=0), 0)
    assert dataset.task == Denoising(("a", "b"), (3, 4, 4))
    batch = dataset.train.batch(dataset.train.order(0, np.arange(6)))
    expected = (2.0 * batch["classes"] - 1).view(-1, 1, 1, 1).expand(-1, 3, 4, 4)
    torch.testing.assert_close(parts(batch)[0], expected, atol=1e-3, rtol=0)
