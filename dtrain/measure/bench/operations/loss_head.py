"""``dtrain bench loss-head``: output layer and cross entropy, forward and backward, by chunks and with full logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.config.tool_schema import BenchSuite, LossHeadBenchConfig
from dtrain.device import TensorBytes
from dtrain.distributed.startup.setup import choose_device
from dtrain.errors import ConfigError, nearest
from dtrain.measure.bench.operations.timing import Operation, measure_operations, time_rounds
from dtrain.measure.bench.records import OperationResults, OperationTiming
from dtrain.models.causal_lm import causal_lm_output
from dtrain.models.linear_cross_entropy import auto_chunk_rows, linear_cross_entropy
from dtrain.precision.hardware import has_bf16_products
from dtrain.tools.tables import plural

_BASELINE = "full logits"
COMPILED = "full logits, compiled"
PEAK, BESIDE = "peak", "beside the gradients"
"""Titles of the shares of the memory of FP32 logits."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_DESCRIPTION = (
    "Output layer, cross entropy and their backward: {tokens:,} tokens, hidden dim {hidden}, vocabulary {vocab:,}, "
    "{threads} on {device}. full logits: F.linear, FP32 logits, F.cross_entropy. torch: F.linear_cross_entropy by its "
    "default options, which returns a BF16 loss for BF16 inputs. TFLOP/s counts three products. Peak: the highest "
    "memory beside the operands over that of FP32 logits, first with both gradients, then without them."
)


def run_loss_head_suite(config: BenchSuite[LossHeadBenchConfig], command: str) -> Iterator[OperationResults]:
    """Times each case in ``bench.dtypes``: in FP32, and in BF16 where the device has such products."""
    bench = config.bench
    device = choose_device(bench.device, 0)
    torch.set_num_threads(bench.threads)

    def measure() -> Iterator[OperationTiming]:
        for dtype in _dtypes(bench, device):
            head = _Head.of(bench, dtype, device)
            shares = head.shares(compiled=bench.compiled)
            operations = {
                name: Operation(run, 0, 6 * bench.tokens * bench.hidden_dim * bench.vocab_size)
                for name, run in head.cases(compiled=bench.compiled).items()
            }
            for timing in time_rounds(operations, bench.rounds, device):
                yield replace(timing, workload=head.name, shares=shares.get(timing.case, {}))

    description = _DESCRIPTION.format(
        tokens=bench.tokens,
        hidden=bench.hidden_dim,
        vocab=bench.vocab_size,
        threads=plural(bench.threads, "thread"),
        device=device.type,
    )
    baselines = [_BASELINE, *([COMPILED] if bench.compiled else [])]
    yield from measure_operations("loss-head", command, config, description, measure, baselines=baselines)


def _dtypes(bench: LossHeadBenchConfig, device: torch.device) -> list[torch.dtype]:
    if bench.dtypes:
        for name in bench.dtypes:
            if name not in _DTYPES:
                raise ConfigError(f"bench.dtypes: '{name}' is not one of {', '.join(_DTYPES)}{nearest(name, _DTYPES)}")
        return [_DTYPES[name] for name in bench.dtypes]
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
        return next(name for name, dtype in _DTYPES.items() if dtype == self.hidden.dtype)

    def cases(self, *, compiled: bool) -> dict[str, Callable[[], None]]:
        found: dict[str, Callable[..., Tensor]] = {_BASELINE: _full}
        if compiled:
            found[COMPILED] = torch.compile(_full, dynamic=False)
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

    def shares(self, *, compiled: bool) -> dict[str, dict[str, float]]:
        """Returns the peak memory of each case over the bytes of FP32 logits."""
        logits = 4 * len(self.hidden) * len(self.weight)
        gradients = self.hidden.nbytes + 4 * self.weight.numel()  # the weight's is summed in FP32
        peaks = {name: self._peak(run) for name, run in self.cases(compiled=compiled).items()}
        return {name: {PEAK: peak / logits, BESIDE: (peak - gradients) / logits} for name, peak in peaks.items()}

    def _peak(self, run: Callable[[], None]) -> int:
        run()  # compiles, and loads libraries
        self.hidden.grad = self.weight.grad = None
        with TensorBytes(self.hidden.device) as found:
            run()
        return found.peak


def _full(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    loss = causal_lm_output(F.linear(hidden, weight)[None], targets[None]).loss
    assert loss is not None
    return loss
