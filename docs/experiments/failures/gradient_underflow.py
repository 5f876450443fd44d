"""FP16 begins at 6e-8: smaller gradients become zero, and training stops without an error."""

import logging

import torch
from lesson import DTYPES, Scale, describe, detected, fixed, shown, start, step, weight

info = torch.finfo(torch.float16)
print(f"Gradients underflow: FP16 begins at {info.smallest_normal * info.eps:.2g}")
for name, dtype in DTYPES.items():
    shown(f"{name}: a gradient of 1e-8 = {float(torch.tensor(1e-8, dtype=dtype)):.5g}")


def warn(record):
    """Prints a line of dtrain's log here instead of on standard error."""
    detected(f"precision=fp16, loss_scale=none, at the start: {record.getMessage()}")


logging.getLogger("dtrain").addFilter(warn)
engine = start(Scale(1.0), "fp16", loss_scale="none")
logging.getLogger("dtrain").removeFilter(warn)
outcome = step(engine, 1.0, factor=1e-8)
detected(
    f"then {describe(outcome)}, grad_norm {outcome.grad_norm:g} beside a loss that is not 0; the weight is still "
    f"{weight(engine):g}"
)

for name in ("fp16", "bf16"):
    engine = start(Scale(1.0), name)
    outcome = step(engine, 1.0, factor=1e-8)
    fixed(
        f"precision={name}, its own loss scale of {outcome.loss_scale:g}: {describe(outcome)}, grad_norm "
        f"{outcome.grad_norm:.5g}; the weight moves to {weight(engine):.6g}"
    )
