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
# # Is BF16 safe for my model? And FP8?
#
# `dtrain probe` trains a model for a few steps in FP32, BF16, FP16 and FP8 from the same weights on the same samples,
# and compares the losses with FP32's own noise. This notebook probes a small model of its own, shows the picture and
# the tables, and reads the advice. It takes about 20 seconds on a CPU, downloads nothing, and writes to a temporary
# folder only.

# %%
import json
import math
import sys
import tempfile
from pathlib import Path

from IPython.display import Image, display

from dtrain.__main__ import main as run_dtrain

folder = Path(tempfile.mkdtemp())
run_dir = folder / "probe"

# %% [markdown]
# ## Your model
#
# A factory builds it: a function of a file that Python can import. dtrain calls the model with `tokens` and `targets`,
# and takes `loss` and `logits` from the result. To probe your own, replace this file, or name yours below.

# %%
source = '''
from types import SimpleNamespace

from torch import nn
from torch.nn.functional import cross_entropy, gelu


class NextByte(nn.Module):
    """Mixes the last four tokens by a convolution, then applies a feed-forward network."""

    def __init__(self, vocab_size, width):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.mix = nn.Conv1d(width, width, kernel_size=4, padding=3)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens, targets=None):
        x = self.embed(tokens)
        x = x + self.mix(x.mT)[..., : tokens.shape[1]].mT
        x = x + self.down(gelu(self.up(self.norm(x))))
        logits = self.head(x)
        loss = None
        if targets is not None:
            loss = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


def build(config, vocab_size):
    return NextByte(vocab_size, width=config.args["width"])
'''
(folder / "my_model.py").write_text(source, encoding="utf-8")
sys.path.insert(0, str(folder))

# %% [markdown]
# ## Probe it
#
# Give the keys of your training, above all `optim.lr`. The data is the source text of Python's standard library; with
# `data=text data.files=FOLDER/*.txt` it is yours. The default of 20 steps and 3 other seeds is enough for a first
# answer.
#
# How to read the tables:
#
# - **Formats**: `gap` is the final loss less FP32's, and `in noise` is the gap in units of FP32's own noise. A gap
#   below 2 units cannot be told from noise.
# - **Modules**: the products that lose most. SQNR is signal over rounding noise; above 40 dB an error is below 1 %.
# - **Advice**: the reasons for the last line, which you can paste into `dtrain train`.

# %%
exit_code = run_dtrain(
    [
        "probe",
        "model.factory=my_model:build",
        "model.args.width=64",
        "model.max_seq_len=64",
        "train.micro_batch_size=8",
        "train.global_batch_size=8",
        "optim.lr=3e-3",
        "launch.threads_per_rank=1",  # a model as small as this one gains nothing from more
        f"run_dir={run_dir}",
    ]
)
assert exit_code == 0

# %% [markdown]
# ## The picture
#
# Top left: the gap of each format in units of noise; gray cannot be told from noise. Top right: how large the gradients
# are, and what each format can hold. Bottom: what each format does to each product of each module.

# %%
display(Image(run_dir / "probe.png"))

# %% [markdown]
# ## Read the advice
#
# `probe.json` has every figure. A format is safe if its loss ends less than 2 units of noise above FP32's. On a CPU FP8
# is emulated with the same rounding, so the probe can say whether it is safe, but not how fast. It advises FP8 only on
# a device that computes it, and only if it is faster there than BF16.

# %%
report = json.loads((run_dir / "probe.json").read_text(encoding="utf-8"))
for trial in report["trials"][1:]:  # the first is FP32, the reference
    units = math.inf if trial["failure"] else trial["gap"] / report["unit"]
    print(f"{trial['format']}: {'safe' if units < 2 else 'not safe'}, {units:+.2f} units of noise")

advice = report["advice"]
print("\nadvice:", advice["line"])
for reason in advice["reasons"]:
    print("-", reason)
print("\nnot tested:")
for limit in advice["untested"]:
    print("-", limit)

# %% [markdown]
# ## What next
#
# - Paste the advice: `dtrain train model.factory=my_model:build precision=bf16`. If a format is safe only without some
#   modules, the line has `precision.rules`, which keep those in another format.
# - `probe.html`, beside the picture, is one page with every module.
# - During the training `telemetry.advice=PROBE_DIR/probe.json` warns if the gradients leave the range that was probed.
