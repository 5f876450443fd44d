"""``dtrain bench loss-head``: output layer and cross entropy, forward and backward, by chunks and with full logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.config.tool_schema import LossHeadBenchConfig, LossHeadSuiteConfig
from dtrain.device import PeakMemory
from dtrain.distributed.startup.setup import choose_device
from dtrain.measure.bench.operations.timing import Operation, measure_operations, time_rounds
from dtrain.measure.bench.records import OperationResults, OperationTiming
from dtrain.models.causal_lm import causal_lm_output
from dtrain.models.linear_cross_entropy import auto_chunk_rows, linear_cross_entropy
from dtrain.planning.storages import StorageTracker
from dtrain.precision.hardware import has_bf16_products
from dtrain.tools.tables import plural

_BASELINE = "full logits"
_COMPILED = "full logits, compiled"

_DESCRIPTION = (
    "Output layer, cross entropy and their backward: {tokens:,} tokens, hidden dim {hidden}, vocabulary {vocab:,}, "
    "{threads} on {device}. full logits: F.linear, FP32 logits, F.cross_entropy. torch: F.linear_cross_entropy by its "
    "default options, which returns a BF16 loss for BF16 inputs. TFLOP/s counts three products. Peak memory over FP32 "
    "logits, both gradients included: {memory}."
)


def run_loss_head_suite(config: LossHeadSuiteConfig, command: str) -> Iterator[OperationResults]:
    """Times each case in FP32, and in BF16 where the device has such products."""
    bench = config.bench
    device = choose_device(bench.device, 0)
    torch.set_num_threads(bench.threads)
    heads = [_Head.of(bench, dtype, device) for dtype in _dtypes(device)]
    memory = "; ".join(f"{head.name}: {head.peaks(compiled=bench.compiled)}" for head in heads)

    def measure() -> Iterator[OperationTiming]:
        for head in heads:
            operations = {
                name: Operation(run, 0, 6 * bench.tokens * bench.hidden_dim * bench.vocab_size)
                for name, run in head.cases(compiled=bench.compiled).items()
            }
            for timing in time_rounds(operations, bench.rounds, device):
                yield replace(timing, workload=head.name)

    description = _DESCRIPTION.format(
        tokens=bench.tokens,
        hidden=bench.hidden_dim,
        vocab=bench.vocab_size,
        threads=plural(bench.threads, "thread"),
        device=device.type,
        memory=memory,
    )
    baselines = [_BASELINE, *([_COMPILED] if bench.compiled else [])]
    yield from measure_operations("loss-head", command, config, description, measure, baselines=baselines)


def _dtypes(device: torch.device) -> list[torch.dtype]:
    return [torch.float32, *([torch.bfloat16] if has_bf16_products(device) else [])]


@dataclass(frozen=True)
class _Head:
    """The tensors that all cases of a dtype share."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor

    @staticmethod
    def of(bench: LossHeadBenchConfig, dtype: torch.dtype, device: torch.device) -> _Head:
        generator = torch.Generator(device).manual_seed(0)

        def draw(rows: int, std: float) -> Tensor:
            values = torch.randn(rows, bench.hidden_dim, generator=generator, device=device)
            return (std * values).to(dtype).requires_grad_()

        targets = torch.randint(bench.vocab_size, (bench.tokens,), generator=generator, device=device)
        return _Head(draw(bench.tokens, 1.0), draw(bench.vocab_size, 0.02), targets)

    @property
    def name(self) -> str:
        return {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.hidden.dtype]

    def cases(self, *, compiled: bool) -> dict[str, Callable[[], None]]:
        found: dict[str, Callable[..., Tensor]] = {_BASELINE: _full}
        if compiled:
            found[_COMPILED] = torch.compile(_full, dynamic=False)
        if hasattr(F, "linear_cross_entropy"):
            options: Any = torch.nn.LinearCrossEntropyOptions()
            found["torch"] = lambda h, w, t: F.linear_cross_entropy(h, w, t, options=options)
        rows = auto_chunk_rows(len(self.hidden), self.hidden.dtype)
        found[f"dtrain, {rows} rows"] = linear_cross_entropy
        return {name: self._step(loss_of) for name, loss_of in found.items()}

    def _step(self, loss_of: Callable[..., Tensor]) -> Callable[[], None]:
        def run() -> None:
            self.hidden.grad = self.weight.grad = None
            loss_of(self.hidden, self.weight, self.targets).backward()

        return run

    def peaks(self, *, compiled: bool) -> str:
        """Returns the peak memory of each case over the bytes of FP32 logits, in words."""
        logits = 4 * len(self.hidden) * len(self.weight)
        # a compiled graph allocates without an operation that could be counted on a CPU
        is_counted = self.hidden.is_cuda
        cases = self.cases(compiled=compiled and is_counted)
        return ", ".join(f"{name} {self._peak(run) / logits:.1%}" for name, run in cases.items())

    def _peak(self, run: Callable[[], None]) -> int:
        run()  # compiles, and loads libraries
        self.hidden.grad = self.weight.grad = None
        if self.hidden.is_cuda:
            meter = PeakMemory(self.hidden.device)
            run()
            return meter.tensors()
        tracker = StorageTracker()
        tracker.exclude(value.untyped_storage() for value in (self.hidden, self.weight, self.targets))
        with tracker:
            run()
        return sum(tracker.peak.values())


def _full(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    loss = causal_lm_output(F.linear(hidden, weight)[None], targets[None]).loss
    assert loss is not None
    return loss
