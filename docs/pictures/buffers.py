"""Draws docs/pictures/buffers.png: the model states of a small transformer on two ranks at each ZeRO stage.

PYTHONPATH=. python docs/pictures/buffers.py

The layouts and the sizes are those of live engines on two ranks.
"""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import two_ranks
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

import dtrain
from dtrain.config.schema import ModelConfig
from dtrain.models import build_model
from dtrain.sharding.group import FlatBuffer
from dtrain.sharding.layout import CHUNK, FlatLayout

CONFIG = ModelConfig(num_layers=2, hidden_dim=40, num_heads=4, max_seq_len=32)
COLORS = {  # Okabe and Ito's, told apart with any colour vision
    "root/bfloat16": "#E69F00",
    "root/float32": "#CC79A7",
    "blocks.0/bfloat16": "#56B4E9",
    "blocks.1/bfloat16": "#009E73",
}


def inspect(rank: int) -> list[dict[str, Any]]:
    """Returns one record a stage of the model states on this rank."""
    records = []
    for stage in range(4):
        engine: Any = dtrain.initialize(build_model(CONFIG, 256, seed=0), zero_stage=stage, precision="bf16", seed=0)
        buffers = engine.sharded.buffers
        records.append(
            {
                "layouts": [_describe(buffer.layout) for buffer in buffers],
                "segments": [[buffer.layout.name, buffer.segment.start, buffer.segment.numel] for buffer in buffers],
                "compute": [interval for buffer in buffers for interval in _replica(buffer)],
                "main_grad": sum(tensor.numel() for tensor in engine.states.storages()["main_grad"]),
                "bytes": {**engine.memory(), "sum": sum(engine.memory_formula().values())},
            }
        )
    return records


def _replica(buffer: FlatBuffer) -> list[list[Any]]:
    """Returns (name, start in the flat buffer, elements) of what a rank holds of a replica beside its masters."""
    whole = buffer.replica.copies[0]
    return [
        [
            buffer.layout.name,
            (held.data_ptr() - whole.data_ptr()) // held.itemsize if whole.numel() else buffer.segment.start,
            held.numel(),
        ]
        for held in buffer.replica.persistent
    ]


def _describe(layout: FlatLayout) -> dict[str, Any]:
    return {
        "name": layout.name,
        "slots": [[slot.spec.name, slot.start, slot.stop] for slot in layout.slots],
        "real_numel": layout.real_numel,
        "numel": layout.numel,
        "shard_numel": layout.shard_numel,
    }


def _box(axes: Axes, x: float, y: float, width: float, height: float, color: str, padding: bool = False) -> None:
    style: dict[str, Any] = {"facecolor": "white", "hatch": "//////"} if padding else {"facecolor": color}
    axes.add_patch(Rectangle((x, y), width, height, edgecolor=color if padding else "black", linewidth=0.5, **style))


def draw_layouts(axes: Axes, layouts: list[dict[str, Any]]) -> None:
    """Draws one row a flat buffer: parameters in their slots, padding hatched, the border of the shards."""
    for row, layout in enumerate(reversed(layouts)):
        name, color = layout["name"], COLORS[layout["name"]]
        _box(axes, 0, row + 0.1, layout["numel"], 0.8, color, padding=True)
        for slot, start, stop in layout["slots"]:
            _box(axes, start, row + 0.1, stop - start, 0.8, color)
            if stop - start > 1500:
                short = slot.removeprefix(name.partition("/")[0] + ".").removesuffix(".weight")
                axes.text(start + 200, row + 0.5, short, va="center", fontsize=8)
        if name == "root/float32":
            axes.text(layout["numel"] + 200, row + 0.5, "five norms of 40, and padding", va="center", fontsize=8)
        axes.plot([layout["shard_numel"]] * 2, [row, row + 1], color="black", linewidth=2.2)
    axes.set_yticks([i + 0.5 for i in range(len(layouts))], [layout["name"] for layout in reversed(layouts)])
    axes.set_xticks(range(0, 23 * CHUNK, 2 * CHUNK), [str(i) for i in range(0, 23, 2)])
    axes.set(xlim=(0, 22.4 * CHUNK), ylim=(0, len(layouts)), xlabel="chunks of 1,024 elements")
    axes.set_title(
        "Flat buffers at 2 ranks: parameters, padding (hatched), the border between the shards (heavy line)",
        fontsize=10,
    )


KINDS = ("compute replicas (2 or 4 bytes)", "main grads (4)", "masters (4)", "first moments (4)", "second moments (4)")


def draw_rank(axes: Axes, record: dict[str, Any]) -> None:
    """Draws the states of one rank: width is elements, height is bytes an element, so area is memory."""
    layouts = {layout["name"]: layout for layout in record["layouts"]}
    starts, cursor = {}, 0
    for name, layout in layouts.items():
        starts[name] = cursor
        cursor += layout["numel"]
    whole = [(name, starts[name], layout["numel"]) for name, layout in layouts.items()]
    arena = [(name, starts[name] + start, numel) for name, start, numel in record["segments"]]
    compute = [(name, starts[name] + start, numel) for name, start, numel in record["compute"] if numel]
    rows = (compute, whole if record["main_grad"] == cursor else arena, arena, arena, arena)
    for kind, intervals in enumerate(rows):
        y = 4 - kind
        for _, start, numel in whole:
            outline = Rectangle((start, y + 0.08), numel, 0.84, facecolor="none", edgecolor="#bbbbbb", lw=0.5, ls=":")
            axes.add_patch(outline)
        for name, start, numel in intervals:
            height = 0.42 if kind == 0 and name.endswith("bfloat16") else 0.84
            _box(axes, start, y + 0.08, numel, height, COLORS[name])
    memory = record["bytes"]
    total = sum(memory[kind] for kind in ("compute", "main_grad", "master", "moments"))
    axes.set(xlim=(-500, cursor + 500), ylim=(-0.05, 5.05), xticks=[], yticks=[])
    axes.set_xlabel(f"{total / 2**10:,.0f} KiB; formula {memory['sum'] / 2**10:,.0f}", fontsize=8.5)


def main() -> None:
    ranks = two_ranks.run(inspect)
    figure = plt.figure(figsize=(10, 8.2), dpi=130, layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[2.1, 4])
    draw_layouts(top.subplots(), ranks[0][0]["layouts"])
    grid = bottom.subplots(2, 4, squeeze=False)
    for rank, stages in enumerate(ranks):
        for stage, record in enumerate(stages):
            draw_rank(grid[rank][stage], record)
            if rank == 0:
                grid[rank][stage].set_title(f"stage {stage}", fontsize=10)
        grid[rank][0].set_yticks([4.5 - kind for kind in range(5)], KINDS, fontsize=8)
        grid[rank][0].set_ylabel(f"rank {rank}", fontsize=10)
    handles = [Patch(facecolor=color, edgecolor="black", label=name) for name, color in COLORS.items()]
    bottom.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    bottom.suptitle(
        "Model states of a rank between steps; area is bytes; dotted: not on this rank, or the masters' own storage",
        fontsize=10,
    )
    two_ranks.save(figure, "buffers.png")


if __name__ == "__main__":
    main()
