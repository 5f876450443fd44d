"""Small networks with their data: what the experiments train. Data are drawn from a seed; nothing is downloaded."""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

import dtrain


class Network:
    """A model with its data, its loss and its optimizer.

    ``build`` returns the model, drawn from torch's generator; ``draw`` returns inputs and targets of one batch;
    ``loss`` is that of the model's output and the targets, in FP32.
    """

    lr, eps, weight_decay = 2e-3, 1e-8, 0.1

    def start(self, precision, seed, loss_scale, lr):
        """Returns an engine before its first step."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build()
        rule = dtrain.AdamW(lr=lr, eps=self.eps, weight_decay=self.weight_decay)
        return dtrain.initialize(model, optimizer=rule, precision=precision, loss_scale=loss_scale, seed=seed)


class LanguageModel(Network):
    """dtrain's transformer on the text of Python's standard library."""

    name, lr = "language model", 3e-3

    def start(self, precision, seed, loss_scale, lr):
        return open_language_model(f"precision={precision}", f"seed={seed}", f"optim.lr={lr}").engine

    def draw(self, generator):
        text = text_of_python()
        batch = text.batch(torch.randint(text.num_samples, (8,), generator=generator).numpy())
        return batch["tokens"], batch["targets"]

    def loss(self, output, targets):
        return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def open_language_model(*more):
    sizes = ("num_layers=2", "hidden_dim=32", "num_heads=2", "max_seq_len=32")
    plain = ("schedule=constant", "schedule.warmup_steps=0", "optim.compile=false", "launch.threads_per_rank=1")
    return dtrain.Session.open(overrides=[*(f"model.{size}" for size in sizes), *plain, *more])


@cache
def text_of_python():
    return open_language_model().dataset.train


class Convnet(Network):
    """Tells noisy shapes apart: a disc, ring, square or cross, anywhere and of any size."""

    name = "convnet"
    loss = staticmethod(F.cross_entropy)

    def build(self):
        return nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()),
            nn.Linear(64, 4),
        )

    def draw(self, generator):
        kinds = torch.randint(4, (32,), generator=generator)
        dy, dx = offsets(5 + 6 * torch.rand(32, 2, generator=generator))
        radii = 2.5 + 2 * torch.rand(32, 1, 1, generator=generator)
        distance, width = torch.hypot(dx, dy), torch.maximum(dx.abs(), dy.abs())
        disc, square = distance < radii, width < radii
        ring, cross = disc & (distance > radii - 1.5), square & (torch.minimum(dx.abs(), dy.abs()) < 1)
        shapes = torch.stack((disc, ring, square, cross))[kinds, torch.arange(32)]
        return noisy(shapes, generator), kinds


def offsets(centers):
    """Returns how far each pixel of an image of 16 x 16 is down and right of ``centers`` [B, 2]."""
    grid = torch.arange(16, dtype=torch.float32)
    down, right = grid[:, None] - centers[:, :1, None], grid - centers[:, 1:, None]
    return down.expand(-1, 16, 16), right.expand(-1, 16, 16)


def noisy(shapes, generator):
    return (shapes.float() + 0.3 * torch.randn(shapes.shape, generator=generator))[:, None]


PIXEL = 0.25e-3  # meters: the image is four millimeters wide


class Detector(Network):
    """Finds the center and the radius of a disc, in meters.

    The loss is in square meters: about 1e-7. AdamW's eps is far below such gradients.
    """

    name, eps, weight_decay = "detector", 1e-12, 0.0
    loss = staticmethod(F.mse_loss)
    variance = PIXEL**2 * (2 * 8**2 / 12 + 2**2 / 12) / 3  # mean of the targets': the loss of the best constant answer

    def build(self):
        return DetectorModel()

    def draw(self, generator):
        centers = 4 + 8 * torch.rand(16, 2, generator=generator)
        radii = 2 + 2 * torch.rand(16, 1, generator=generator)
        discs = torch.hypot(*offsets(centers)) < radii[..., None]
        return noisy(discs, generator), PIXEL * torch.cat((centers - 8, radii - 3), dim=1)


class DetectorModel(nn.Module):
    """Convolutions without norms, as in VGG: the layers compute in pixels, the result is in meters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(256, 64), nn.ReLU()),
            nn.Linear(64, 3),
        )
        products = [layer for layer in self.layers if isinstance(layer, (nn.Conv2d, nn.Linear))]
        for layer in products:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        nn.init.normal_(products[-1].weight, std=0.02)

    def forward(self, images):
        return PIXEL * self.layers(images).float()


class Regression(Network):
    """A multilayer perceptron learns Friedman's first test function, with mean 0 and standard deviation 1."""

    name = "regression"
    loss = staticmethod(F.mse_loss)

    def build(self):
        hidden = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.GELU())]
        return nn.Sequential(nn.Linear(5, 64), nn.GELU(), *hidden, nn.Linear(64, 1))

    def draw(self, generator):
        x = torch.rand(256, 5, generator=generator)
        a, b, c, d, e = x.unbind(1)
        y = 10 * torch.sin(math.pi * a * b) + 20 * (c - 0.5) ** 2 + 10 * d + 5 * e
        return 2 * x - 1, ((y - 14.4) / 4.9)[:, None]
