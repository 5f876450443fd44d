"""Loss and metrics of the validation data, the same digits at any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dtrain.engine.interface import Engine
from dtrain.errors import ConfigError, ModelError
from dtrain.precision.forward import find_loss
from dtrain.tasks import Task, num_targets
from dtrain.tasks.task import in_sample_order


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Returns ``batch`` on ``device`` without waiting for it."""
    if device.type == "cuda":
        # a copy from pageable memory may wait for all that is queued; torch keeps pinned memory until the copy is done
        batch = {name: tensor.pin_memory() if tensor.device.type == "cpu" else tensor for name, tensor in batch.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def validate(engine: Engine, task: Task, batches: Iterator[tuple[dict[str, Tensor], bool]]) -> dict[str, float]:
    """Returns ``loss``, the mean over the targets of all ranks' micro-batches, and the metrics of ``task``.

    One small all-gather; the FP64 sums are in the order of the micro-batches, independent of the world size.

    Args:
        batches: micro-batches, the same number on each rank, and whether each one counts.

    Raises:
        ModelError: the model returns no loss.
        ConfigError: there is no target that counts.
    """
    rows: list[Tensor] = []
    engine.copy_buffers()
    with engine.eval():
        for micro, counts in batches:
            batch = to_device(micro, engine.device)
            output = engine(**batch)
            loss = find_loss(output)
            if loss is None:
                raise ModelError(
                    f"a model must return its loss in eval mode too; got a {type(output).__name__} without one"
                )
            weight = num_targets(micro["targets"]) if counts else 0
            # filled in on the device: new_tensor would copy the number there and wait
            count = loss.new_full((1,), weight, dtype=torch.float64)
            total = loss.double().reshape(1) * weight if weight else torch.zeros_like(count)  # not NaN x 0
            sums = task.sums(output, batch["targets"])
            rows.append(torch.cat((total, count, sums if weight else torch.zeros_like(sums))))
    gathered = engine.comm.gather_rows(torch.stack(rows).flatten(), label="validation loss")
    columns = in_sample_order(gathered, len(rows)).t().tolist()
    loss_sum, num_counted, *task_sums = map(float, map(sum, columns))
    if not num_counted:
        raise ConfigError("no target of the validation data counts in the loss; check how the targets are masked")
    return {"loss": loss_sum / num_counted, **task.metrics(task_sums, num_counted)}
