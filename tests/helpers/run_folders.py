"""Run directories made of files, without a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

from dtrain.config.dump import config_to_dict
from dtrain.config.schema import RunConfig
from dtrain.telemetry.metrics import StepMetrics

STEPS = 40
STEP = StepMetrics(
    step=20, loss=3.214, lr=2e-3, grad_norm=1.0234, loss_scale=1.0, applied=True, skipped_steps=0, tokens=5120,
    tokens_per_s=45_210.0, step_ms=310.4, data_wait_ms=0.2, peak_memory=3 << 30,
)  # fmt: skip


def make_run(folder: Path, *, seed: int = 0, lr: float = 1e-3, name: str = "tiny", **files: str) -> Path:
    """Writes a finished run of ``STEPS`` steps, one of them skipped; ``files`` have names with ``_`` for ``.``."""
    folder.mkdir(parents=True)
    config: dict[str, Any] = config_to_dict(RunConfig())
    config["seed"], config["optim"]["lr"], config["model"]["name"] = seed, lr, name
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    lines = [training_line(step, seed, lr) for step in range(1, STEPS + 1)]
    lines += [{"step": step, "val_loss": 5.1 * math.exp(-step / 20)} for step in (20, 40)]
    text = "".join(json.dumps(line) + "\n" for line in sorted(lines, key=lambda line: line["step"]))
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    end = {"finished": True, "steps": STEPS, "mfu": 0.41, "tokens_per_s": 1.5e4, "world_size": 2, "precision": "bf16"}
    end |= {"mfu_full": 0.44, "gpu": {"power_limit_w": 700, "sm_clock_mhz": 1755, "temperature_c": 61}}
    (folder / "summary.json").write_text(json.dumps(end), encoding="utf-8")
    rows = [{"kind": "peak", "planned_low": 2**30, "planned_high": 2**31, "measured": 1.5 * 2**30}]
    (folder / "memory.json").write_text(json.dumps({"rows": rows, "notes": ["rank 0 of 2"]}), encoding="utf-8")
    for key, content in files.items():
        (folder / key.replace("_", ".")).write_text(content, encoding="utf-8")
    return folder


def training_line(step: int, seed: int = 0, lr: float = 1e-3) -> dict[str, Any]:
    """Returns a line of ``metrics.jsonl``; step 7 is skipped."""
    line = {
        "step": step, "loss": 5 * math.exp(-step * lr * 50) + 0.1 * math.sin(step + seed), "lr": lr * step / STEPS,
        "grad_norm": 1 + 0.5 * math.cos(step), "loss_scale": 65536.0 if step < 7 else 32768.0, "applied": step != 7,
        "skipped_steps": int(step >= 7), "tokens": 1000 * step, "tokens_per_s": 15000.0, "step_ms": 60.0,
        "data_wait_ms": 1.0, "peak_memory": 3 * 2**28, "forward_ms": 20.0, "backward_ms": 30.0, "update_ms": 5.0,
        "rank_wait_ms": 3.0, "slowest_rank": 1, "busy_slowest_ms": 58.0, "busy_median_ms": 55.0, "busy_spread_ms": 4.0,
    }  # fmt: skip
    return line if step != 7 else {**line, "reason": "overflow", "culprit": "rank 1, blocks.0.attn.qkv.weight"}
