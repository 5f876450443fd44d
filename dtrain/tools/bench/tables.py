"""What all tables of results are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from dtrain.tools.bench.records import Entry
from dtrain.tools.host import Host


def spread(values: Sequence[float], digits: int) -> str:
    """Median (least to most)."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def ratios(entry: Entry, baseline: Entry) -> list[float]:
    """``entry``'s step time over ``baseline``'s in each round, medians of the turns."""
    pairs = zip(entry.turns, baseline.turns, strict=True)
    return [median(own.step_ms) / median(other.step_ms) for own, other in pairs]


def describe_machine(host: Host) -> str:
    """Machine and software in one line."""
    gpus = "".join(f", {name}" for name in host.gpus)
    peers = "".join(f", {name} {number}" for name, number in host.peers.items())
    return (
        f"{host.cpu}, {host.cores} cores, {host.memory_gib:g} GiB{gpus}, {host.system}; Python {host.python}, torch "
        f"{host.torch}, dtrain {host.dtrain}{peers}"
    )


def step_ms(entry: Entry) -> float:
    """The median over all timed steps."""
    return median(value for turn in entry.turns for value in turn.step_ms)


def final_loss(entry: Entry) -> float:
    """The mean loss of the last turn; NaN where one of its steps had none."""
    losses = [math.nan if loss is None else loss for loss in entry.turns[-1].losses]
    return sum(losses) / len(losses)


def state(entry: Entry) -> str:
    """MiB of the model states on a rank, against the ZeRO formula where there is one."""
    footprint = entry.footprint
    held = sum(footprint.state.values())
    if footprint.formula is None:
        return _mib(held)
    expected = sum(footprint.formula.values())
    return f"{_mib(held)} = {held / expected:.3f} x {_mib(expected)}"


def peak(entry: Entry) -> str:
    """MiB of the highest memory in use on a rank: of its GPU, else of the process."""
    device, rss = entry.footprint.peak_device, entry.footprint.peak_rss
    return _mib(rss) if device is None else f"{_mib(device)} on the GPU"


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f}"
