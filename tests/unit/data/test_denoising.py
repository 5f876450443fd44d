from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dtrain.config.data import GlyphsDataConfig, ImagesDataConfig
from dtrain.data import Dataset, load_dataset, validation_batches
from dtrain.tasks import Denoising
from dtrain.tasks.denoising import signal_shares


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset(GlyphsDataConfig(task="denoising", size=16, characters="digits"), 0)


def parts(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The image and the noise whose sum and velocity the batch has."""
    share = signal_shares(1000)[batch["times"]].view(-1, 1, 1, 1)
    signal, rest = share.sqrt(), (1 - share).sqrt()
    noisy, velocity = batch["noisy"], batch["targets"]
    return signal * noisy - rest * velocity, rest * noisy + signal * velocity


def test_a_batch_is_an_image_with_the_noise_of_its_time(dataset: Dataset) -> None:
    task = dataset.task
    assert isinstance(task, Denoising)
    assert (task.labels, task.input_shape) == (tuple("0123456789"), (1, 16, 16))
    ids = dataset.train.order(0, np.arange(512))
    batch = dataset.train.batch(ids)
    assert list(batch) == ["noisy", "times", "classes", "targets"]
    assert [batch[name].dtype for name in batch] == [torch.float32, torch.int64, torch.int64, torch.float32]
    images, noise = parts(batch)
    assert abs(float(noise.mean())) < 0.02
    assert abs(float(noise.std()) - 1) < 0.02
    times = batch["times"].double()
    assert 0 <= int(times.min()) < 20 < 980 < int(times.max()) < 1000
    assert abs(float(times.mean()) - 500) < 60
    assert float(images.min()) == pytest.approx(-1, abs=1e-3)
    assert float(images.max()) == pytest.approx(1, abs=1e-3)
    # beneath the noise are the glyphs that a classifier would be shown
    shown = load_dataset(GlyphsDataConfig(size=16, characters="digits"), 0).train.batch(ids)
    assert torch.equal(shown["targets"], batch["classes"])
    pairs = zip(images.flatten(1), shown["inputs"].flatten(1), strict=True)
    assert min(float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in pairs) > 0.8


def test_a_sample_has_the_same_bits_in_any_batch_and_other_noise_in_each_epoch(dataset: Dataset) -> None:
    train, size = dataset.train, dataset.train.num_samples
    ids = train.order(3, size - 5 + np.arange(12))
    together = train.batch(ids)
    for places in ([*range(12)][::-1], [4], [11, 2]):
        assert all(torch.equal(values[places], train.batch(ids[places])[name]) for name, values in together.items())
    same = np.array([7, 7 + size, 7 + 5 * size])
    batch = train.batch(same)
    assert len(batch["targets"].flatten(1).unique(dim=0)) == 3
    assert len(batch["times"].unique()) == 3


def test_validation_is_fixed_and_its_times_are_evenly_spread(dataset: Dataset) -> None:
    count = dataset.validation.num_samples
    rows = [batch for batch, _ in validation_batches(dataset.validation, 64, None)]
    assert sum(len(batch["times"]) for batch in rows) == count
    again = [batch for batch, _ in validation_batches(dataset.validation, 64, None)]
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
