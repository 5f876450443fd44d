"""The smallest run of the probe."""

from __future__ import annotations

TINY = [
    "steps=8",
    "seeds=2",
    "model.num_layers=1",
    "model.hidden_dim=32",
    "model.num_heads=2",
    "model.max_seq_len=16",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "schedule.warmup_steps=2",
    "launch.device=cpu",
    "launch.threads_per_rank=1",
]
