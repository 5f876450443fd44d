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
# # A first run
#
# This notebook trains a small language model with `dtrain train`, draws its loss, and shows its report. It takes about
# 20 seconds on a CPU, downloads nothing, and writes to a temporary folder only.

# %%
import html
import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import HTML, display

from dtrain.__main__ import main as run_dtrain

run_dir = Path(tempfile.mkdtemp()) / "first"

# %% [markdown]
# ## Train
#
# `run_dtrain(["train", ...])` is the command `dtrain train ...` in the process of this notebook. It returns 0 if the
# run is complete. The data is the source text of Python's standard library, one byte a token.
#
# `experiment=smoke` is a very small model; `run_dtrain(["train", "--help"])` explains every key. If you interrupt the
# kernel, the run stops after its step and saves; the same cell then resumes it.

# %%
exit_code = run_dtrain(
    [
        "train",
        "experiment=smoke",
        "train.steps=100",
        "train.micro_batch_size=16",
        "train.global_batch_size=16",
        "train.log_every=5",
        "train.eval_every=20",
        "train.save_every=50",
        "optim.lr=1e-2",
        "launch.threads_per_rank=1",  # a model as small as this one gains nothing from more
        f"run_dir={run_dir}",
    ]
)
assert exit_code == 0

# %% [markdown]
# ## Draw the loss
#
# `metrics.jsonl` has a JSON object a line: one for each logged step, and one for each validation, with `val_loss`. The
# loss is in nats a token; equal guesses for all 256 bytes would have log(256) = 5.5.

# %%
lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for key, label, style in (("loss", "training", "-"), ("val_loss", "validation", "o-")):
    points = [(line["step"], line[key]) for line in lines if key in line]
    axes.plot(*zip(*points, strict=True), style, label=label)
axes.set_xlabel("step")
axes.set_ylabel("loss (nats per token)")
axes.set_title("A first run")
axes.grid(alpha=0.3)
axes.legend()
plt.show()

# %% [markdown]
# ## The files of a run
#
# A checkpoint is a folder; it resumes the run, also on another number of ranks. `config.yaml` has every key of the run,
# `precision.json` the number format of every module.

# %%
for path in sorted(run_dir.rglob("*")):
    if path.is_file():
        print(f"{path.stat().st_size:>9,} bytes  {path.relative_to(run_dir)}")

# %% [markdown]
# ## The report
#
# Every run ends with `report.html`: one page without script or request. The frame keeps its styles out of the notebook.

# %%
page = (run_dir / "report.html").read_text(encoding="utf-8")
display(HTML(f'<div><iframe srcdoc="{html.escape(page)}" width="100%" height="600"></iframe></div>'))

# %% [markdown]
# ## What next
#
# - The same run without the notebook: `dtrain train experiment=smoke run_dir=runs/first`.
# - Your own text: `data=text data.files=FOLDER/*.txt`. Your own model: `model.factory=my_model:build`.
# - The steps in your own hands: `dtrain.Session`, or `dtrain.initialize` in the notebook `own_loop.py`.
