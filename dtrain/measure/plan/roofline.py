"""A lower bound of a step's time on a device that is not here: by its published rates and bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dtrain.errors import ConfigError
from dtrain.measure.plan.amdahl import limit_line
from dtrain.planning.calls import CallRecorder, RecordedCall
from dtrain.planning.devices import Device
from dtrain.planning.network import Network
from dtrain.planning.products import MatrixProduct, is_product, products
from dtrain.planning.timeline import Timeline, Transfer
from dtrain.planning.virtual_clock import moved_bytes, update_bytes
from dtrain.tools.tables import Table, plural, show
from dtrain.train.planned import AtUpdate, PlannedRun


@dataclass(frozen=True)
class Roofline:
    """Least seconds of a step on one rank.

    Attributes:
        products: at the published rates, or at the bandwidth where that takes longer.
        others: bytes of all other operations of forward and backward, at the bandwidth.
        update: bytes of gradients, masters and states, each read and written, at the bandwidth.
        transfers: of the step.
    """

    products: float
    others: float
    update: float
    transfers: Sequence[Transfer]

    @property
    def busy(self) -> float:
        return self.products + self.others + self.update


def roofline(run: PlannedRun) -> Roofline:
    """Returns the bound of ``run``.

    Raises:
        ConfigError: a rate or the bandwidth of the device is not published.
    """
    device = run.device
    if device.bandwidth is None:
        raise ConfigError(f"the bandwidth of {device.name} is not known, and it is not here to be measured")
    train = run.config.train
    count = train.global_batch_size // (train.micro_batch_size * run.num_ranks)
    timeline = Timeline(torch.device("cpu"))
    calls: list[RecordedCall] = []
    transfers: list[Transfer] = []
    with run.engine(timeline=timeline) as (engine, step), CallRecorder(engine.module) as recorder:

        def end_micro_batch() -> None:
            calls.extend(recorder.calls)
            transfers.extend(count * timeline.transfers)
            timeline.restart()

        timeline.restart()
        step(watch=AtUpdate(end_micro_batch))
        transfers += timeline.transfers
        states = engine.memory()
    found = products(calls, tf32=run.config.precision.name == "tf32")
    return Roofline(
        count * _product_seconds(found, device),
        count * sum(moved_bytes(call) for call in calls if not is_product(call.signature)) / device.bandwidth,
        update_bytes(states) / device.bandwidth,
        transfers,
    )


def _product_seconds(found: Sequence[MatrixProduct], device: Device) -> float:
    assert device.bandwidth is not None
    total = 0.0
    for product in found:
        rate = device.rate(product.format)
        if rate is None:
            missing = f"no rate of {device.name} in {product.format} is published"
            raise ConfigError(f"{missing}, and it is not here to be measured")
        total += max(product.flops / rate, product.nbytes / device.bandwidth)
    return total


def part_table(title: str, ms: Mapping[str, float]) -> Table:
    """Returns a table of the parts of a step, the last of which is ``step``, the whole."""
    rows = [(name, f"{taken:.4g}", f"{taken / ms['step']:.0%}") for name, taken in ms.items()]
    return Table(title, ("part", "ms", "share"), rows)


def show_roofline(run: PlannedRun, network: Path | None) -> None:
    """Prints the bound."""
    bound = roofline(run)
    share = bound.products / bound.busy
    parts = {"products": bound.products, "other operations": bound.others, "update": bound.update, "step": bound.busy}
    ms = {name: 1e3 * seconds for name, seconds in parts.items()}
    show([part_table(f"Least time of a step on {run.device.name}", ms)])
    tokens = run.config.train.global_batch_size * run.config.targets_per_sample
    print(
        f"at most {tokens / bound.busy:,.0f} {run.unit}/s on {plural(run.num_ranks, 'rank')}: each operation alone, at "
        "the published rate or bandwidth; nothing is measured, and no run reaches it"
    )
    if run.compiles_blocks:
        print("the blocks are taken as uncompiled (model.compile): compiled ones read and write less between products")
    print(limit_line(share))
    if bound.transfers:
        received = sum(transfer.nbytes for transfer in bound.transfers)
        traffic = f"{len(bound.transfers)} collectives a step, of which a rank receives {received / 1e6:.4g} MB"
        if network is None:
            print(f"communication is not in these times: {traffic}")
        else:
            known = Network.read(network, run.transport)
            taken = 1e3 * sum(known.seconds(transfer) for transfer in bound.transfers)
            print(f"communication: {traffic} in {taken:.4g} ms, of which a run may hide a part; not in these times")
