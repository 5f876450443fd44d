"""Writes everything about one micro-batch, and about the gradients of a step, to the folder of a replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dtrain.measure.replay.records import GradientRecord, MicroBatchRecord
from dtrain.precision.histogram import Histogram
from dtrain.precision.module_values import Measured, ModuleRecorder, TensorRecord
from dtrain.telemetry.metrics import finite, write_json

GRADIENTS = "gradients"


def micro_batch_file(index: int) -> str:
    return f"micro-batch-{index:03d}"


def write_micro_batch(
    folder: Path, record: MicroBatchRecord, inputs: Mapping[str, Tensor], recorder: ModuleRecorder
) -> None:
    """Writes the inputs and sample ids as safetensors; the record and the modules' ranges as JSON."""
    name = micro_batch_file(record.index)
    tensors = {key: value.detach().cpu().clone(memory_format=torch.contiguous_format) for key, value in inputs.items()}
    save_file({**tensors, "sample_ids": torch.tensor(record.samples)}, folder / f"{name}.safetensors")
    weights = {
        module: [asdict(measured.read(key)) for key, measured in own] for module, own in recorder.weights.items() if own
    }
    tensors_of_modules = [_plain(item) for item in recorder.records]
    content = {**asdict(record), "tensors": tensors_of_modules, "weights": weights, "failures": recorder.failures}
    write_json(folder / f"{name}.json", content, indent=1)


def _plain(record: TensorRecord) -> dict[str, Any]:
    """Returns a tensor at a module's boundary, in the order of the forward; its gradient is scaled."""
    gradient = None if record.gradient is None else asdict(record.gradient.read("gradient"))
    return {
        "module": record.module,
        "class": record.class_name,
        "side": "output" if record.is_output else "input",
        **asdict(record.forward.read(record.name)),
        "gradient": gradient,
    }


def first_nonfinite(recorder: ModuleRecorder) -> str:
    """Returns the first tensor of the forward that is not finite, masks apart; empty if there is none."""
    for record in recorder.records:
        values = record.forward.read(record.name)
        if not (values.is_finite or values.may_be_mask):
            side = "output" if record.is_output else "input"
            return f"{side} of '{record.module}' ({record.class_name})"
    return ""


def write_gradients(
    folder: Path, gradients: Iterator[tuple[str, Tensor]], divisor: float, *, writes: bool
) -> list[GradientRecord]:
    """Writes the gradients, divided by ``divisor``, and their records; only the rank that ``writes`` keeps any."""
    records, tensors = [], {}
    for name, values in gradients:
        if not writes:
            continue
        gradient = (values.detach() / divisor).cpu().contiguous()
        tensors[name] = gradient
        records.append(_gradient_record(name, gradient))
    if writes:
        save_file(tensors, folder / f"{GRADIENTS}.safetensors")
        write_json(folder / f"{GRADIENTS}.json", [asdict(record) for record in records], indent=1)
    return records


def _gradient_record(name: str, gradient: Tensor) -> GradientRecord:
    values = Measured.of(gradient).read(name)
    norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    return GradientRecord(
        name,
        values.numel,
        values.min,
        values.max,
        values.num_inf,
        values.num_nan,
        finite(norm),
        dict(Histogram.of(gradient).to_dict()),
    )
