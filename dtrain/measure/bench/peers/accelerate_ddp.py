"""Hugging Face accelerate around the plain loop: it wraps the model in DDP and its forward in autocast."""

from __future__ import annotations

from accelerate import Accelerator
from torch import Tensor, nn

from dtrain.measure.bench.peers import plain


def prepare(model: nn.Module, settings: plain.Settings) -> plain.Training:
    """Takes ``model`` on its device; the process group and a launcher's environment exist."""
    accelerator = Accelerator(
        mixed_precision="bf16" if settings.bf16 else "no", cpu=settings.device.type == "cpu", device_placement=False
    )
    replicated, optimizer = accelerator.prepare(model, plain.make_optimizer(model, settings))

    def step(batch: plain.Batch) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = replicated(**batch).loss
        accelerator.backward(loss)
        if settings.max_grad_norm is not None:
            accelerator.clip_grad_norm_(replicated.parameters(), settings.max_grad_norm)
        optimizer.step()
        return loss.detach()

    return plain.Training(step, lambda: plain.states(replicated, optimizer.optimizer))
