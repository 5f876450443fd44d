"""Compiles Triton kernels for a GPU that need not be there: registers, spills, instructions.

``python -m tests.measure.lowering 90`` compiles every kernel that engines launch on the fake device for compute
capability 9.0, in the variants in which they launch them, and prints one line of JSON for each.
``80:adamw,decide 90`` compiles two kernels for 8.0 and every one for 9.0.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dtrain.config.precision import Float8
from tests.fake.harness import fake_engine
from tests.fake.launches import Argument, Launch

ENGINES: list[tuple[int, dict[str, Any]]] = [
    (1, {"precision": "bf16", "zero_stage": 2}),
    (1, {"precision": "bf16", "zero_stage": 2, "reproducible": True, "max_grad_norm": None, "ema_decay": 0.9}),
    (8, {"precision": "fp16", "zero_stage": 2}),
    (8, {"precision": "fp8", "zero_stage": 3}),
    (1, {"precision": "fp8", "float8": Float8("rowwise", choice="all")}),
    (8, {"precision": "bf16", "zero_stage": 2, "master": "remainder", "grad_dtype": "bf16"}),
]
"""Ranks and options of the engines whose kernels are compiled."""


def lower(function: Any, arguments: Sequence[Argument], options: Mapping[str, Any], capability: int) -> dict[str, Any]:
    """Compiles the ``@triton.jit`` function ``function``; returns what a thread needs, and the instructions of its PTX.

    Spills are bytes that it moves to and from memory for want of registers.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime import driver

    target = GPUTarget("cuda", capability, 32)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))  # of the device that a kernel asks for
    signature = {argument.name: argument.type for argument in arguments}
    constants = {(n,): argument.value for n, argument in enumerate(arguments) if argument.type == "constexpr"}
    hints = {(n,): [["tt.divisibility", 16]] for n, argument in enumerate(arguments) if argument.is_aligned}
    source = ASTSource(function, signature, constants, hints)
    ptx = triton.compile(source, target=target, options=dict(options)).asm["ptx"]
    registers, spills = _resources(ptx, capability)
    types = ", ".join(a.type + "*" * a.is_aligned for a in arguments if a.type != "constexpr")
    instructions = dict(Counter(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][\w.:]*)\s", ptx, re.MULTILINE)))
    found = {"capability": capability, "kernel": function.fn.__name__, "signature": types}
    return {**found, "registers": registers, "spills": spills, "instructions": instructions}


def _resources(ptx: str, capability: int) -> tuple[int, int]:
    """Returns the registers and bytes of spills that the assembler reports."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        target = f"-arch=sm_{capability}{'a' * (capability >= 90)}"
        command = [triton.knobs.nvidia.ptxas.path, "-v", target, str(source), "-o", str(source.with_suffix(".cubin"))]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.search(r"Used (\d+) registers", report)
    assert found is not None, report
    return int(found.group(1)), sum(map(int, re.findall(r"(\d+) bytes spill", report)))


def engine_launches(*, float8: bool) -> list[Launch]:
    """Returns one launch of each variant that the engines compile, in their order; ``float8``: FP8 engines too."""
    found: dict[Any, Launch] = {}
    for number, (_, options) in enumerate(ENGINES):
        if float8 or options["precision"] != "fp8":
            found |= _launches_of(number)
    return list(found.values())


@cache
def _launches_of(number: int) -> dict[Any, Launch]:
    ranks, options = ENGINES[number]
    deterministic = torch.are_deterministic_algorithms_enabled()
    with fake_engine(ranks, **options) as rank:
        rank.step()
        found = {launch.variant: launch for launch in reversed(rank.launches)}
    torch.use_deterministic_algorithms(deterministic)
    return found


def main() -> None:
    """Prints what each variant needs, of the kernels named, or of all; ``spilling`` is one that spills."""
    for request in sys.argv[1:]:
        capability, _, names = request.partition(":")
        for launch in _chosen(int(capability), names.split(",") if names else []):
            lowered = lower(launch.function, launch.arguments, dict(launch.options), int(capability))
            print(json.dumps(lowered), flush=True)


def _chosen(capability: int, names: Sequence[str]) -> list[Launch]:
    if "spilling" in names:
        from tests.fake.planted_kernel import spilling

        arguments = (Argument("source", "*fp32"), Argument("target", "*fp32"), Argument("SIZE", "constexpr", 4096))
        return [Launch("spilling", 1, arguments, (("num_warps", 1),), spilling)]
    return [launch for launch in engine_launches(float8=capability >= 89) if not names or launch.kernel in names]


if __name__ == "__main__":
    main()
