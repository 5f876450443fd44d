"""Counts of operations: what a step dispatches, and how many kernels that launches, on one fake CUDA device.

Run as a script it prints the counts of a model of 24 blocks::

    python tests/measure/fake_operations.py              # this checkout's dtrain
    PYTHONPATH=OTHER python tests/measure/fake_operations.py    # another checkout's
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the tests of this checkout, and the dtrain that PYTHONPATH names
    sys.path[0] = str(Path(__file__).parents[2])
    import tests.fake  # noqa: F401

    del sys.path[0]

import torch

import dtrain
from tests.fake.collectives import touches_no_values
from tests.fake.device import QuickMode
from tests.fake.harness import CONFIG, FakeRank, fake_engine
from tests.fake.launches import Launch

PHASES = ("forward", "backward", "step")


class Counts(QuickMode):
    """Operations by name, of all that is run inside.

    Attributes:
        dispatched: all operations of torch, views and allocations too.
        kernels: what launches a kernel on the device: operations that touch elements, and kernels of Triton.
        copies: copies between host and device, which need no kernel.
    """

    def __init__(self, launches: Sequence[Launch]) -> None:
        super().__init__()
        self.dispatched: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.copies = 0
        self._launches, self._start = launches, len(launches)

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self.kernels.update(launch.kernel for launch in self._launches[self._start :])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.dispatched[name] += 1
        result = func(*args, **(kwargs or {}))
        if not touches_no_values(func):
            tensors = [tensor for tensor in (*args, result) if isinstance(tensor, torch.Tensor)]
            if tensors and not any(tensor.numel() for tensor in tensors):
                pass  # nothing is launched for no elements
            elif {tensor.device.type for tensor in tensors} == {"cpu", "cuda"}:
                self.copies += 1
            elif not tensors or any(tensor.device.type == "cuda" for tensor in tensors):
                self.kernels[name] += 1
        return result


def count_phases(rank: FakeRank) -> dict[str, Counts]:
    """Returns the operations of forward, backward and step of one micro-batch, after a step that warms up."""
    rank.step(1)
    with rank.device.no_waits():
        with Counts(rank.launches) as forward:
            loss = rank.forward()
        with Counts(rank.launches) as backward:
            rank.engine.backward(loss)
        with Counts(rank.launches) as step:
            rank.engine.step()
    return dict(zip(PHASES, (forward, backward, step), strict=True))


def main() -> None:
    """Prints one line a precision and phase."""
    print(f"dtrain {Path(dtrain.__file__).parent}, torch {torch.__version__}, native, stage 2, one rank, 24 blocks")
    for precision in ("bf16", "fp8"):
        config = replace(CONFIG, num_layers=24, hidden_dim=256, num_heads=4)
        with fake_engine(config=config, precision=precision) as rank:
            counts = count_phases(rank)
        for phase in PHASES:
            kernels = counts[phase].kernels
            most = ", ".join(f"{number} {name}" for name, number in kernels.most_common(8))
            print(
                f"{precision} {phase:8} {counts[phase].dispatched.total():6} dispatched {kernels.total():5} kernels "
                f"{counts[phase].copies:2} copies from or to the host; {most}"
            )


if __name__ == "__main__":
    main()
