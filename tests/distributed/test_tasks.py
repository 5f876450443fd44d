"""Tasks on several ranks: metrics with the digits of one rank, and BatchNorm under every engine."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.cli.resolve import compose
from dtrain.data import load_dataset, validation_batches
from dtrain.data.dataset import SampleSource
from dtrain.data.sampling import Indices
from dtrain.engine.buffers import persistent_buffers
from dtrain.errors import DtrainError
from dtrain.models import build_model
from dtrain.models.task_model import TaskModel
from dtrain.tasks import IGNORE_INDEX, Regression, SampleOptions, Task, TaskOutput
from dtrain.tasks.task import gather_samples
from dtrain.train import trainer
from dtrain.train.run import run_training
from dtrain.train.validation import validate
from tests.helpers.image_models import classification, start
from tests.helpers.launch import curve, losses, summary
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

# -- metrics -----------------------------------------------------------------------------------------------------------

NUM_SAMPLES, MICRO_BATCH = 19, 4  # five micro-batches, of which the last has three samples
CLASSES = classification(6, classes=5)
VALUES = Regression((6,), mean=(1.0, -20.0), std=(0.3, 7.0))
TASKS: tuple[Task, ...] = (CLASSES, VALUES)


class Numbers(SampleSource):
    """Random inputs, whose first number is the sample's id."""

    def __init__(self, task: Task) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(NUM_SAMPLES, 6, generator=generator)
        self.inputs[:, 0] = torch.arange(NUM_SAMPLES) / NUM_SAMPLES
        if task is CLASSES:
            self.targets = torch.randint(5, (NUM_SAMPLES,), generator=generator)
            self.targets[::4] = IGNORE_INDEX
        else:
            self.targets = torch.randn(NUM_SAMPLES, 2, generator=generator)

    @property
    def num_samples(self) -> int:
        return NUM_SAMPLES

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        return {"inputs": self.inputs[sample_ids], "targets": self.targets[sample_ids]}


def linear(task: Task) -> TaskModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return TaskModel(nn.Linear(6, task.num_outputs), task)


def _ids(output: TaskOutput, batch: dict[str, Tensor]) -> Tensor:
    return (batch["inputs"][:, :1] * NUM_SAMPLES).round()


def _measure(rank: int, world: int) -> list[Any]:
    """Metrics, sample and ids of all validation samples, and of two micro-batches only, for each task."""
    found: list[Any] = []
    for task in TASKS:
        engine = start(linear(task))
        for num_batches in (None, 2):
            batches = partial(validation_batches, Numbers(task), MICRO_BATCH, num_batches, rank, world)
            ids = gather_samples(engine, batches(), _ids).flatten().tolist()
            sample = task.sample(engine, batches(), SampleOptions(num_tokens=0, max_seq_len=1, seed=0))
            found.append((validate(engine, task, batches()), ids, sample.text))
    return found


def test_metrics_have_the_same_digits_on_any_number_of_ranks() -> None:
    """Also if some ranks have no micro-batch that counts."""
    (one,) = run_ranks(1, _measure)
    for world in (2, 3):
        assert run_ranks(world, _measure) == [one] * world
    for number, (task, num_batches) in enumerate([(task, num) for task in TASKS for num in (None, 2)]):
        source, (metrics, ids, _) = Numbers(task), one[number]
        order = [
            id_
            for micro, _ in validation_batches(source, MICRO_BATCH, num_batches)
            for id_ in (micro["inputs"][:, 0] * NUM_SAMPLES).round().tolist()
        ]
        assert ids == order
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


# -- running statistics ------------------------------------------------------------------------------------------------

CONVNET = (
    # not 4 channels: with them the backward of torch 2.13 corrupts memory on a CPU that has AVX2 and no AVX-512
    *("experiment=glyphs", "data.characters=digits", "data.size=12", "model.hidden_dim=8", "precision=fp32"),
    *("train.steps=6", "train.micro_batch_size=4", "train.global_batch_size=16", "train.eval_every=3"),
    *("train.save_every=0", "train.eval_batches=5", "train.log_every=1", "train.sample_tokens=0"),
    *("schedule=constant", "optim.compile=false", "checkpoint.asynchronous=false", "report=false"),
    *("launch.device=cpu", "launch.threads_per_rank=1"),
)
ENGINES = {
    "stage 2": ("engine.zero_stage=2",),
    "stage 3": ("engine.zero_stage=3",),
    "ddp": ("engine=ddp",),
    "fsdp2": ("engine=fsdp2", "engine.zero_stage=3"),
}


