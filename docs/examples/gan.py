"""Trains a GAN, an engine for each of its two models, on a ring of eight Gaussians, and counts the modes it covers.

python gan.py
torchrun --standalone --nproc_per_node=2 gan.py
"""

import argparse
import math
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus

import dtrain

MODES, RADIUS, SPREAD = 8, 4.0, 0.2  # spread: standard deviation of each Gaussian in x and in y
BATCH, NOISE = 128, 4  # samples a rank, numbers a sample


def mlp(*sizes):
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()

    torch.manual_seed(0)
    options = {
        "optimizer": dtrain.Adam(lr=2e-3, betas=(0.0, 0.99)),
        "schedule": dtrain.Cosine(warmup_steps=0, total_steps=args.steps),
        "precision": "bf16",
        "max_grad_norm": None,
    }
    generator = dtrain.initialize(mlp(NOISE, 128, 128, 128, 2), ema_decay=0.99, **options)
    discriminator = dtrain.initialize(mlp(2, 128, 128, 128, 1), **options)

    draws = torch.Generator().manual_seed(generator.rank)  # each rank draws samples of its own
    angles = torch.arange(MODES) * 2 * math.pi / MODES
    centers = RADIUS * torch.stack([angles.cos(), angles.sin()], dim=1)

    def noise(count):
        return torch.randn(count, NOISE, generator=draws).to(generator.device)

    def real(count):
        mode = torch.randint(MODES, (count,), generator=draws)
        return (centers[mode] + SPREAD * torch.randn(count, 2, generator=draws)).to(generator.device)

    def report(step):
        # all ranks enter ema(), which swaps the weights for their moving averages
        with generator.ema(), generator.eval():
            samples = generator(noise(1000)).cpu()
        distance, mode = torch.cdist(samples, centers).min(dim=1)
        counts = mode[distance < 3 * SPREAD].bincount(minlength=MODES).to(generator.device)
        if generator.world_size > 1:  # a single rank has no process group
            dist.all_reduce(counts)
        total = 1000 * generator.world_size
        covered = sum(count > total / MODES / 3 for count in counts.tolist())  # a third of its share, or more
        near = int(counts.sum()) / total
        if generator.rank == 0:
            print(f"step {step}: covers {covered} of {MODES} modes; {near:.0%} of samples near one")

    report(0)
    for step in range(1, args.steps + 1):
        x = real(BATCH).requires_grad_()
        scores = discriminator(x)
        # the gradient penalty R1; torch.autograd.grad needs no engine, because it writes no parameter's .grad
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        penalty = 0.05 * slope.square().sum(dim=1).mean()
        fake = generator(noise(BATCH)).detach()
        discriminator.backward(softplus(-scores).mean() + softplus(discriminator(fake)).mean() + penalty)
        discriminator.step()
        # this backward passes through the discriminator, whose engine ignores the gradients: no zero_grad, no freezing
        generator.backward(softplus(-discriminator(generator(noise(BATCH)))).mean())
        generator.step()
        if step % 300 == 0 or step == args.steps:
            report(step)


if __name__ == "__main__":
    main()
