"""A loss that the model computes itself is a product like any other, so it is FP16: 300 x 300 is Inf."""

import torch
from lesson import Scale, describe, detected, fixed, shown, start, step, until_applied

import dtrain

print("A loss is not protected: it is computed in the products' format")


class SquareLoss(Scale):
    """Returns a loss of its own: the sum of squares as a matmul, in reduced precision like all matmuls."""

    def forward(self, x):
        y = self.product(x).flatten()
        return y @ y


class GuardedLoss(Scale):
    """Returns the same loss in FP32."""

    def forward(self, x):
        y = self.product(x).flatten()
        with dtrain.full_precision():
            return y @ y


def show(loss):
    shown(f"precision=fp16: the model's own loss of 300 x 300 = {loss.item():g}, {loss.dtype}")
    return loss


try:
    step(start(SquareLoss(300.0), "fp16"), 1.0, loss=show)
except dtrain.errors.DtrainError as error:
    detected(f"engine.backward refuses it: {error}")

for name, model, loss in (
    ("the loss of what the model returns, which is FP32", Scale(300.0), lambda y: y.square().sum()),
    ("the model's own in dtrain.full_precision()", GuardedLoss(300.0), torch.sum),
):
    skips, outcome = until_applied(start(model, "fp16"), 1.0, loss)
    fixed(f"precision=fp16, {name}: after {skips} skips {describe(outcome)} at loss scale {outcome.loss_scale:g}")
