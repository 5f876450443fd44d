"""An addend below half a unit in the last place is lost: 1 + 1e-4 is 1, and a long sum stops growing."""

import torch
from lesson import DTYPES, Scale, detected, fixed, shown, start, step, weight
from torch import nn

import dtrain

print("Small addends are lost: weights stop moving when an update is less than half their epsilon")
for name, dtype in DTYPES.items():
    shown(f"{name}: 1 + 1e-4 = {float(torch.tensor(1.0, dtype=dtype) + 1e-4):.8g}")
for name in ("bf16", "fp16"):
    w = torch.tensor(1.0, dtype=DTYPES[name])
    for _ in range(100):
        w -= 1e-4
    shown(f"{name}: 100 updates of 1e-4 each take a weight from 1 to {w.item():.8g}")

try:
    dtrain.PrecisionPolicy("bf16", torch.bfloat16, master_dtype=torch.bfloat16)
except dtrain.errors.ConfigError as error:
    detected(f"a policy with such weights is refused: {error}")

for name in ("bf16", "fp16"):
    engine = start(Scale(1.0), name, lr=1e-4)
    while engine.applied_steps < 100:
        step(engine, 1.0)
    fixed(f"precision={name}, FP32 masters: 100 applied steps of 1e-4 each: to {weight(engine):.8g}")

LENGTH = 4096
print("\nA sum in reduced precision stops growing: 1 is less than half a unit in its last place")
# a product of BF16 numbers summed in FP32: two operands are rounded, and LENGTH sums (Higham, lemma 3.1)
u, v = torch.finfo(torch.bfloat16).eps / 2, LENGTH * torch.finfo(torch.float32).eps / 2
bound = (1 + u) ** 2 * (1 + v / (1 - v)) - 1
for name in ("bf16", "fp16"):
    total = torch.zeros((), dtype=DTYPES[name])
    for _ in range(LENGTH):
        total += 1
    shown(f"{name}: {LENGTH:,} ones added one by one = {total.item():,g}")
    lost = 1 - total.item() / LENGTH
    detected(f"{name}: {lost:.1%} is lost; {LENGTH:,} BF16 products, summed in FP32, lose {bound:.1%} at most")

model = nn.Linear(LENGTH, 1, bias=False)
nn.init.ones_(model.weight)
engine = start(model, "bf16")
product = engine(torch.ones(1, LENGTH, device=engine.device)).item()
fixed(f"precision=bf16, a Linear of {LENGTH:,} ones, summed in FP32: {product:,g}")
