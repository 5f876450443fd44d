"""FP16 ends at 65,504: a product overflows, and so does a gradient times the loss scale."""

import torch
from lesson import DTYPES, Scale, describe, detected, fixed, shown, start, step, until_applied, weight

import dtrain

LARGEST = torch.finfo(torch.float16).max

print(f"A product overflows: FP16 ends at {LARGEST:,.0f}")
for name, dtype in DTYPES.items():
    number = torch.tensor(300.0, dtype=dtype)
    shown(f"{name}: 300 x 300 = {float(number * number):g}")

engine = start(Scale(300.0), "fp16")
outcome = step(engine, 300.0)
detected(f"precision=fp16: {describe(outcome)}; the weight is still {weight(engine):g}")

# the range of FP32; or FP32 for this one module
fixed(f"precision=bf16: {describe(step(start(Scale(300.0), 'bf16'), 300.0))}")
policy = dtrain.PrecisionPolicy.named("fp16", rules={"product": "fp32"})
fixed(f"precision=fp16 and the rule product: fp32: {describe(step(start(Scale(300.0), policy), 300.0))}")

print("\nA scaled gradient overflows: the loss is fine, its gradient times the loss scale is not")
shown(f"fp16: a gradient of 8 times a loss scale of 65536 = {float(torch.tensor(8.0, dtype=torch.float16) * 65536):g}")

engine = start(Scale(1.0), "fp16")
outcome = step(engine, 8.0)
detected(f"precision=fp16: {describe(outcome)}; the weight is still {weight(engine):g}")

skips, outcome = until_applied(engine, 8.0)
fixed(
    f"loss_scale=dynamic, the default: halved by each of {skips + 1} skipped steps, then {describe(outcome)} at "
    f"{outcome.loss_scale:g}"
)
rule = dtrain.LossScale(mode="calibrated", calibration_steps=3)
engine = start(Scale(1.0), "fp16", loss_scale=rule)
while engine.applied_steps <= rule.calibration_steps:
    outcome = step(engine, 8.0)
fixed(
    f"loss_scale=calibrated: after {rule.calibration_steps} measured steps {outcome.loss_scale:g}, the largest power "
    f"of two below {LARGEST:,.0f} / (8 x {rule.margin:g})"
)
