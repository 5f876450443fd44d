"""FP8 E4M3 has no Inf: a cast that saturates turns an overflow into a harmless number."""

import math
from collections import OrderedDict

import torch
from lesson import describe, detected, fixed, shown, start, step
from torch import nn

import dtrain

print("A cast hides an overflow: FP8 E4M3 has no Inf")
largest = torch.finfo(torch.float8_e4m3fn).max
saturated = torch.tensor(math.inf).clamp(-largest, largest).to(torch.float8_e4m3fn)
shown(f"fp8 e4m3: Inf cast = {float(saturated):g}")

model = nn.Sequential(OrderedDict(product=nn.Linear(16, 16, bias=False)))
nn.init.ones_(model.product.weight)
float8 = dtrain.Float8(choice="all")
engine = start(model, dtrain.PrecisionPolicy.named("fp8", rules={"product": "fp8"}, float8=float8))
x = torch.ones(16, 16)
x[0, 0] = math.inf
detected(f"precision=fp8, one input of 256 is inf: {describe(step(engine, x, loss=torch.mean))}")

fixed("the scale of a tensor with a non-finite value is NaN, so the product is NaN, and all ranks skip the step")
x[0, 0] = 1.0
fixed(f"precision=fp8, one input of 256 is 1: {describe(step(engine, x, loss=torch.mean))}")
