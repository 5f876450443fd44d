"""Small trainings of each kind of task, with the configurations, models, data and engine of ``dtrain train``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from dtrain.cli.resolve import compose
from dtrain.config.precision import Float8, PrecisionConfig
from dtrain.config.schema import RunConfig
from dtrain.data import Dataset, load_dataset, validation_batches
from dtrain.distributed.startup.setup import choose_device, connect
from dtrain.measure.experiment.train import report
from dtrain.measure.noise import perturb_by_an_ulp
from dtrain.models import build_model
from dtrain.planning.calls import CallRecorder
from dtrain.planning.products import CONVOLUTION, products
from dtrain.precision.contract import resolve
from dtrain.precision.fp16_products import fp16_products
from dtrain.train.session import Session
from dtrain.train.setup import make_policy


@dataclass(frozen=True)
class TaskCurve:
    """One training.

    Attributes:
        losses: of the validation data, by validation.
        metric: of the last validation; None if the task has none.
        skipped: number of skipped steps.
    """

    losses: list[float]
    metric: float | None
    skipped: int


@dataclass(frozen=True)
class ProductShares:
    """Shares of the FLOPs of matrix products, forward and backward.

    Attributes:
        float8: of the Linears that ``precision=fp8`` computes in FP8.
        convolutions: of convolutions, which it computes in BF16.
        num_float8: number of those Linears.
        num_linears: number of all Linears.
    """

    float8: float
    convolutions: float
    num_float8: int
    num_linears: int


@dataclass(frozen=True)
class SmallTask:
    """A run of ``dtrain train`` that validates every ``train.eval_every`` steps.

    Attributes:
        name: for people.
        metric: of the task, such as ``accuracy``; empty: it has none.
        overrides: the command line.
    """

    name: str
    metric: str
    overrides: str

    @cached_property
    def config(self) -> RunConfig:
        return compose([*shlex.split(self.overrides), *_COMMON])

    @cached_property
    def dataset(self) -> Dataset:
        return load_dataset(self.config.data, self.config.model.max_seq_len)

    @property
    def validation_steps(self) -> list[int]:
        train = self.config.train
        return list(range(train.eval_every, train.steps + 1, train.eval_every))

    def model(self, seed: int) -> nn.Module:
        """Returns the model with the initial weights of ``seed``.

        Raises:
            ConfigError: a library that the model needs is missing.
        """
        return build_model(self.config.model, self.dataset.task, seed)

    def in_format(self, precision: str, seed: int) -> RunConfig:
        """Returns the configuration with another seed, and a precision whose FP8 Linears no device chooses by speed."""
        float8 = Float8(choice="all") if precision == "fp8" else Float8()
        return replace(self.config, seed=seed, precision=PrecisionConfig(precision, float8=float8))

    def train(self, precision: str, seed: int, *, perturbation: int = 0) -> TaskCurve:
        """Trains from the weights and on the batches of ``seed``.

        If ``perturbation`` is not 0, the weights start an ulp away, up or down as this number draws.
        """
        session = self.session(precision, seed, perturbation=perturbation)
        found: dict[str, float] = {}
        losses, skipped = [], 0
        with fp16_products(session.engine.device, [precision]):
            for step in range(1, self.config.train.steps + 1):
                skipped += not session.step().applied
                if step % self.config.train.eval_every == 0:
                    found = session.validate()
                    losses.append(found["loss"])
        report(f"{self.name}, {precision}, seed {seed}: loss {losses[-1]:.4g}")
        return TaskCurve(losses, found.get(self.metric), skipped)

    def session(self, precision: str, seed: int, *, perturbation: int = 0) -> Session:
        """Returns a training before its first step; see :meth:`train`."""
        model = self.model(seed)
        if perturbation:
            perturb_by_an_ulp(model, perturbation)
        config = self.in_format(precision, seed)
        comm = connect(choose_device(config.launch.device, 0))
        return Session.open(config, comm, model=model, dataset=self.dataset)

    def product_shares(self) -> ProductShares:
        """Counts the products of a micro-batch, in FP32 on the CPU, by the format that ``precision=fp8`` gives them."""
        model = self.model(self.config.seed)
        policy = make_policy(self.in_format("fp8", self.config.seed)).on(torch.device("cpu"))
        float8 = set(resolve(policy, model).float8_modules)
        batch, _ = next(validation_batches(self.dataset.validation, self.config.train.micro_batch_size, 1))
        with CallRecorder(model) as recorder:
            model(**batch).loss.backward()
        found = products(recorder.calls)
        total = sum(product.flops for product in found)
        return ProductShares(
            sum(product.flops for product in found if product.module in float8) / total,
            sum(product.flops for product in found if product.kind == CONVOLUTION) / total,
            len(float8),
            sum(isinstance(module, nn.Linear) for module in model.modules()),
        )


_COMMON = ("precision=fp32", "optim.compile=false")
"""Overrides of all tasks; to compile the update takes longer than such a training."""

_GLYPHS = "data.characters=digits data.validation_percent=20 train.global_batch_size=32"
_VIT = "{hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 128}"
_REGRESSION = (
    "experiment=regression data.validation_percent=10 model.hidden_dim=64 "
    "train.global_batch_size=64 train.steps=600 train.eval_every=75"
)
_240_STEPS = "train.steps=240 train.eval_every=30"

TASKS = (
    SmallTask(
        "language model",
        "",
        "model.num_layers=2 model.hidden_dim=32 model.num_heads=2 model.max_seq_len=32 "
        f"train.global_batch_size=8 optim.lr=3e-3 {_240_STEPS} train.eval_batches=16",
    ),
    SmallTask("convnet", "accuracy", f"experiment=glyphs {_GLYPHS} data.size=16 model.hidden_dim=8 {_240_STEPS}"),
    SmallTask(
        "vision transformer",
        "accuracy",
        f"experiment=vit {_GLYPHS} data.size=16 'model.args={_VIT}' train.steps=320 train.eval_every=40",
    ),
    SmallTask("regression", "rmse", _REGRESSION),
    SmallTask("regression, exact targets", "rmse", f"{_REGRESSION} data.noise=0"),
    SmallTask(
        "diffusion",
        "",
        f"experiment=diffusion {_GLYPHS} data.size=12 model.hidden_dim=8 ema.decay=null {_240_STEPS}",
    ),
)
"""The experiments of ``conf/experiment`` for other tasks than language, and a language model, all smaller.

With exact targets the loss of the regression falls until the rounding of products is a large part of what is left.
"""
