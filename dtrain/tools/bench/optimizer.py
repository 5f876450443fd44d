"""``dtrain bench optimizer``: unscale, check, norm, clip, AdamW and cast, ours against torch's sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dtrain.config.schema import OptimizerSuiteConfig
from dtrain.distributed.setup import choose_device
from dtrain.optim.adamw import AdamW, UpdateScalars, UpdateSlice
from dtrain.optim.flat import FlatAdamW
from dtrain.sharding.layout import CHUNK
from dtrain.tools.bench.records import Timings
from dtrain.tools.bench.timing import Operation, make_timings, take_turns

_PIECE = 1024 * CHUNK
"""Elements of one parameter, as torch's sequence sees them: a matrix of 1024 x 1024."""

_MAX_NORM = 1.0
_RULE = AdamW(lr=1e-4, compile=False)

_ABOUT = (
    "{numel:,} elements, BF16 weights, FP32 masters, {threads} thread{plural} on {device}. GB/s counts what must be "
    "moved: from FP32 gradients 34 bytes an element (norm 4; gradient, master, moments 16 read; master, moments, "
    "weight 14 written), from BF16 gradients 30, triad (a + 1.5 b) 12, copy 8, update without the norm 30."
)


def run_optimizer_suite(config: OptimizerSuiteConfig, command: str) -> Timings:
    """Times one optimizer phase of each contender, on the same masters and gradients.

    Raises:
        ConfigError: a device that is not there, or no compiler where ``bench.compiled`` asks for one.
    """
    bench = config.bench
    device = choose_device(bench.device, 0)
    torch.set_num_threads(bench.threads)
    phase = OptimizerPhase(bench.numel // CHUNK * CHUNK, device)
    operations = phase.operations(compiled=bench.compiled)
    about = _ABOUT.format(
        numel=phase.numel, threads=bench.threads, plural="s" if bench.threads > 1 else "", device=device.type
    )
    return make_timings(
        "optimizer",
        command,
        config,
        about,
        bandwidth="triad" if device.type == "cpu" else "copy",
        rivals=["torch fused, BF16 grads", "torch foreach, BF16 grads"],
        measure=lambda: take_turns(operations, bench.rounds, device),
    )


class OptimizerPhase:
    """The tensors that all contenders share, and what each does with them.

    Args:
        numel: elements, a whole number of chunks.
        device: where they lie.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel, self.device = numel, device
        generator = torch.Generator(device).manual_seed(0)
        self.master = torch.randn(numel, generator=generator, device=device)
        self.main_grad = torch.randn(numel, generator=generator, device=device)
        self.replica = self.master.bfloat16()

    def operations(self, *, compiled: bool) -> dict[str, Operation]:
        """Name -> one phase of that contender."""
        low, full = self.numel * 30, self.numel * 34
        found = {
            **self._bandwidths(),
            "torch fused, BF16 grads": Operation(self._torch("fused", torch.bfloat16), low),
            "torch fused, FP32 grads": Operation(self._torch("fused", torch.float32), full),
            "torch foreach, BF16 grads": Operation(self._torch("foreach", torch.bfloat16), low),
            "torch foreach, FP32 grads": Operation(self._torch("foreach", torch.float32), full),
            "ours, blocked": Operation(self._ours(_RULE), full),
            "ours, blocked, no norm": Operation(self._ours(_RULE, norm=False), low),
        }
        if compiled:
            rule = AdamW(lr=_RULE.lr, compile=True)
            found["ours, compiled"] = Operation(self._ours(rule), full)
            found["ours, compiled, no norm"] = Operation(self._ours(rule, norm=False), low)
        return found

    def _bandwidths(self) -> dict[str, Operation]:
        a, b, c = (torch.rand(self.numel, device=self.device) for _ in range(3))
        return {
            "triad": Operation(lambda: torch.add(a, b, alpha=1.5, out=c), 12 * self.numel),
            "copy": Operation(lambda: c.copy_(a), 8 * self.numel),
        }

    def _torch(self, kind: str, grad_dtype: torch.dtype) -> Callable[[], None]:
        """A loop's own steps around ``torch.optim.AdamW``, its FP32 parameters being the masters."""
        masters = [nn.Parameter(piece) for piece in self.master.split(_PIECE)]
        values, replicas = self.master.split(_PIECE), self.replica.split(_PIECE)
        grads = [grad.to(grad_dtype) for grad in self.main_grad.split(_PIECE)]
        optimizer = torch.optim.AdamW(
            masters, lr=_RULE.lr, betas=_RULE.betas, eps=_RULE.eps, weight_decay=_RULE.weight_decay, **{kind: True}
        )
        found_inf, inverse_scale = (torch.full((1,), value, device=self.device) for value in (0.0, 1.0))

        def run() -> None:
            full = [grad.to(torch.float32) for grad in grads]  # FP32 ones as they are
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

    def _ours(self, rule: AdamW, *, norm: bool = True) -> Callable[[], None]:
        """Norm, skip and clip decided on the device, then :class:`FlatAdamW`, as on one rank."""
        moments = torch.zeros_like(self.master), torch.zeros_like(self.master)
        part = UpdateSlice(True, self.master, self.main_grad, *moments, self.replica)
        optimizer = FlatAdamW(rule, [[part]])
        one, zero = (torch.full((), value, device=self.device) for value in (1.0, 0.0))

        def decide() -> tuple[Tensor, Tensor]:
            squares = torch.linalg.vector_norm(self.main_grad.view(-1, CHUNK), dim=1).double().square_().sum()
            clip = (_MAX_NORM / (squares.sqrt() + 1e-6)).clamp(max=1.0)
            return (1 / clip).float(), squares.isfinite().logical_not().float()

        def run() -> None:
            divisor, found_inf = decide() if norm else (one, zero)
            scalars = UpdateScalars.of(
                lr=rule.lr, step=1, grad_divisor=divisor, found_inf=found_inf, device=self.device
            )
            optimizer.update(0, scalars)

        return run
