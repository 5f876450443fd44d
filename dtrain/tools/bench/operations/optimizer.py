"""``dtrain bench optimizer``: unscale, check, norm, clip, AdamW and cast, against torch's sequence of passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dtrain.config.optim import AdamW
from dtrain.config.tool_schema import OptimizerSuiteConfig
from dtrain.distributed.setup import choose_device
from dtrain.optim.adamw import AdamWRule
from dtrain.optim.flat import FlatUpdate
from dtrain.optim.rule import UpdateScalars, UpdateSlice
from dtrain.sharding.layout import CHUNK
from dtrain.tools.bench.operations.timing import Operation, measure_operations, time_rounds
from dtrain.tools.bench.records import OperationResults
from dtrain.tools.tables import plural

_PARAMETER = 1024 * CHUNK
"""Elements of one parameter in torch's sequence: a matrix of 1024 x 1024."""

_MAX_NORM = 1.0
_ADAMW = AdamW(lr=1e-4, compile=False)

_DESCRIPTION = (
    "{numel:,} elements, BF16 weights, FP32 masters, {threads} on {device}. GB/s counts the bytes an element that must "
    "move: 34 from FP32 gradients (norm 4; gradient, master and moments 16 read; master, moments and weight 14 "
    "written), 30 from BF16 gradients, 12 for triad (a + 1.5 b), 8 for copy, 30 for the update without the norm."
)


def run_optimizer_suite(config: OptimizerSuiteConfig, command: str) -> OperationResults:
    """Times the optimizer phase of each case, on the same masters and gradients."""
    bench = config.bench
    device = choose_device(bench.device, 0)
    torch.set_num_threads(bench.threads)
    phase = OptimizerPhase(bench.numel // CHUNK * CHUNK, device)
    operations = phase.operations(compiled=bench.compiled)
    return measure_operations(
        "optimizer",
        command,
        config,
        _DESCRIPTION.format(numel=phase.numel, threads=plural(bench.threads, "thread"), device=device.type),
        lambda: time_rounds(operations, bench.rounds, device),
        baselines=["torch fused, BF16 grads", "torch foreach, BF16 grads"],
        reference="triad" if device.type == "cpu" else "copy",
    )


class OptimizerPhase:
    """The tensors that all cases share, of ``numel`` elements (a multiple of the chunk)."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel, self.device = numel, device
        generator = torch.Generator(device).manual_seed(0)
        self.master = torch.randn(numel, generator=generator, device=device)
        self.main_grad = torch.randn(numel, generator=generator, device=device)
        self.replica = self.master.bfloat16()

    def operations(self, *, compiled: bool) -> dict[str, Operation]:
        bytes_30, bytes_34 = 30 * self.numel, 34 * self.numel
        found = {
            **self._bandwidths(),
            "torch fused, BF16 grads": Operation(self.torch_sequence("fused", torch.bfloat16), bytes_30),
            "torch fused, FP32 grads": Operation(self.torch_sequence("fused", torch.float32), bytes_34),
            "torch foreach, BF16 grads": Operation(self.torch_sequence("foreach", torch.bfloat16), bytes_30),
            "torch foreach, FP32 grads": Operation(self.torch_sequence("foreach", torch.float32), bytes_34),
            "dtrain, blocked": Operation(self._dtrain(_ADAMW), bytes_34),
            "dtrain, blocked, no norm": Operation(self._dtrain(_ADAMW, norm=False), bytes_30),
        }
        if compiled:
            record = AdamW(lr=_ADAMW.lr, compile=True)
            found["dtrain, compiled"] = Operation(self._dtrain(record), bytes_34)
            found["dtrain, compiled, no norm"] = Operation(self._dtrain(record, norm=False), bytes_30)
        return found

    def _bandwidths(self) -> dict[str, Operation]:
        a, b, c = (torch.rand(self.numel, device=self.device) for _ in range(3))
        return {
            "triad": Operation(lambda: torch.add(a, b, alpha=1.5, out=c), 12 * self.numel),
            "copy": Operation(lambda: c.copy_(a), 8 * self.numel),
        }

    def torch_sequence(self, kind: str, grad_dtype: torch.dtype) -> Callable[[], None]:
        """Returns a training loop's own passes around ``torch.optim.AdamW`` on the FP32 masters."""
        masters = [nn.Parameter(values) for values in self.master.split(_PARAMETER)]
        values, replicas = self.master.split(_PARAMETER), self.replica.split(_PARAMETER)
        grads = [grad.to(grad_dtype) for grad in self.main_grad.split(_PARAMETER)]
        optimizer = torch.optim.AdamW(
            masters, lr=_ADAMW.lr, betas=_ADAMW.betas, eps=_ADAMW.eps, weight_decay=_ADAMW.weight_decay, **{kind: True}
        )
        found_inf, inverse_scale = (torch.full((1,), value, device=self.device) for value in (0.0, 1.0))

        def run() -> None:
            full = [grad.to(torch.float32) for grad in grads]  # FP32 gradients are not copied
            for master, grad in zip(masters, full, strict=True):
                master.grad = grad
            found_inf.zero_()
            torch._amp_foreach_non_finite_check_and_unscale_(full, found_inf, inverse_scale)
            nn.utils.clip_grad_norm_(masters, _MAX_NORM)
            if not found_inf.item():
                optimizer.step()
            torch._foreach_copy_(replicas, values)
            optimizer.zero_grad()

        return run

    def _dtrain(self, record: AdamW, *, norm: bool = True) -> Callable[[], None]:
        """Returns the engine's phase on one rank: norm, skip and clip on the device, then :class:`FlatUpdate`."""
        rule = AdamWRule(record)
        states = tuple(spec.like(self.master) for spec in rule.states)
        part = UpdateSlice(True, self.master, self.main_grad, states, self.replica)
        optimizer = FlatUpdate(rule, [[part]])
        one, zero = (torch.full((), value, device=self.device) for value in (1.0, 0.0))

        def decide() -> tuple[Tensor, Tensor]:
            squares = torch.linalg.vector_norm(self.main_grad.view(-1, CHUNK), dim=1).double().square_().sum()
            clip = (_MAX_NORM / (squares.sqrt() + 1e-6)).clamp(max=1.0)
            return (1 / clip).float(), squares.isfinite().logical_not().float()

        def run() -> None:
            divisor, found_inf = decide() if norm else (one, zero)
            optimizer.update([0], UpdateScalars(record.lr, 1, divisor, found_inf))

        return run
