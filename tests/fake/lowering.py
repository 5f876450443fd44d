"""Compiles Triton kernels for compute capability 9.0 without a device: registers, spills, PTX.

Run as a module it compiles every kernel that engines launch on the fake device, in the variants in which they launch
them, and prints one line of JSON for each.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dtrain.precision.float8.options import Float8Options
from tests.fake.harness import fake_engine
from tests.fake.launches import Argument, Launch

CAPABILITY = 90

ENGINES: list[tuple[int, dict[str, Any]]] = [
    (1, {"precision": "bf16", "zero_stage": 2}),
    (1, {"precision": "bf16", "zero_stage": 2, "reproducible": True, "max_grad_norm": None}),
    (8, {"precision": "fp16", "zero_stage": 2}),
    (8, {"precision": "fp8", "zero_stage": 3}),
    *(
        (1, {"precision": "fp8", "float8": float8})
        for float8 in (Float8Options("rowwise", choice="all"), Float8Options("tensorwise", "delayed", choice="all"))
    ),
]
"""Ranks and options of the engines whose kernels are compiled."""


@dataclass(frozen=True)
class Lowered:
    """One variant of a kernel as code for the device.

    Attributes:
        registers: of a thread.
        spills: bytes that a thread stores to memory for want of registers.
        shared: bytes of shared memory of a program.
        vector_loads: loads of 16 bytes in its code.
    """

    kernel: str
    signature: str
    registers: int
    spills: int
    shared: int
    vector_loads: int
    ptx: str = field(default="", repr=False)


def lower(function: Any, arguments: Sequence[Argument], options: Mapping[str, Any]) -> Lowered:
    """Compiles the ``@triton.jit`` function ``function`` for ``arguments``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {argument.name: argument.type for argument in arguments}
    constants = {(n,): argument.value for n, argument in enumerate(arguments) if argument.type == "constexpr"}
    hints = {(n,): [["tt.divisibility", 16]] for n, argument in enumerate(arguments) if argument.is_aligned}
    source = ASTSource(function, signature, constants, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=dict(options))
    ptx = compiled.asm["ptx"]
    registers, spills = _resources(ptx)
    types = ", ".join(a.type + "*" * a.is_aligned for a in arguments if a.type != "constexpr")
    vectors = len(re.findall(r"ld\.global\S*\.v(?:4\.[bf]32|2\.[bf]64)", ptx))
    return Lowered(function.fn.__name__, types, registers, spills, compiled.metadata.shared, vectors, ptx)


def _resources(ptx: str) -> tuple[int, int]:
    """Returns the registers and bytes of spills that the assembler reports."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        target = ["--gpu-name", "sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))]
        assembler = triton.knobs.nvidia.ptxas.path
        report = subprocess.run([assembler, "-v", *target], capture_output=True, text=True, check=True).stderr
    stores, loads = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)[:2]
    found = re.search(r"Used (\d+) registers", report)
    assert found is not None, report
    return int(found.group(1)), int(stores) + int(loads)


def engine_launches() -> list[Launch]:
    """Returns one launch of each variant that the engines compile, in their order."""
    found: dict[Any, Launch] = {}
    for ranks, options in ENGINES:
        deterministic = torch.are_deterministic_algorithms_enabled()
        with fake_engine(ranks, **options) as rank:
            rank.step()
            found |= {launch.variant: launch for launch in reversed(rank.launches)}
        torch.use_deterministic_algorithms(deterministic)
    return list(found.values())


def main() -> None:
    """Prints what each variant needs; with the argument ``planted``, what a kernel needs that spills."""
    if sys.argv[1:] == ["planted"]:
        from tests.fake.planted_kernel import spilling

        arguments = (Argument("source", "*fp32"), Argument("target", "*fp32"), Argument("SIZE", "constexpr", 4096))
        launches = [Launch("spilling", 1, arguments, (("num_warps", 1),), spilling)]
    else:
        launches = engine_launches()
    for launch in launches:
        lowered = lower(launch.function, launch.arguments, dict(launch.options))
        print(json.dumps({name: value for name, value in asdict(lowered).items() if name != "ptx"}), flush=True)


if __name__ == "__main__":
    main()
