"""Runs the Triton kernels on the GPU, or, where there is none, in Triton's interpreter on CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(autouse=True)
def _float_conversions_of_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """Converts as the hardware does: the interpreter truncates to BF16, and rounds ties away from even to FP8."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    import numpy as np

    by_name = {
        "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
        "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2,
    }  # fmt: skip
    limits = {dtype: torch.finfo(dtype).max for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
    integers = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

    def convert(values: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        source, target = by_name[str(input_dtype)], by_name[str(output_dtype)]
        bits = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8).reshape(-1))
        floats = bits.view(source).float()
        if target in limits:  # cvt.rn.satfinite
            floats = floats.clamp(-limits[target], limits[target])
        out = floats.to(target).view(torch.uint8).numpy().view(integers[target.itemsize])
        return out.reshape(values.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
