"""Losses, metrics and samples of tasks against plain torch, and models of a user under them."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.config.model import ModelConfig
from dtrain.data import validation_batches
from dtrain.data.dataset import SampleSource
from dtrain.data.sampling import Indices
from dtrain.errors import ConfigError, ModelError
from dtrain.models import build_model
from dtrain.models.task_model import TaskModel
from dtrain.tasks import IGNORE_INDEX, Classification, Denoising, Regression, SampleOptions, Task, num_targets
from dtrain.tasks.task import gather_samples
from dtrain.train.validation import validate
from tests.helpers.image_models import classification, start
from tests.helpers.net import Net
from tests.helpers.ranks import run_ranks

OPTIONS = SampleOptions(num_tokens=0, max_seq_len=1, seed=0)


class Fixed(nn.Module):
    """Predicts its inputs plus a trained bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.bias


def in_parts(batch: dict[str, Tensor], *sizes: int) -> Iterator[tuple[dict[str, Tensor], bool]]:
    parts = zip(*(tensor.split(list(sizes)) for tensor in batch.values()), strict=True)
    return iter([(dict(zip(batch, part, strict=True)), True) for part in parts])


def test_classification_counts_each_sample_with_a_class_once() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(11, 4, generator=generator), torch.randint(4, (11,), generator=generator)
    targets[[2, 5, 6]] = IGNORE_INDEX
    batch, counted = {"inputs": logits, "targets": targets}, targets != IGNORE_INDEX
    task = classification(4, classes=4)
    engine = start(TaskModel(Fixed(4), task))
    found = validate(engine, task, in_parts(batch, 4, 4, 3))
    predicted = logits.argmax(dim=1)
    right = int((predicted == targets).sum())
    assert found["accuracy"] == right / 8
    assert found["loss"] == pytest.approx(float(F.cross_entropy(logits[counted], targets[counted])), rel=1e-6)
    assert num_targets(targets) == 8
    text = task.sample(engine, in_parts(batch, 4, 4, 3), OPTIONS).text.splitlines()
    assert text[0] == f"{right} of 8 validation samples right ({100 * right / 8:.1f} %)"
    pairs = Counter(zip(targets[counted].tolist(), predicted[counted].tolist(), strict=True))
    rows = Counter(targets[counted].tolist())
    wrong = {f"class {a} taken for class {b}: {n} of {rows[a]}" for (a, b), n in pairs.items() if a != b}
    assert set(text[1:]) <= wrong
    assert len(text[1:]) == min(5, len(wrong))


def test_a_batch_without_a_class_has_loss_zero_and_finite_gradients() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    loss = classification(4, classes=4).loss(logits, torch.full((3,), IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()  # type: ignore[union-attr]


def test_labels_are_smoothed_in_training_only() -> None:
    task, logits, targets = classification(4, classes=4), torch.randn(6, 4), torch.arange(6) % 4
    model = TaskModel.of(Fixed(4), task, ModelConfig(label_smoothing=0.2, factory="dtrain.models.mlp:build"))
    smoothed, plain = (F.cross_entropy(logits, targets, label_smoothing=share) for share in (0.2, 0.0))
    assert model(inputs=logits, targets=targets).loss.item() == pytest.approx(float(smoothed), rel=1e-6)
    assert model.eval()(inputs=logits, targets=targets).loss.item() == pytest.approx(float(plain), rel=1e-6)


def test_regression_measures_in_the_unit_of_the_data() -> None:
    """Two target values of other sizes, the second far from zero."""
    generator = torch.Generator().manual_seed(0)
    mean, std = (3.0, 1e4), (0.5, 20.0)
    scaled, noise = (torch.randn(11, 2, generator=generator) for _ in range(2))
    predicted = scaled + 0.3 * noise
    task = Regression((2,), mean, std)
    engine = start(TaskModel(Fixed(2), task))
    batch = {"inputs": predicted, "targets": scaled}
    found = validate(engine, task, in_parts(batch, 4, 4, 3))
    true, own = (values.double() * torch.tensor(std) + torch.tensor(mean) for values in (scaled, predicted))
    errors = (own - true).square()
    assert found["loss"] == pytest.approx(float(F.mse_loss(predicted, scaled)), rel=1e-6)
    assert found["rmse"] == pytest.approx(float(errors.mean().sqrt()), rel=1e-6)
    assert found["r2"] == pytest.approx(1 - float(errors.sum() / (true - true.mean(dim=0)).square().sum()), rel=1e-6)
    typical = float((own - true).abs().median())
    text = task.sample(engine, in_parts(batch, 4, 4, 3), OPTIONS).text
    assert text == f"half of 11 validation samples are off by less than {typical:.4g}"
    assert task.describe({"targets": torch.tensor([[0.0, 1.0]])}) == ["3, 10020"]

    constant = {"inputs": predicted, "targets": torch.zeros(11, 2)}
    assert set(validate(engine, task, in_parts(constant, 11))) == {"loss", "rmse"}, "r2 is not defined"


def test_a_tiny_unit_and_a_spread_of_rounding_are_measured_as_they_are() -> None:
    predicted, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [1.0]])
    tiny = Regression((1,), (0.0,), (1e-200,))
    found = validate(start(TaskModel(Fixed(1), tiny)), tiny, in_parts({"inputs": predicted, "targets": targets}, 2))
    assert found["rmse"] == pytest.approx(2.5**0.5 * 1e-200, rel=1e-6)
    assert found["r2"] == pytest.approx(1 - 5 / 0.5, rel=1e-6)
    # the FP64 sum of seven squares of 1.9 is a little more than their mean's
    task = Regression((1,), (0.0,), (1.0,))
    constant = {"inputs": torch.zeros(7, 1), "targets": torch.full((7, 1), 1.9)}
    found = validate(start(TaskModel(Fixed(1), task)), task, in_parts(constant, *[1] * 7))
    assert set(found) == {"loss", "rmse"}


