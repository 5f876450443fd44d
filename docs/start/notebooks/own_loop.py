# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own loop, and a step that overflows
#
# This notebook trains a small classifier in FP16 with a dynamic loss scale, in a loop of its own around
# `dtrain.initialize`. At one step it plants an overflow in the gradient of one parameter, and shows what dtrain does:
# it names the parameter, changes no weight, and lowers the loss scale. It takes a few seconds on a CPU, and writes no
# file.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dtrain

STEPS, PLANTED = 60, 30  # steps; the one that overflows

# %% [markdown]
# ## The engine
#
# `initialize` takes an ordinary module. The weights of its Linears become FP16, and the engine keeps FP32 masters of
# all weights. The loss scale starts at 1,024 and doubles after 10 steps without an overflow, so that the picture below
# shows it. The defaults are 65,536 and 2,000 steps.

# %%
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4))
engine = dtrain.initialize(
    model,
    optimizer=dtrain.AdamW(lr=3e-3),
    schedule=dtrain.Cosine(warmup_steps=5, total_steps=STEPS),
    precision="fp16",
    loss_scale=dtrain.LossScale("dynamic", init=1024.0, growth_interval=10),
    seed=0,
)

# %% [markdown]
# ## The planted overflow
#
# The largest number of FP16 is 65,504. In step 30 a hook on the last weight sets one element of its gradient to
# infinity. In a real training that happens by itself if the scaled gradient grows too large.

# %%
planted = False


def overflow(grad):
    if not planted:
        return grad
    grad = grad.clone()
    grad[2, 5] = torch.inf
    return grad


handle = model[3].weight.register_hook(overflow)

# %% [markdown]
# ## The loop
#
# Each step has two micro-batches. `engine.backward` scales the loss, and `engine.step` updates all weights or none: it
# returns a `StepOutcome`. The loop copies the FP32 masters around the planted step, to compare their bits.

# %%
draws = torch.Generator().manual_seed(0)
losses, scales, skipped = [], [], {}
for step in range(1, STEPS + 1):
    planted = step == PLANTED
    if planted:
        before = {name: value.clone() for name, value in engine.master_state().items()}
    inputs = torch.randn(2, 32, 16, generator=draws).to(engine.device)
    for x in engine.accumulate(inputs):
        engine.backward(cross_entropy(engine(x), x[:, :4].argmax(dim=1)))
    outcome = engine.step()
    losses.append(outcome.loss)
    scales.append(outcome.loss_scale)
    if not outcome.applied:
        skipped[step] = outcome
    if planted:
        after = {name: value.clone() for name, value in engine.master_state().items()}

print(f"{engine.applied_steps} of {engine.attempted_steps} steps applied; loss {losses[0]:.3f} -> {losses[-1]:.3f}")

# %% [markdown]
# ## The skipped step
#
# `reason` is `overflow`, and `culprit` says where it was first seen: the phase, the rank, the micro-batch, the
# parameter, and the elements of its flattened gradient that are not finite.

# %%
outcome = skipped[PLANTED]
print("applied:   ", outcome.applied)
print("reason:    ", outcome.reason)
print("culprit:   ", outcome.culprit)
print("parameter: ", outcome.culprit.tensor)
print("element:   ", outcome.culprit.start, "= 2 x 64 + 5: row 2, column 5")
print("loss scale:", f"{outcome.loss_scale:g} in the step, {scales[PLANTED]:g} in the next")

# %% [markdown]
# ## No bit of a weight has changed
#
# The masters are compared as bits, so that NaN or -0.0 would count as a difference, too.

# %%
changed = {name: int((before[name].view(torch.int32) != after[name].view(torch.int32)).sum()) for name in before}
for name, count in changed.items():
    print(f"{name:<10} {before[name].numel():>6,} elements, {count} changed")
assert not any(changed.values())

# %% [markdown]
# ## Loss and loss scale
#
# The scale doubles after 10 steps without an overflow, and halves at the planted one. The loss goes on as if nothing
# had happened.

# %%
steps = range(1, STEPS + 1)
figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
top.plot(steps, losses)
top.set_ylabel("loss (nats per sample)")
bottom.step(steps, scales, where="mid", color="tab:orange")
bottom.set_yscale("log", base=2)
bottom.set_ylabel("loss scale (factor)")
bottom.set_xlabel("step")
for axes in (top, bottom):
    axes.axvline(PLANTED, color="tab:red", linestyle=":", label="planted overflow, skipped")
    axes.grid(alpha=0.3)
top.legend()
figure.suptitle("FP16 with a dynamic loss scale")
plt.show()

# %% [markdown]
# ## What next
#
# - `engine.explain_skips = True` before a step also finds the module and the operation in which an overflow began.
# - `precision="bf16"` needs no loss scale, because BF16 has the range of FP32.
# - A complete script with checkpoints and stop signals: `docs/examples/own_loop.py`.
