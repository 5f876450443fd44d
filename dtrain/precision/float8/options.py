"""Options of FP8 matmuls, and the recipe that they resolve to on a device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dtrain.config.precision import Float8
from dtrain.errors import ConfigError
from dtrain.precision.float8.cast import E4M3, E5M2
from dtrain.precision.hardware import has_compiler, has_float8_tensor_cores, has_row_scales_on_cpu

_NUM_ROWS = 8192  # of a timed product, if neither the user nor a training run says it


def resolve_float8(options: Float8, device: torch.device) -> Float8:
    """Returns the options for ``device``, with every ``auto`` resolved.

    Raises:
        ConfigError: ``emulate=False`` or ``compile=True`` on a GPU without FP8 Tensor Cores, ``emulate=False`` rowwise
            on a CPU before PyTorch 2.13, or ``compile=True`` without a compiler.
    """
    has_float8 = has_float8_tensor_cores(device)
    if options.emulate is False and device.type == "cuda" and not has_float8:
        major, minor = torch.cuda.get_device_capability(device)
        raise ConfigError(
            f"float8 emulate=false needs FP8 Tensor Cores (compute capability 8.9 or later); "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}; use emulate=auto"
        )
    is_rowwise = options.recipe == "rowwise"
    if options.emulate is False and is_rowwise and device.type == "cpu" and not has_row_scales_on_cpu():
        raise ConfigError(
            f"float8 emulate=false with recipe=rowwise needs a torch._scaled_mm with one scale per row on CPUs, "
            f"which torch {torch.__version__} lacks; use emulate=auto"
        )
    # Triton casts to FP8 in hardware only
    can_compile = has_compiler(device) and (device.type != "cuda" or has_float8)
    if options.compile is True and not can_compile:
        raise ConfigError(
            f"float8 compile=true needs a C++ compiler, and on a GPU Triton and compute capability 8.9; {device} "
            f"lacks one of them; use compile=auto"
        )
    emulate = not has_float8 if options.emulate == "auto" else options.emulate
    grad_format = "e4m3" if is_rowwise else "e5m2"
    return replace(
        options,
        emulate=emulate,
        grad_format=grad_format if options.grad_format == "auto" else options.grad_format,
        choice=("all" if emulate else "timed") if options.choice == "auto" else options.choice,
        num_rows=options.num_rows or _NUM_ROWS,
        compile=device.type == "cuda" and can_compile if options.compile == "auto" else options.compile,
    )


@dataclass(frozen=True)
class Recipe:
    """Resolved options of every matmul of a ``dtrain.precision.float8.linear.Float8Linear``.

    Attributes:
        rowwise: whether each row has its own scale, instead of one scale per tensor.
        grad_dtype: E5M2 or E4M3, the format of the output gradient.
        out_dtype: dtype of the output and of both gradients.
        emulate: see ``dtrain.precision.float8.matmul.multiply``.
        fast_accumulation: affects the forward matmul only.
    """

    rowwise: bool = False
    grad_dtype: torch.dtype = E5M2
    out_dtype: torch.dtype = torch.bfloat16
    emulate: bool = True
    fast_accumulation: bool = False
    compile: bool = False

    @staticmethod
    def of(options: Float8, out_dtype: torch.dtype) -> Recipe:
        """Returns the recipe of resolved ``options`` (see ``resolve_float8``)."""
        assert isinstance(options.emulate, bool), options
        assert isinstance(options.compile, bool), options
        return Recipe(
            rowwise=options.recipe == "rowwise",
            grad_dtype={"e5m2": E5M2, "e4m3": E4M3}[options.grad_format],
            out_dtype=out_dtype,
            emulate=options.emulate,
            fast_accumulation=options.fast_accumulation,
            compile=options.compile,
        )

    def describe(self) -> str:
        """Returns a description such as ``tensorwise, E5M2 gradients, emulated``."""
        parts = [
            "rowwise" if self.rowwise else "tensorwise",
            f"{'E4M3' if self.grad_dtype == E4M3 else 'E5M2'} gradients",
        ]
        parts += ["emulated"] * self.emulate + ["fast accumulation"] * self.fast_accumulation
        return ", ".join(parts + ["compiled casts"] * self.compile)