@pytest.mark.parametrize("classes", [3, 62])
def test_the_picture_of_drawn_images_is_about_square_and_classes_are_its_columns(classes: int) -> None:
    task = Denoising(tuple(f"class {index}" for index in range(classes)), (1, 8, 8))
    model = Net(lambda net, noisy, times, classes: net.share * noisy, share=nn.Parameter(torch.tensor(0.5)))
    figure = task.sample(start(TaskModel(model, task)), iter(()), OPTIONS).figure
    assert figure is not None
    pixels = figure.axes[0].images[0].get_array()
    assert pixels is not None
    rows, columns = (side // 9 for side in pixels.shape[:2])
    assert 8 <= columns <= 16
    assert columns % classes == 0 or classes > 16
    assert 40 <= rows * columns <= 64
    assert max(figure.get_size_inches()) * figure.dpi <= 1000


def test_names_of_classes_are_no_formulas() -> None:
    task = Classification(("$1_$", "$\\frac$"), (2,))
    batch = {"inputs": torch.eye(2), "targets": torch.arange(2)}
    figure = task.sample(start(TaskModel(Fixed(2), task)), in_parts(batch, 2), OPTIONS).figure
    assert figure is not None
    figure.savefig(io.BytesIO())


NUM_SAMPLES, MICRO_BATCH = 19, 4  # five micro-batches, of which the last has three samples
CLASSES = classification(6, classes=5)
VALUES = Regression((6,), mean=(1.0, -20.0), std=(0.3, 7.0))
TASKS: tuple[Task, ...] = (CLASSES, VALUES)


class Numbers(SampleSource):
    """Random inputs, whose first number is the sample's id."""

    num_samples = NUM_SAMPLES

    def __init__(self, task: Task) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(NUM_SAMPLES, 6, generator=generator)
        self.inputs[:, 0] = torch.arange(NUM_SAMPLES) / NUM_SAMPLES
        self.targets = torch.randn(NUM_SAMPLES, 2, generator=generator)
        if task is CLASSES:
            self.targets = torch.randint(5, (NUM_SAMPLES,), generator=generator)
            self.targets[::4] = IGNORE_INDEX

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        return {"inputs": self.inputs[sample_ids], "targets": self.targets[sample_ids]}


def linear(task: Task) -> TaskModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return TaskModel(nn.Linear(6, task.num_outputs), task)


def _measure(rank: int, world: int) -> list[Any]:
    """Metrics, sample and ids of all validation samples, and of two micro-batches only, for each task."""
    found: list[Any] = []
    for task in TASKS:
        engine = start(linear(task))
        for num_batches in (None, 2):
            batches = partial(validation_batches, Numbers(task), MICRO_BATCH, num_batches, rank, world)
            ids = gather_samples(engine, batches(), lambda _, batch: (batch["inputs"][:, :1] * NUM_SAMPLES).round())
            sample = task.sample(engine, batches(), OPTIONS)
            found.append((validate(engine, task, batches()), ids.flatten().tolist(), sample.text))
    return found


@pytest.mark.processes
def test_metrics_have_the_same_digits_on_any_number_of_ranks() -> None:
    """Also if some ranks have no micro-batch that counts."""
    (one,) = run_ranks(1, _measure)
    assert run_ranks(3, _measure) == [one] * 3
    for number, (task, num_batches) in enumerate([(task, num) for task in TASKS for num in (None, 2)]):
        source, (metrics, ids, _) = Numbers(task), one[number]
        micro_batches = [micro["inputs"] for micro, _ in validation_batches(source, MICRO_BATCH, num_batches)]
        assert ids == (torch.cat(micro_batches)[:, 0] * NUM_SAMPLES).round().tolist()
        assert len(set(ids)) == len(ids) == (NUM_SAMPLES if num_batches is None else 2 * MICRO_BATCH)
        batch = source.batch(torch.tensor(ids).long().numpy())
        with torch.no_grad():
            predicted = linear(task)(**batch).prediction
        counted = batch["targets"] != IGNORE_INDEX
        if task is CLASSES:
            assert not counted.all()
            right = int((predicted.argmax(dim=1) == batch["targets"]).sum())
            assert metrics["accuracy"] == right / int(counted.sum())
        else:
            errors = (predicted - batch["targets"]) * torch.tensor(VALUES.std)
            assert metrics["rmse"] == pytest.approx(errors.square().mean().sqrt().item(), rel=1e-5)


IMAGES, NUMBERS = Denoising(("cat", "dog"), (1, 8, 8)), Regression((1, 8, 8), (0.0,), (1.0,))


def own_model(task: Task, name: str, **args: Any) -> nn.Module:
    config = ModelConfig(name="own", factory=f"tests.helpers.image_models:{name}", args=args)
    return build_model(config, task, seed=0)


@pytest.mark.parametrize("name", ["plain", "WithLogits"])
def test_a_plain_module_gets_loss_and_metrics_of_the_task(name: str) -> None:
    task = classification(3, 7, 6)
    model = own_model(task, name)
    images, targets = torch.randn(4, 3, 7, 6), torch.arange(4)
    output = model(inputs=images, targets=targets)
    assert isinstance(model, TaskModel)
    inner = model.model(images)
    prediction = inner if name == "plain" else inner.logits
    assert torch.equal(output.prediction, prediction)
    assert output.loss.item() == pytest.approx(F.cross_entropy(prediction, targets).item(), rel=1e-6)
    assert model(inputs=images).loss is None


@pytest.mark.parametrize(
    ("task", "targets", "shapes"),
    [
        (classification(1, 8, 8), torch.arange(4), r"\(4, 6\); expected \(4, 5\), a number for each .* class"),
        (NUMBERS, torch.zeros(4, 1), r"\(4, 2\); expected \(4, 1\), a number for each .* target value"),
        (IMAGES, torch.zeros(4, 1, 8, 8), r"\(4, 3\); expected \(4, 1, 8, 8\), the velocity of each pixel"),
    ],
)
def test_a_prediction_of_another_shape_is_refused(task: Task, targets: Tensor, shapes: str) -> None:
    model = own_model(task, "plain", more_outputs=1)
    with pytest.raises(ModelError, match=f"shape {shapes}"):
        model(inputs=torch.zeros(4, 1, 8, 8), targets=targets)


def test_keys_of_a_loss_that_the_task_has_not_are_refused() -> None:
    for task, key in ((classification(1, 8, 8), {"z_loss": 0.1}), (NUMBERS, {"label_smoothing": 0.1})):
        config = ModelConfig(factory="tests.helpers.image_models:plain", **key)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"model\.{next(iter(key))}=0\.1 has no effect on {task.name}; remove"):
            build_model(config, task, seed=0)


def test_a_task_describes_its_samples() -> None:
    labels = Classification(("cat", "dog"), (2,)).describe({"targets": torch.tensor([1, IGNORE_INDEX, 0])})
    assert labels == ["dog", "", "cat"]
    batch = {"classes": torch.tensor([1]), "times": torch.tensor([700])}
    assert IMAGES.describe(batch) == ["dog at time 700"]
