from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from dtrain.config.data import ImagesDataConfig
from dtrain.data import BatchLoader, Dataset, load_dataset, validation_batches
from dtrain.data.images.decode import ImageError, box, decode
from dtrain.data.images.workers import Decoder
from dtrain.errors import ConfigError, DataError
from dtrain.tasks import Classification
from tests.helpers.launch import is_gone

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def blocks(*rows: tuple[tuple[int, int, int], ...], side: int = 20) -> Image.Image:
    """Squares of one color each."""
    return Image.fromarray(np.kron(np.array(rows, np.uint8), np.ones((side, side, 1), np.uint8)))


def noise(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def make_folder(root: Path, counts: dict[str, int]) -> str:
    for number, (label, count) in enumerate(counts.items()):
        (root / label).mkdir(parents=True)
        for index in range(count):
            noise(100 * number + index).save(root / label / f"{index}.png")
    return str(root)


def open_images(path: str, **changes: Any) -> Dataset:
    return load_dataset(ImagesDataConfig(**{"path": path, "size": 8, "workers": 0, **changes}), 0)


def pixels(path: Path, view: tuple[float, ...] = (), size: int = 2, channels: str = "rgb") -> NDArray[np.uint8]:
    return np.frombuffer(decode(str(path), view, size, channels), np.uint8).reshape(size, size, -1)


def test_the_largest_square_in_the_middle_is_shown_unless_it_is_cut_at_random(tmp_path: Path) -> None:
    path = tmp_path / "wide.png"
    blocks((RED, GREEN, BLUE, RED)).save(path)  # 80 x 20
    assert pixels(path, size=10)[:, [0, 9]].tolist() == [[list(GREEN), list(BLUE)]] * 10
    # half of the area, twice as wide as high: 40 x 20, at the left end and mirrored
    assert pixels(path, (0.5, 2.0, 0.0, 0.0, True), size=10)[:, [2, 7]].tolist() == [[list(GREEN), list(RED)]] * 10
    # more than fits keeps its aspect
    assert pixels(path, (1.0, 1.0, 1.0, 0.5, False), size=10)[:, 1:].tolist() == [[list(RED)] * 9] * 10


@given(
    st.floats(0.25, 1), st.floats(0.75, 1.34), st.floats(0, 1), st.floats(0, 1), st.tuples(*[st.integers(1, 5000)] * 2)
)
def test_a_part_is_in_its_image(share: float, aspect: float, across: float, down: float, size: tuple[int, int]) -> None:
    width, height = size
    left, top, right, bottom = box((share, aspect, across, down, False), width, height)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    if min(width, height) > 10 and 0.5 < width / height < 2 and share < 0.3:
        assert (right - left) * (bottom - top) == pytest.approx(share * width * height)
        assert (right - left) / (bottom - top) == pytest.approx(aspect)


def test_the_orientation_of_exif_is_applied(tmp_path: Path) -> None:
    upright = blocks((RED, GREEN, GREEN), (BLUE, WHITE, WHITE))
    upright.save(tmp_path / "upright.png")
    undo = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_90 TRANSVERSE ROTATE_270"  # of 2 to 8
    for orientation, name in enumerate([None, *undo.split()], start=1):
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored = upright if name is None else upright.transpose(Image.Transpose[name])
        stored.save(tmp_path / "turned.png", exif=exif)
        for shown in ((), (0.4, 1.2, 0.1, 0.7, False)):
            turned, expected = (pixels(tmp_path / f"{file}.png", shown, 6) for file in ("turned", "upright"))
            assert turned.tolist() == expected.tolist(), orientation


@pytest.mark.parametrize(
    ("name", "mode", "fill", "expected"),
    [
        ("a.png", "RGBA", (255, 0, 0, 0), WHITE),  # what is transparent is white
        ("b.png", "RGBA", (255, 0, 0, 255), RED),
        ("c.png", "LA", (0, 128), (127, 127, 127)),
        ("d.png", "L", 77, (77, 77, 77)),
        ("e.png", "1", 1, WHITE),
        ("f.png", "I;16", 0x8012, (128, 128, 128)),
        ("g.png", "P", 0, RED),
        ("h.gif", "P", 0, RED),
        ("i.bmp", "RGB", GREEN, GREEN),
        ("j.webp", "RGB", (200, 200, 200), (200, 200, 200)),
        ("k.jpg", "RGB", (200, 200, 200), (200, 200, 200)),
        ("l.jpg", "CMYK", (0, 0, 0, 0), WHITE),
    ],
)
def test_pixels_become_color_or_gray(tmp_path: Path, name: str, mode: str, fill: Any, expected: Any) -> None:
    image = Image.new(mode, (12, 9), fill)
    if mode == "P":
        image.putpalette([*RED, *BLUE])
    image.save(tmp_path / name)
    assert np.abs(pixels(tmp_path / name).astype(int) - expected).max() <= 1
    gray = np.dot(expected, [0.299, 0.587, 0.114])
    assert np.abs(pixels(tmp_path / name, channels="gray").astype(float) - gray).max() <= 1.5


def test_an_animation_gives_its_first_image_and_a_transparent_color_of_a_palette_is_white(tmp_path: Path) -> None:
    first, second = Image.new("RGB", (8, 8), RED), Image.new("RGB", (8, 8), BLUE)
    first.save(tmp_path / "a.gif", save_all=True, append_images=[second])
    assert pixels(tmp_path / "a.gif").tolist() == [[list(RED)] * 2] * 2
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([*RED, *BLUE])
    palette.save(tmp_path / "b.png", transparency=1)
    assert pixels(tmp_path / "b.png").tolist() == [[list(WHITE)] * 2] * 2


def test_a_large_jpeg_that_is_decoded_at_a_part_of_its_size_looks_the_same(tmp_path: Path) -> None:
    smooth = noise(0, 8, 6).resize((1600, 1200), Image.Resampling.BICUBIC)
    smooth.save(tmp_path / "a.jpg", quality=95)
    smooth.save(tmp_path / "a.png")
    for view in ((), (0.3, 1.3, 0.2, 0.9, True)):
        difference = pixels(tmp_path / "a.jpg", view, 32).astype(int) - pixels(tmp_path / "a.png", view, 32)
        assert np.abs(difference).mean() < 2


def test_classes_are_the_folders_in_sorted_order_and_images_may_lie_deeper(tmp_path: Path) -> None:
    for number, name in enumerate(("dog/1.PNG", "cat/old/2.jpeg", "cat/1.png", "dog/more/x/3.bmp")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (10 * number,) * 3).save(tmp_path / name)
    for ignored in (".cache/1.png", "cat/._1.png", "cat/notes.txt", "readme.txt"):
        (tmp_path / ignored).parent.mkdir(exist_ok=True)
        (tmp_path / ignored).write_text("no image")
    dataset = open_images(str(tmp_path), validation_percent=0)
    task = dataset.task
    assert isinstance(task, Classification)
    assert (task.labels, task.input_shape) == (("cat", "dog"), (3, 8, 8))
    assert dataset.description.startswith("data=images: 4 images of 2 classes in ")
    rows = [source.batch(np.arange(2)) for source in (dataset.train, dataset.validation)]  # one of each class each
    found = {(int(t), round(float(x.mean()), 3)) for row in rows for x, t in zip(*row.values(), strict=True)}
    assert found == {(label, round(level / 127.5 - 1, 3)) for label, level in ((1, 0), (0, 10), (0, 20), (1, 30))}
    inputs, targets = open_images(str(tmp_path), channels="gray").train.batch(np.arange(2)).values()
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((2, 1, 8, 8), torch.float32, torch.int64)


@pytest.mark.processes
def test_bits_do_not_depend_on_workers_batches_ranks_or_a_resume(tmp_path: Path) -> None:
    path = make_folder(tmp_path, {"a": 12, "b": 9})
    datasets = [open_images(path, workers=workers, augment="crop_flip") for workers in (0, 1, 3)]
    size = datasets[0].train.num_samples
    ids = datasets[0].train.order(5, size - 4 + np.arange(11))  # into the second epoch
    expected = datasets[0].train.batch(ids)
    for dataset in datasets[1:]:
        assert dataset.fingerprint == datasets[0].fingerprint
        for places in ([*range(11)], [7, 3, 0], [10]):
            batch = dataset.train.batch(ids[places])
            assert all(torch.equal(batch[name], expected[name][places]) for name in expected)
    ranks = [BatchLoader(dataset.train, 5, 4, 1, rank, 2, cursor=size - 4) for rank, dataset in enumerate(datasets[1:])]
    assert torch.equal(torch.cat([next(rank)[0]["inputs"] for rank in ranks]), expected["inputs"][:8])


def test_epochs_show_other_parts_and_validation_is_fixed(tmp_path: Path) -> None:
    path = make_folder(tmp_path, {"a": 25, "b": 25})
    plain = open_images(path, validation_percent=30).validation.batch(np.arange(5))["inputs"]
    for augment, num_different in (("none", 1), ("crop", 4), ("crop_flip", 4)):
        dataset = open_images(path, augment=augment, validation_percent=30)
        train, size = dataset.train, dataset.train.num_samples
        epochs = [train.order(seed, epoch * size + np.arange(size)) for seed in (0, 1) for epoch in (0, 1)]
        batch = train.batch(np.array([ids[ids % size == 3][0] for ids in epochs]))
        assert len(batch["inputs"].flatten(1).unique(dim=0)) == num_different
        assert torch.equal(dataset.validation.batch(np.arange(5))["inputs"], plain)
        rows = [batch["inputs"] for batch, _ in validation_batches(dataset.validation, 7, None)]
        assert len(torch.cat(rows).flatten(1).unique(dim=0)) == dataset.validation.num_samples == 50 - size
    assert [train.file(sample) for sample in epochs[0]] == [train.file(sample % size) for sample in epochs[0]]
    assert all(Path(path, train.file(sample)).is_file() for sample in epochs[0])
    views = [train.pictures._view(sample) for sample in range(400)]  # type: ignore[attr-defined]
    assert 0.4 < np.mean([view[4] for view in views]) < 0.6
    assert 0.25 <= min(view[0] for view in views) < 0.3 < 0.95 < max(view[0] for view in views) <= 1
    assert 0.75 <= min(view[1] for view in views) < 0.8 < 1.25 < max(view[1] for view in views) < 1.34


def test_images_stay_on_their_side_and_every_class_is_trained_on(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "a", {"x": 30, "y": 2, "z": 1})
    first = open_images(path, validation_percent=40)
    names = {side: set(getattr(first, side).pictures.names) for side in ("train", "validation")}
    assert {name[0] for name in names["train"]} == {"x", "y", "z"}
    assert names["validation"]
    for index in range(30, 60):
        noise(index).save(Path(path, "x", f"{index}.png"))
    second = open_images(path, validation_percent=40)
    assert names["validation"] - set(second.validation.pictures.names) <= {"y/0.png", "y/1.png"}  # type: ignore[attr-defined]
    assert names["train"] <= set(second.train.pictures.names)  # type: ignore[attr-defined]
    assert second.fingerprint != first.fingerprint
    # nothing falls below 0 %, so one image of each class that has two
    held_out = open_images(path, validation_percent=0).validation.batch(np.arange(2))
    assert held_out["targets"].tolist() == [0, 1]


def test_a_folder_that_holds_no_classes_is_refused_in_one_line(tmp_path: Path) -> None:
    def refuse(message: str, path: Path, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            open_images(str(path), **changes)
        assert "\n" not in str(caught.value)

    refuse(r"data\.path=.*nowhere is not found .*expected a folder with a folder of images", tmp_path / "nowhere")
    flat = tmp_path / "flat"
    flat.mkdir()
    refuse("holds no folder; expected a folder for each class", flat)
    noise(0).save(flat / "1.png")
    refuse("holds 1 images of no class; expected a folder for each class: .*/CLASS/1.jpg", flat)
    refuse("is no folder", flat / "1.png")
    one = Path(make_folder(tmp_path / "one", {"cat": 3}))
    refuse("holds the class 'cat' alone; expected at least two", one)
    (one / "dog").mkdir()
    (one / "dog" / "1.tiff").write_text("of a format that is not read")
    refuse("'dog' without an image; expected files .png, .jpg", one)
    refuse("one image of each class", Path(make_folder(tmp_path / "few", {"a": 1, "b": 1})))
    good, other = make_folder(tmp_path / "good", {"a": 3, "b": 3}), make_folder(tmp_path / "other", {"b": 1, "c": 1})
    refuse(r"has other classes than data\.path=.*: it lacks 'a' and it has 'c'", Path(good), validation_path=other)
    (tmp_path / "link").symlink_to(good)
    for same in (f"{good}/", str(tmp_path / "link")):
        refuse(r"validation_path=.* is the folder data\.path=.*, which is trained on", Path(good), validation_path=same)
    Path(good, "a/2.png").write_bytes(b"")
    refuse(r"good/a/2\.png cannot be decoded: its format is not BMP, .* or WEBP; replace the file or", Path(good))


def test_a_folder_to_validate_on_holds_nothing_out_and_a_long_start_tells_that_it_goes_on(tmp_path: Path) -> None:
    path, other = make_folder(tmp_path / "a", {"a": 3, "b": 1}), make_folder(tmp_path / "b", {"a": 1, "b": 2})
    calls: list[int] = []
    config = ImagesDataConfig(path=path, validation_path=other, size=8, workers=0)
    dataset = load_dataset(config, 0, on_progress=lambda: calls.append(0))
    assert (dataset.train.num_samples, dataset.validation.num_samples) == (4, 3)
    assert open_images(other, validation_path=path).fingerprint != dataset.fingerprint
    assert len(calls) >= 11  # four folders, seven files


def test_a_damaged_image_is_named_and_a_format_of_another_suffix_starts_no_program(tmp_path: Path) -> None:
    """Pillow reads EPS with Ghostscript, and ICO whatever the name says."""
    for path in (tmp_path / "a.png", tmp_path / "a.jpg"):
        noise(0, 300, 200).save(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(ImageError, match=rf"{path.name} cannot be decoded: "):
            decode(str(path), (), 8, "rgb")
    path.unlink()
    with pytest.raises(ImageError, match=r"a\.jpg cannot be decoded: .*No such file"):
        decode(str(path), (), 8, "rgb")
    path = tmp_path / "a.png"
    for other in ("EPS", "ICO", "TIFF"):
        noise(0).save(path, format=other)
        with pytest.raises(ImageError, match=r"a\.png cannot be decoded: its format is not BMP, .* or WEBP$"):
            decode(str(path), (), 8, "rgb")
    noise(0).save(path, format="JPEG")
    assert len(decode(str(path), (), 8, "rgb")) == 8 * 8 * 3


@pytest.mark.processes
def test_a_damaged_image_or_a_killed_process_ends_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "struct.py").write_text("raise SystemExit('code of the working directory runs')")
    make_folder(tmp_path, {"a": 4})
    files = [str(tmp_path / "a" / f"{index}.png") for index in range(4)]
    decoder = Decoder(2, 8, "rgb")
    whole = decoder.decode(files, [()] * 4)
    Path(files[0]).rename(tmp_path / "kept")
    Path(files[0]).write_bytes((tmp_path / "kept").read_bytes()[:200])
    message = r"a/0\.png cannot be decoded: .*; replace the file or take it out of its folder$"
    with pytest.raises(DataError, match=message):
        decoder.decode(files, [()] * 4)
    assert decoder.decode(files[1:], [()] * 3).tolist() == whole[1:].tolist()  # by new processes
    workers = list(decoder._workers)
    workers[1].kill()
    with pytest.raises(DataError, match="a process that decodes images ended with code -9: memory may be short"):
        decoder.decode(files[1:], [()] * 3)
    assert all(worker.poll() is not None for worker in workers)
    assert decoder.decode(files[3:], [()]).tolist() == whole[3:].tolist()
    workers = list(decoder._workers)
    del decoder
    gc.collect()
    assert all(worker.poll() is not None for worker in workers)


@pytest.mark.processes
def test_training_and_validation_may_decode_at_the_same_time(tmp_path: Path) -> None:
    dataset = open_images(make_folder(tmp_path, {"a": 20, "b": 20}), workers=2, validation_percent=30)
    expected = [source.batch(np.arange(5))["inputs"] for source in (dataset.train, dataset.validation)]

    def is_read(side: int) -> bool:
        source = (dataset.train, dataset.validation)[side]
        return all(torch.equal(source.batch(np.arange(5))["inputs"], expected[side]) for _ in range(8))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_read, (0, 1, 0, 1)))


SCRIPT = """
import sys, time
from dtrain.config.data import ImagesDataConfig
from dtrain.data import BatchLoader, PrefetchedBatches, load_dataset
import torch

dataset = load_dataset(ImagesDataConfig(path=sys.argv[1], size=8, workers=2), 0)
batches = PrefetchedBatches(BatchLoader(dataset.train, 0, 4, 1), 1, torch.device("cpu"))
for _ in range(3):
    next(batches)
print(*(worker.pid for worker in dataset.train.pictures.decoder._workers), flush=True)
time.sleep(60)
"""


@pytest.mark.processes
def test_the_processes_end_with_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, make_folder(tmp_path, {"a": 6, "b": 6})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = list(map(int, process.stdout.readline().split()))
        assert len(pids) == 2
        for pid in pids:  # what stops a whole job leaves them to the process that started them
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        time.sleep(0.1)
        assert not any(map(is_gone, pids))
        process.kill()
    deadline = time.monotonic() + 20
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
