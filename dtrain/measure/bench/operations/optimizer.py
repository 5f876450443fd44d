"""``dtrain bench optimizer``: unscale, check, norm, clip, update and cast, against torch's sequence of passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dtrain.config.optim import OPTIMIZERS, SGD, Adam, AdamW, Lion, Muon
from dtrain.config.tool_schema import BenchSuite, OptimizerBenchConfig
from dtrain.distributed.startup.setup import choose_device
from dtrain.errors import ConfigError, nearest
from dtrain.measure.bench.operations.muon import MuonPhase, describe_matrices, matrix_traffic
from dtrain.measure.bench.operations.sequence import decide, torch_sequence
from dtrain.measure.bench.operations.timing import Operation, measure_operations, time_rounds
from dtrain.measure.bench.records import OperationResults, OperationTiming
from dtrain.optim.flat import FlatUpdate
from dtrain.optim.rule import UpdateClass, UpdateScalars, UpdateSlice
from dtrain.optim.rules import rule_of
from dtrain.sharding.layout import CHUNK
from dtrain.tools.tables import plural

_PARAMETER = 1024 * CHUNK
"""Elements of one parameter in torch's sequence: a matrix of 1024 x 1024."""

_BASELINE = "torch, BF16 grads"

_DESCRIPTION = (
    "BF16 weights, FP32 masters, {threads} on {device}. The workload names the optimizer and the bytes of its states "
    "for a parameter."
)
_ELEMENTWISE = (
    "{numel:,} elements. torch: its fused kernel, for Lion the paper's loop over lists; AdamW with "
    "BF16 moments is compared with torch's AdamW of FP32 moments. GB/s counts the bytes that must move: of an element "
    "14 (gradient and master read, master and weight written) and the states twice; 4 more from FP32 gradients, for "
    "the norm; 12 for triad (a + 1.5 b), 8 for copy."
)


def run_optimizer_suite(config: BenchSuite[OptimizerBenchConfig], command: str) -> Iterator[OperationResults]:
    """Times the optimizer phase of each case, on the same masters and gradients.

    Raises:
        ConfigError: an unknown optimizer, or ``torch``.
    """
    bench = config.bench
    device = choose_device(bench.device, 0)
    records = [_record(name) for name in bench.optimizers]
    torch.set_num_threads(bench.threads)
    numel = bench.numel // CHUNK * CHUNK
    muon = next((record for record in records if isinstance(record, Muon)), None)
    elementwise = any(not isinstance(record, Muon) for record in records)
    description = [_DESCRIPTION.format(threads=plural(bench.threads, "thread"), device=device.type)]
    description += [_ELEMENTWISE.format(numel=numel)] if elementwise else []
    description += [describe_matrices(bench.numel)] if muon else []

    def measure() -> Iterator[OperationTiming]:
        for record in records:
            phase: MuonPhase | OptimizerPhase
            if isinstance(record, Muon):
                phase = MuonPhase(bench.numel, device, record)
                operations = phase.operations(_BASELINE)
            else:
                phase = OptimizerPhase(numel, device, record)
                operations = phase.operations(compiled=bench.compiled)
            for timing in time_rounds(operations, bench.rounds, device):
                yield replace(timing, workload=f"{record.name}, {phase.state_bytes} bytes")

    yield from measure_operations(
        "optimizer",
        command,
        config,
        " ".join(description),
        measure,
        baselines=[_BASELINE],
        reference=None if not elementwise else "triad" if device.type == "cpu" else "copy",
        traffic=matrix_traffic(muon, bench.numel) if muon else (),
    )


def _record(name: str) -> Any:
    known = [known for known in OPTIMIZERS if known != "torch"]  # the baselines are torch's
    if name not in known:
        raise ConfigError(f"bench.optimizers: '{name}' is not one of {', '.join(known)}{nearest(name, known)}")
    return replace(OPTIMIZERS[name](lr=1e-4), compile=False)  # type: ignore[call-arg]


