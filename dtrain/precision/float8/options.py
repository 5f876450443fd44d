"""Options of FP8 matmuls, and the recipe that they resolve to on a device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dtrain.errors import ConfigError, nearest
from dtrain.precision.float8.cast import E4M3, E5M2
from dtrain.precision.hardware import has_compiler, has_float8_tensor_cores, has_row_scales_on_cpu

CHOICES = {
    "recipe": ("tensorwise", "rowwise"),
    "grad_format": ("auto", "e5m2", "e4m3"),
    "emulate": ("auto", True, False),
    "choice": ("auto", "timed", "all"),
    "compile": ("auto", True, False),
}


@dataclass(frozen=True)
class Float8Options:
    """Options of FP8 matmuls.

    Attributes:
        recipe: ``tensorwise`` (one scale per tensor) or ``rowwise`` (one scale per row of the left operand and per
            column of the right operand).
        grad_format: ``e5m2``, ``e4m3``, or ``auto`` (E5M2 tensorwise, E4M3 rowwise).
        emulate: whether to compute the results of ``torch._scaled_mm`` in FP32. ``auto`` emulates on devices without
            FP8 Tensor Cores.
        choice: which Linears are FP8: ``all`` that can be, or those that are ``timed`` faster than BF16 on the device.
            ``auto`` times unless FP8 is emulated.
        num_rows: rows (tokens of one micro-batch) of the timed matmuls.
        fast_accumulation: whether Hopper may accumulate forward matmuls in fewer bits than FP32 has.
        compile: whether to compile the casts. ``auto`` compiles on a GPU with FP8 Tensor Cores and a compiler.
    """

    recipe: str = "tensorwise"
    grad_format: str = "auto"
    emulate: bool | str = "auto"
    choice: str = "auto"
    num_rows: int = 8192
    fast_accumulation: bool = False
    compile: bool | str = "auto"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                hint = nearest(value, [c for c in choices if isinstance(c, str)]) if isinstance(value, str) else ""
                raise ConfigError(f"float8 {name} must be one of {', '.join(map(str, choices))}; got {value!r}{hint}")
        if self.num_rows < 1:
            raise ConfigError(f"float8 num_rows must be at least 1; got {self.num_rows}")

    def on(self, device: torch.device) -> Float8Options:
        """Returns the options for ``device``, with every ``auto`` resolved.

        Raises:
            ConfigError: ``emulate=False`` or ``compile=True`` on a GPU without FP8 Tensor Cores, ``emulate=False``
                rowwise on a CPU before PyTorch 2.13, or ``compile=True`` without a compiler.
        """
        has_float8 = has_float8_tensor_cores(device)
        if self.emulate is False and device.type == "cuda" and not has_float8:
            major, minor = torch.cuda.get_device_capability(device)
            raise ConfigError(
                f"float8 emulate=false needs FP8 Tensor Cores (compute capability 8.9 or later); "
                f"{torch.cuda.get_device_name(device)} has {major}.{minor}; use emulate=auto"
            )
        if self.emulate is False and device.type == "cpu" and self.recipe == "rowwise" and not has_row_scales_on_cpu():
            raise ConfigError(
                f"float8 emulate=false with recipe=rowwise needs a torch._scaled_mm with one scale per row on CPUs, "
                f"which torch {torch.__version__} lacks; use emulate=auto"
            )
        # Triton casts to FP8 in hardware only
        can_compile = has_compiler(device) and (device.type != "cuda" or has_float8)
        if self.compile is True and not can_compile:
            raise ConfigError(
                f"float8 compile=true needs a C++ compiler, and on a GPU Triton and compute capability 8.9; {device} "
                f"lacks one of them; use compile=auto"
            )
        emulate = not has_float8 if self.emulate == "auto" else self.emulate
        grad_format = "e4m3" if self.recipe == "rowwise" else "e5m2"
        return replace(
            self,
            emulate=emulate,
            grad_format=grad_format if self.grad_format == "auto" else self.grad_format,
            choice=("all" if emulate else "timed") if self.choice == "auto" else self.choice,
            compile=device.type == "cuda" and can_compile if self.compile == "auto" else self.compile,
        )


@dataclass(frozen=True)
class Recipe:
    """Resolved options of every matmul of a :class:`~dtrain.precision.float8.linear.Float8Linear`.

    Attributes:
        rowwise: whether each row has its own scale, instead of one scale per tensor.
        grad_dtype: E5M2 or E4M3, the format of the output gradient.
        out_dtype: dtype of the output and of both gradients.
        emulate: see :func:`dtrain.precision.float8.matmul.multiply`.
        fast_accumulation: affects the forward matmul only.
    """

    rowwise: bool = False
    grad_dtype: torch.dtype = E5M2
    out_dtype: torch.dtype = torch.bfloat16
    emulate: bool = True
    fast_accumulation: bool = False
    compile: bool = False

    @staticmethod
    def of(options: Float8Options, out_dtype: torch.dtype) -> Recipe:
        """Returns the recipe of resolved ``options`` (see :meth:`Float8Options.on`)."""
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
