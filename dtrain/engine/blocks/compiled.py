"""Compilation of blocks by ``torch.compile``: one graph for all equal blocks, counted, and no repetition unsaid."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from dtrain.device import elapsed_ms
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.logging import logger
from dtrain.engine.blocks.recompute import Forward
from dtrain.engine.parts.forward_calls import kept_buffers
from dtrain.engine.parts.part import StepPart, StepUnderWay
from dtrain.errors import ConfigError
from dtrain.precision.float8.linear import are_products_in_bf16
from dtrain.precision.hardware import has_compiler
from dtrain.precision.regions import trace_regions, traces_regions
from dtrain.precision.rules import COMPILED_FORWARD

_ROUNDS = 5
"""Rounds of the measurement of ``compile=auto``, eager and compiled in turn, after one of each that is not counted."""


def resolve_compile(mode: str, device: torch.device) -> str:
    """Returns ``none``, ``blocks`` or ``auto`` for the device: on a CPU, and without a compiler, auto is none.

    Raises:
        ConfigError: blocks are to be compiled, and there is no compiler.
    """
    if mode == "none" or (mode == "auto" and device.type == "cpu"):
        return "none"
    if has_compiler(device):
        return mode
    needs = "Triton and a C compiler" if device.type == "cuda" else "a C++ compiler, such as g++,"
    if mode == "blocks":
        raise ConfigError(
            f"compile=blocks needs {needs} and the headers of Python, which this machine lacks; install them, or set "
            f"compile=none"
        )
    logger.info("compile=auto: blocks are not compiled, because this machine lacks %s or the headers of Python", needs)
    return "none"


class CompiledBlocks(StepPart):
    """Compiles the forwards of blocks, and counts the graphs.

    Compiled code runs in training only: validation and generation meet other shapes, each of which would take a
    compilation. A shape that changes is compiled once more, then for all sizes of that dimension.

    Args:
        measures: whether the first call measures if compiled code is faster, and keeps it only then.

    Attributes:
        num_graphs: graphs compiled so far; a graph break makes two of one.
        is_on: whether compiled code runs.
    """

    def __init__(self, comm: Communicator, *, measures: bool) -> None:
        self.num_graphs = 0
        self.is_on = True
        self._comm = comm
        self._measures = measures
        self._times: list[float] = []  # of a block, eager and compiled, in ms
        self._seconds = 0.0
        self._num_reported = 0
        self._is_first_step = True
        self._breaks = _graph_breaks()
        trace_regions(enabled=True)

    def wrap(self, forward: Forward) -> Forward:
        """Returns ``forward``, which takes its module as the first argument, compiled."""
        compiled = torch.compile(forward, backend=self._compile)

        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.is_on or not torch.is_grad_enabled() or are_products_in_bf16():
                return forward(module, *args, **kwargs)
            if self._measures:  # eager until the ranks have agreed, after the step
                if not self._times:
                    self._times = self._measured((forward, compiled), module, args, kwargs)
                return forward(module, *args, **kwargs)
            try:
                return compiled(module, *args, **kwargs)
            except AssertionError as error:
                if not (traces_regions() and "autocast" in str(error)):
                    raise
                # a graph break inside of a region; from now on the graph ends before it
                trace_regions(enabled=False)
                return compiled(module, *args, **kwargs)

        vars(run)[COMPILED_FORWARD] = True
        return run

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx  # the import takes seconds

        self.num_graphs += 1
        start = time.monotonic()
        try:
            return compile_fx(graph, inputs)
        finally:
            self._seconds += time.monotonic() - start

    def after_update(self, step: StepUnderWay) -> None:
        """Logs the graphs of the first step, and warns of those that a later step has compiled, with the reason.

        All ranks call; after a measurement they agree here.
        """
        if self._measures:
            self._choose()
            return
        new, is_first = self.num_graphs - self._num_reported, self._is_first_step
        self._num_reported, self._is_first_step = self.num_graphs, False
        if self._comm.rank != 0 or not self.is_on or not (new or is_first):
            return
        if not new:
            logger.warning("no block is compiled: torch.compile runs all of them as they are; %s", _first_break())
            return
        graphs = f"{new} graph{'s' if new > 1 else ''} in {self._seconds:.0f} s"
        self._seconds = 0.0
        if is_first:
            logger.info("blocks compiled: %s", graphs)
            if breaks := _graph_breaks() - self._breaks:
                logger.warning("compiled blocks are cut by %d graph breaks; %s", breaks, _first_break())
            return
        again = "step %d compiled blocks again: %s, %d so far; %s"
        logger.warning(again, step.number + 1, graphs, self.num_graphs, _reason())

    def _measured(
        self, forwards: Sequence[Forward], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[float]:
        devices = [self._comm.device] if self._comm.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), kept_buffers(module), _without_hooks(module):
            return measure(forwards, module, args, kwargs)

    def _choose(self) -> None:
        """Decides by the measurement of the first rank that has one, because the bits of the two ways differ."""
        own = torch.tensor(self._times or [math.nan] * 2, device=self._comm.device)
        rows = self._comm.gather_rows(own, label="time of a block").tolist()
        times = next((row for row in rows if not math.isnan(row[0])), None)
        if times is None:  # no block had anything to differentiate; perhaps in the next step
            return
        eager, faster = times
        self._measures, self.is_on = False, faster < eager
        if self._comm.rank == 0:
            logger.info(
                "compile=auto: a block takes %.3g ms compiled and %.3g ms eager (%.2fx), so blocks are %s",
                *(faster, eager, eager / faster, "compiled" if self.is_on else "not compiled"),
            )


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Inside, hooks on the parameters do not run: those of an engine take gradients of its own backward only."""
    hooks = [p._backward_hooks for p in module.parameters() if p._backward_hooks]
    kept = [dict(own) for own in hooks]
    for own in hooks:
        own.clear()
    try:
        yield
    finally:
        for own, entries in zip(hooks, kept, strict=True):
            own.update(entries)


