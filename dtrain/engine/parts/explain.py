"""Explains a skipped step: runs the culprit's micro-batch again, and names the module where it went wrong.

A step is explained when it is finalized. Its weights are still in force then, because no later update is launched
before, and random numbers are keyed: it is the same forward. Nothing of it stays: buffers such as those of a batch
norm are restored, and no gradient reaches a parameter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dtrain.distributed.logging import logger
from dtrain.engine.forward import ModelForward
from dtrain.engine.outcome import Culprit, Origin
from dtrain.engine.parts.forward_calls import KeptForwards, kept_buffers
from dtrain.engine.parts.part import Forward
from dtrain.precision.forward import find_loss
from dtrain.precision.module_values import Measured, ModuleRecorder, TensorRecord


class SkipExplainer:
    """Explains a skipped step when it is finalized.

    Args:
        forward: runs the forwards.
        calls: the forwards of the step.
    """

    def __init__(self, forward: ModelForward, calls: KeptForwards) -> None:
        self._forward = forward
        self._calls = calls

    def explain(self, culprit: Culprit | None, loss_scale: float) -> Culprit | None:
        """Returns ``culprit`` with its origin; all ranks call, and run their own micro-batch of that number together.

        A model's forward may communicate, so no rank runs it alone. An error becomes a warning.
        """
        if culprit is None or culprit.micro_batch is None:
            return culprit
        calls = self._calls.of(culprit.step, culprit.micro_batch)
        search = _Search(self._forward, calls, needs_calls=self._forward.comm.rank == culprit.rank)
        try:
            with kept_buffers(self._forward.module):
                origin = self._agree(culprit.rank, search.search_forward)
                if origin is None and self._forward.searches_backward:
                    owner = (culprit.tensor or "").rpartition(".")[0] if culprit.tensor is not None else None
                    origin = self._agree(culprit.rank, partial(search.search_backward, loss_scale, owner))
        except _ExplanationError as error:
            if self._forward.comm.rank == 0:
                logger.warning("the skip of step %d is not explained further: %s", culprit.step + 1, error)
            return culprit
        finally:
            search.close()
        return replace(culprit, origin=origin or Origin("", note=search.nothing_found(culprit)))

    def _agree(self, rank: int, search: Callable[[], Origin | None]) -> Origin | None:
        """Calls ``search`` on every rank; returns what it found on ``rank``."""
        own: dict[str, Any] = {"origin": None, "error": None}
        try:
            found = search()
            own["origin"] = None if found is None else asdict(found)
        except Exception as error:  # of the user's model, or out of memory; the run itself has lost nothing
            own["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        records = [json.loads(text) for text in self._forward.comm.exchange_text(json.dumps(own))]
        for other, record in enumerate(records):
            if record["error"] is not None:
                raise _ExplanationError(f"rank {other}: {record['error']}")
        origin = records[rank]["origin"]
        return None if origin is None else Origin.from_dict(origin)


class _ExplanationError(Exception):
    pass


class _Search:
    """Runs the forwards of a micro-batch again, and then their backward.

    ``needs_calls``: whether there must be one; another rank's micro-batch may be a dummy that ran none.
    """

    def __init__(self, forward: ModelForward, calls: Sequence[Forward], *, needs_calls: bool) -> None:
        self._forward = forward
        self._calls = calls
        self._needs_calls = needs_calls
        self._recorder = ModuleRecorder(forward.module)
        self._loss: Tensor | None = None

    def search_forward(self) -> Origin | None:
        if self._needs_calls and not self._calls:
            raise RuntimeError("its forward was not kept; set engine.explain_skips before the step")
        forward = self._forward
        # without a graph where only the forward is searched: a library must not wait for its backward
        with torch.set_grad_enabled(forward.searches_backward), self._recorder.recording():
            for call in self._calls:
                loss = find_loss(forward.run(call.key, call.args, call.kwargs))
                self._loss = loss if loss is not None else self._loss
        if self._recorder.failures:
            raise RuntimeError(self._recorder.failures[0])
        return self._first_in_forward()

    def _first_in_forward(self) -> Origin | None:
        record, mask = self._recorder.first_nonfinite()
        if record is not None:
            return self._origin(record, mask)
        if mask is not None and self._loss is not None and not bool(self._loss.isfinite()):
            return self._origin(mask, None)
        return None

    def search_backward(self, loss_scale: float, owner: str | None) -> Origin | None:
        """Searches the gradients; ``owner``: path of the module whose weight has the culprit's gradient."""
        if self._loss is None or not self._loss.requires_grad:
            return None
        with torch.enable_grad():
            scaled = self._loss * loss_scale
        with self._forward.backward_precision():
            self._recorder.run_backward(scaled)
        self._loss = None
        # the last in forward whose gradient is not finite is the first in backward
        for record in reversed(self._recorder.records):
            if record.gradient is not None and not record.gradient.read("").is_finite:
                return self._origin(record, None, gradient=record.gradient)
        records = [record for record in self._recorder.records if record.module == owner and record.is_output]
        if not records:
            return None
        return self._origin(records[-1], None, gradient=records[-1].gradient, place="weight gradient")

    def _origin(
        self,
        record: TensorRecord,
        mask: TensorRecord | None,
        *,
        gradient: Measured | None = None,
        place: str | None = None,
    ) -> Origin:
        last = self._recorder.records.index(record)
        # of this call of the module, if it is called several times: the nearest before and after
        records = self._recorder.records
        before = [item for item in records[: last + 1] if item.module == record.module and not item.is_output]
        after = [item for item in records[last:] if item.module == record.module and item.is_output]
        notes = []
        if mask is not None and mask.module != record.module:
            notes.append(f"before it, -Inf in the output of '{mask.module}' ({mask.class_name})")
        if gradient is None and not record.is_output and last:
            previous = records[last - 1]
            label = "output" if previous.is_output else f"input {previous.name}"
            own = f" of '{previous.module}'" if previous.module else " of the model"
            notes.append(f"before it, {previous.forward.read(label + own)}")
        label = record.name if record.is_output else f"input {record.name}"
        values = record.forward.read(label) if gradient is None else gradient.read(f"gradient of {label}")
        return Origin(
            place or (record.side if gradient is None else f"{record.side} gradient"),
            record.module,
            record.class_name,
            record.caller,
            values,
            tuple(item.forward.read(f"input {item.name}") for item in _newest(before)),
            tuple(item.forward.read(item.name) for item in _first_call(after)),
            tuple(weight.read(name) for name, weight in self._recorder.weights.get(record.module, ())),
            "; ".join(notes),
        )

    def nothing_found(self, culprit: Culprit) -> str:
        if culprit.phase == "forward loss":
            return "the forward of the model is finite, so the loss went wrong after it"
        if not self._forward.searches_backward:
            return f"the forward is finite; engine={self._forward.engine} does not search the backward"
        return "the forward is finite, and its loss is computed outside of the model, so the backward was not searched"

    def close(self) -> None:
        self._loss = None
        self._recorder.drop_graph()
        self._forward.discard()


def _newest(records: list[TensorRecord]) -> list[TensorRecord]:
    """Returns the last of each name, in the order of time."""
    return list({record.name: record for record in records}.values())


def _first_call(records: list[TensorRecord]) -> list[TensorRecord]:
    return list({record.name: record for record in reversed(records)}.values())[::-1]
