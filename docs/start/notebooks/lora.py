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
# # LoRA on a model of transformers
#
# This notebook trains LoRA adapters over a frozen causal language model of transformers, exports them as a folder for
# peft, and loads that folder back. The model is tiny and random: it is made here from a configuration, and nothing is
# downloaded. It takes about 20 seconds on a CPU, and writes to a temporary folder only. It needs
# `pip install 'dtrain[hf]'`.

# %%
import json
import math
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import dtrain
from dtrain.__main__ import main as run_dtrain

disable_progress_bar()
folder = Path(tempfile.mkdtemp())
base, run_dir, adapter = folder / "base", folder / "run", folder / "adapter"

# %% [markdown]
# ## The base model
#
# `model.path` takes any folder that `save_pretrained` has written. Replace this cell by the path of yours, such as
# `/models/qwen3-0.6b`, with its tokenizer as `data.tokenizer`.

# %%
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=257, max_position_embeddings=64, initializer_range=0.1, **sizes)
LlamaForCausalLM(config).save_pretrained(base)  # 257 tokens: the bytes, and the end of a text

# %% [markdown]
# ## The text
#
# Without a tokenizer each byte is a token. Some of the files are held out for validation.

# %%
for number in range(40):
    lines = [f"{a} plus {number} is {a + number}.\n" for a in range(100)]
    (folder / f"sums-{number:02}.txt").write_text("".join(lines), encoding="utf-8")

# %% [markdown]
# ## Train
#
# `model.lora` freezes the base and adds adapters to the Linears that `targets` names. The base is random here, so the
# output layer has to learn, too. By default the format follows the hardware: BF16 where it is fast, else FP32.

# %%
exit_code = run_dtrain(
    [
        "train",
        "model=hf",
        f"model.path={base}",
        "model.max_seq_len=64",
        "model.lora={r: 8, alpha: 16, targets: [q_proj, k_proj, v_proj, o_proj, up_proj, down_proj, lm_head]}",
        "data=text",
        f"data.files={folder}/sums-*.txt",
        "train.steps=60",
        "train.micro_batch_size=16",
        "train.global_batch_size=16",
        "train.log_every=5",
        "train.eval_every=10",
        "train.sample_tokens=0",
        "optim.lr=1e-2",
        "schedule.warmup_steps=5",
        "launch.threads_per_rank=1",  # a model as small as this one gains nothing from more
        f"run_dir={run_dir}",
    ]
)
assert exit_code == 0

# %% [markdown]
# ## The loss goes down

# %%
lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
training = [(line["step"], line["loss"]) for line in lines if "loss" in line]
validation = [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
axes.plot(*zip(*training, strict=True), label="training")
axes.plot(*zip(*validation, strict=True), "o-", label="validation")
axes.axhline(math.log(257), color="gray", linestyle=":", label="equal guesses")
axes.set_xlabel("step")
axes.set_ylabel("loss (nats per byte)")
axes.set_title("LoRA over a frozen random Llama")
axes.grid(alpha=0.3)
axes.legend()
plt.show()
assert validation[-1][1] < validation[0][1]

# %% [markdown]
# ## Export the adapters
#
# A checkpoint holds the adapters only, and the path and hash of the base. The export is a folder for peft.

# %%
dtrain.checkpoint.export(run_dir, adapter)
for path in sorted(adapter.iterdir()):
    print(f"{path.stat().st_size:>9,} bytes  {path.name}")

# %% [markdown]
# ## Load them back
#
# peft loads the folder over the base. The loss of a held-out sentence is far below that of the base alone.

# %%
tokens = torch.tensor([list(b"17 plus 25 is 42.\n18 plus 25 is 43.\n19 plus 25 is 44.\n")])
plain = AutoModelForCausalLM.from_pretrained(base).eval()
with torch.no_grad():
    before = plain(input_ids=tokens, labels=tokens).loss.item()
    adapted = PeftModel.from_pretrained(plain, adapter).eval()
    after = adapted(input_ids=tokens, labels=tokens).loss.item()
print(f"loss of the base {before:.2f}, with the adapters {after:.2f} nats per byte")
assert after < before / 2

# %% [markdown]
# ## What next
#
# - A folder for transformers alone, without peft: `dtrain checkpoint export RUN OUT --merge`.
# - Chats in place of plain text: `data=chat data.files='chat/*.jsonl' data.tokenizer=FOLDER`.
# - On several ranks: `launch.num_processes=2 engine.zero_stage=3` shards the frozen weights, too.
# - In a loop of your own, with an adapter that peft made: `docs/examples/lora.py`.