def measure(
    forwards: Sequence[Forward], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[float]:
    """Returns the median time of forward and backward of ``module`` by each of ``forwards``, in ms.

    Empty if nothing needs a gradient. No gradient reaches a parameter, and the arguments keep their values and graphs.
    """
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    device = next((value.device for value in (*tensors, *module.parameters())), torch.device("cpu"))

    def run(forward: Forward) -> float:
        copies: list[Tensor] = []

        def copied(value: Tensor) -> Tensor:
            copy = value.detach().clone().requires_grad_(value.requires_grad)
            copies.append(copy)
            return copy.view_as(copy)  # a block may change it in place, unlike a tensor without history

        own_args, own_kwargs = pytree.tree_map_only(Tensor, copied, (args, kwargs))
        wanted = [value for value in (*copies, *module.parameters()) if value.requires_grad]
        outputs: list[Tensor] = []

        def train() -> None:
            # as they are: the engine's own hooks would see a backward of another graph, and free weights for it
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                outputs.extend(filter(_needs_grad, pytree.tree_leaves(forward(module, *own_args, **own_kwargs))))
                if wanted and outputs:
                    ones = [torch.ones_like(value) for value in outputs]
                    torch.autograd.grad(outputs, wanted, ones, allow_unused=True)

        ms = elapsed_ms(train, device)
        return ms if wanted and outputs else math.nan

    if math.isnan(run(forwards[0])):
        return []
    rounds = [[run(forward) for forward in forwards] for _ in range(_ROUNDS + 1)]
    return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _graph_breaks() -> int:
    return sum(_break_counts().values())


def _first_break() -> str:
    """Returns the reason of a graph break, as a clause."""
    reason = next(iter(_break_counts()), "")
    if not reason:
        return "TORCH_LOGS=graph_breaks says why"
    return f"the reason of the first: {reason.strip().splitlines()[0]}"


def _break_counts() -> dict[str, int]:
    from torch._dynamo.utils import counters  # with torch.compile, dynamo is imported anyway

    return counters["graph_break"]


def _reason() -> str:
    """Returns the guard of the compiler that failed last, as a clause."""
    from torch._dynamo.utils import get_compilation_metrics

    reasons = [metrics.recompile_reason for metrics in get_compilation_metrics() if metrics.recompile_reason]
    return f"because this no longer held: {' '.join(reasons[-1].split())[:300]}" if reasons else "the reason is unknown"
