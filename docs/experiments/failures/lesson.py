"""What the lessons share: a model of one weight, a step as a user's loop takes it, and the lines that are printed."""

from textwrap import fill

import torch
from torch import nn

import dtrain

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Scale(nn.Module):
    """Multiplies its input [1, 1] by one weight, ``product``."""

    def __init__(self, weight):
        super().__init__()
        self.product = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.product.weight, weight)

    def forward(self, x):
        return self.product(x)


def start(model, precision, *, loss_scale="auto", lr=1e-3):
    rule = dtrain.AdamW(lr=lr, weight_decay=0.0)
    return dtrain.initialize(model, optimizer=rule, precision=precision, loss_scale=loss_scale, seed=0)


def step(engine, x, *, factor=1.0, loss=torch.sum):
    """Trains a step on ``x``: a tensor, or a number that is the whole input."""
    inputs = x if isinstance(x, torch.Tensor) else torch.full((1, 1), x)
    engine.backward(factor * loss(engine(inputs.to(engine.device))))
    return engine.step()


def until_applied(engine, x, loss=torch.sum):
    """Returns the number of skipped steps before the first applied one, and its outcome."""
    skips = 0
    while not (outcome := step(engine, x, loss=loss)).applied:  # the engine raises after too many
        skips += 1
    return skips, outcome


def weight(engine):
    (master,) = engine.master_state().values()
    return master.item()


def describe(outcome):
    if outcome.applied:
        return f"the step is applied, loss {outcome.loss:.6g}"
    return f"the step is skipped, {outcome.reason}: {outcome.culprit}"


def shown(line):
    """Prints how the failure comes about; every number is computed on the spot."""
    _say("shown", line)


def detected(line):
    _say("detected", line)


def fixed(line):
    _say("fixed", line)


def _say(section, line):
    print(fill(f"  {section:8}  {line}", 118, subsequent_indent=" " * 12), flush=True)