class OptimizerPhase:
    """The tensors that all cases share, of ``numel`` elements (a multiple of the chunk)."""

    def __init__(self, numel: int, device: torch.device, record: Any = AdamW(lr=1e-4, compile=False)) -> None:  # noqa: B008
        self.numel, self.device, self.record = numel, device, record
        self.state_bytes = rule_of(record).state_bytes
        generator = torch.Generator(device).manual_seed(0)
        self.master = torch.randn(numel, generator=generator, device=device)
        self.main_grad = torch.randn(numel, generator=generator, device=device)
        self.replica = self.master.bfloat16()

    def operations(self, *, compiled: bool) -> dict[str, Operation]:
        full = (18 + 2 * self.state_bytes) * self.numel
        without_norm = full - 4 * self.numel
        # the baselines of AdamW with BF16 moments move FP32 ones too, which is not what must move
        found = {
            **self._bandwidths(),
            _BASELINE: Operation(self.torch_sequence("fused", torch.bfloat16), without_norm),
            "torch, FP32 grads": Operation(self.torch_sequence("fused", torch.float32), full),
        }
        if not isinstance(self.record, Lion):
            found["torch foreach, BF16 grads"] = Operation(self.torch_sequence("foreach", torch.bfloat16), without_norm)
        found["dtrain, blocked"] = Operation(self._dtrain(self.record), full)
        found["dtrain, blocked, no norm"] = Operation(self._dtrain(self.record, norm=False), without_norm)
        if compiled:
            record = replace(self.record, compile=True)
            found["dtrain, compiled"] = Operation(self._dtrain(record), full)
            found["dtrain, compiled, no norm"] = Operation(self._dtrain(record, norm=False), without_norm)
        return found

    def _bandwidths(self) -> dict[str, Operation]:
        a, b, c = (torch.rand(self.numel, device=self.device) for _ in range(3))
        return {
            "triad": Operation(lambda: torch.add(a, b, alpha=1.5, out=c), 12 * self.numel),
            "copy": Operation(lambda: c.copy_(a), 8 * self.numel),
        }

    def torch_sequence(self, kind: str, grad_dtype: torch.dtype) -> Callable[[], None]:
        """Returns a training loop's own passes around torch's optimizer on the FP32 masters; ``kind``: of kernel."""
        masters = [nn.Parameter(values) for values in self.master.split(_PARAMETER)]
        grads = [grad.to(grad_dtype) for grad in self.main_grad.split(_PARAMETER)]
        return torch_sequence(_torch_optimizer(self.record, masters, kind), self.replica.split(_PARAMETER), grads)

    def _dtrain(self, record: Any, *, norm: bool = True) -> Callable[[], None]:
        """Returns the engine's phase on one rank: norm, skip and clip on the device, then ``FlatUpdate``."""
        rule = rule_of(record)
        states = tuple(spec.like(self.master) for spec in rule.states)
        update_class = UpdateClass(weight_decay=record.decay)
        part = UpdateSlice(update_class, (0, 0), self.master, self.main_grad, states, self.replica)
        optimizer = FlatUpdate([rule], [[part]])
        one, zero = (torch.full((), value, device=self.device) for value in (1.0, 0.0))

        def run() -> None:
            divisor, found_inf = decide(self.main_grad) if norm else (one, zero)
            optimizer.update([0], UpdateScalars(record.lr, 1, divisor, found_inf))

        return run


def _torch_optimizer(record: Any, masters: list[nn.Parameter], kind: str) -> torch.optim.Optimizer:
    if isinstance(record, Lion):
        return _ForeachLion(masters, {"lr": record.lr, "betas": record.betas, "weight_decay": record.weight_decay})
    options: dict[str, Any] = {"lr": record.lr, "weight_decay": record.weight_decay, kind: True}
    if isinstance(record, SGD):
        return torch.optim.SGD(masters, momentum=record.momentum, nesterov=record.nesterov, **options)
    make = torch.optim.Adam if isinstance(record, Adam) else torch.optim.AdamW
    return make(masters, betas=record.betas, eps=record.eps, **options)


class _ForeachLion(torch.optim.Optimizer):
    """Chen et al., 2023, algorithm 2, over lists of tensors, as torch has no Lion."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), masters = group["betas"], group["params"]
            grads = [master.grad for master in masters]
            exp_avgs = [self.state[p].setdefault("exp_avg", torch.zeros_like(p)) for p in masters]
            updates = torch._foreach_lerp(exp_avgs, grads, 1 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(masters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(masters, updates, alpha=-group["lr"])
            torch._foreach_lerp_(exp_avgs, grads, 1 - beta2)