def _fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, buffer in persistent_buffers(model):
        assert "num_batches" in name or buffer.any(), name
        digest.update(name.encode() + buffer.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _train(rank: int, world: int, run_dir: str, overrides: tuple[str, ...]) -> list[str]:
    """Trains; returns fingerprints of this rank's running statistics before and after each validation."""
    os.dup2(os.open(f"{run_dir}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    seen: list[str] = []

    def spy(engine: Any, *args: Any) -> dict[str, float]:
        seen.append(_fingerprint(engine.module))
        found = validate(engine, *args)
        seen.append(_fingerprint(engine.module))
        return found

    trainer.validate = spy  # type: ignore[attr-defined]
    assert run_training(compose([*CONVNET, f"run_dir={run_dir}", *overrides])) == 0
    return seen


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[list[str]]]]:
    """Returns the folder of a run of two ranks under each engine, and the fingerprints of both ranks."""
    folder = tmp_path_factory.mktemp("convnet")
    return folder, {name: run_ranks(2, _train, str(folder / name), keys) for name, keys in ENGINES.items()}


def test_ranks_validate_with_the_running_statistics_of_rank_0(
    trained: tuple[Path, dict[str, list[list[str]]]],
) -> None:
    _, fingerprints = trained
    for name, (first, second) in fingerprints.items():
        before, after = first[::2], first[1::2]
        assert before == after, f"{name}: rank 0 keeps its own"
        assert len(set(after)) == len(after) == 2, f"{name}: they change between validations"
        assert second[1::2] == after, name
        assert all(own != other for own, other in zip(before, second[::2], strict=True)), f"{name}: control"


def test_engines_agree_on_a_convolutional_network(trained: tuple[Path, dict[str, list[list[str]]]]) -> None:
    folder, _ = trained
    curves = {name: losses(folder / name) for name in ENGINES}
    assert len(set(curves["stage 2"])) == 6
    for name in ENGINES:
        assert curves[name] == pytest.approx(curves["stage 2"], rel=1e-4), name
        assert summary(folder / name)["val_loss"] == pytest.approx(summary(folder / "stage 2")["val_loss"], rel=1e-3)


def _validate_checkpoint(rank: int, world: int, folder: str) -> dict[str, float]:
    config = compose([*CONVNET, f"run_dir={folder}"])
    dataset = load_dataset(config.data, 1)
    engine = dtrain.initialize(
        build_model(config.model, dataset.task, seed=1),
        optimizer=config.optim.optimizer,
        precision="fp32",
    )
    engine.load(folder)
    batches = validation_batches(dataset.validation, config.train.micro_batch_size, config.train.eval_batches)
    return {f"val_{name}": value for name, value in validate(engine, dataset.task, batches).items()}


def test_a_checkpoint_has_what_was_validated(trained: tuple[Path, dict[str, list[list[str]]]]) -> None:
    folder, _ = trained
    run_dir = folder / "stage 3"
    (found,) = run_ranks(1, _validate_checkpoint, str(run_dir))
    assert {"step": 6, **found} == curve(run_dir)[-1]


def _refused(rank: int, world: int, run_dir: str) -> str:
    with pytest.raises(DtrainError) as caught:
        run_training(compose([*CONVNET, "engine.reproducible=true", f"run_dir={run_dir}"]))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_batch_norm_is_refused_in_a_reproducible_run(tmp_path: Path) -> None:
    """Before a run directory exists."""
    (message,) = run_ranks(1, _refused, str(tmp_path / "run"))
    assert message.startswith("ConfigError: ")
    assert (
        "'model.stem_norm' (BatchNorm2d): its running statistics depend on which micro-batches a rank sees" in message
    )
    assert not (tmp_path / "run").exists()
