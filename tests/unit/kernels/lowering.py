"""Compiles the FP8 kernels for a GPU that need not be there, and prints what became of them.

A process of its own, because Triton's interpreter replaces the compiler when a kernel is defined.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from dtrain.kernels import float8, quantize

TYPES = {
    "rows": "*i64", "tiles": "*i32", "first": "i32", "count": "i32", "num_rows": "i32", "num_columns": "i32",
    "row_stride": "i32", "first_column": "i32", "x": "*bf16", "scale": "*fp32", "values": "*fp8e4nv",
    "transposed": "*fp8e4nv", "source": "*u8", "target": "*u8", "following": "*fp32", "factor": "fp32",
    "addend": "fp32", "is_fresh": "i32",
}  # fmt: skip
ALIGNED = {"num_rows", "num_columns", "row_stride", "first_column"}  # and all pointers
TILE = {"FIELDS": 9, "ALIGNED": True, "ROWS": float8._ROWS, "COLUMNS": float8._COLUMNS}
MATRIX = {"column_stride": 1, "BOTH": True, "ROWS": quantize._ROWS, "COLUMNS": quantize._COLUMNS}
E4M3 = {"DTYPE": tl.float8e4nv, "EXPONENT_OF_MAX": 8, "LIMIT": 448.0}


def cases() -> dict[str, tuple[Any, dict[str, Any], str]]:
    """Returns {name: (kernel, its constants, type of ``amax``)}."""
    found: dict[str, tuple[Any, dict[str, Any], str]] = {
        "transpose": (float8._transpose, {"FIELDS": 6, "ALIGNED": True, "SIDE": float8._SIDE}, ""),
        "scales": (float8._scales, {"DELAYED": True, "BLOCK": float8._BLOCK}, "*fp32"),
    }
    for recipe in ("tensorwise", "rowwise"):
        rowwise = {"ROWWISE": recipe == "rowwise"}
        found[f"measure {recipe}"] = (float8._measure, {**TILE, **rowwise}, "*i32")
        found[f"cast {recipe}"] = (float8._cast, {**TILE, **rowwise}, "*i32")
        found[f"activation measure {recipe}"] = (quantize._measure, {**MATRIX, **rowwise}, "*i32")
        found[f"activation cast {recipe}"] = (quantize._cast, {**MATRIX, **rowwise, **E4M3}, "*i32")
    return found


def lower(kernel: Any, constants: dict[str, Any], amax: str, capability: int) -> dict[str, Any]:
    """Returns the spilled bytes, the registers and the instructions of ``kernel``."""
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else {**TYPES, "amax": amax}[name] for name in names}
    aligned = [name for name in names if types[name].startswith("*") or name in ALIGNED]
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": float8._NUM_WARPS}
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.ptx").write_text(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"-arch=sm_{capability}{'a' * (capability >= 90)}"]
        command += [f"{folder}/kernel.ptx", "-o", f"{folder}/kernel.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "registers": max(map(int, re.findall(r"Used (\d+) registers", report))),
        "instructions": Counter(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][\w.:]*)\s", ptx, re.MULTILINE)),
    }


class _Driver:
    """The target that kernels ask for while they are compiled."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


def main(capability: int) -> None:
    driver.set_active(_Driver(capability))
    print(json.dumps({name: lower(*case, capability) for name, case in cases().items()}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
