"""How FP8 products are formed, as a value."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dtrain.errors import ConfigError, nearest
from dtrain.precision.compiler import has_compiler
from dtrain.precision.float8.cast import E4M3, E5M2

CHOICES = {
    "recipe": ("tensorwise", "rowwise"),
    "weight_scale": ("current", "delayed"),
    "grad_format": ("auto", "e5m2", "e4m3"),
    "emulate": ("auto", True, False),
    "choice": ("auto", "timed", "all"),
    "compile": ("auto", True, False),
}


@dataclass(frozen=True)
class Float8Options:
    """How FP8 products are formed.

    Attributes:
        recipe: ``tensorwise``, one scale a tensor; ``rowwise``, one for each row of the left and each column of the
            right operand of a product.
        weight_scale: ``current``: from the weights that are cast; ``delayed``: from those of the step before, so that
            the update can cast in its own pass (tensorwise, native engine).
        grad_format: ``e5m2``, ``e4m3``; ``auto``: E5M2 tensorwise, E4M3 rowwise.
        emulate: compute in FP32 what ``torch._scaled_mm`` computes; ``auto``: where the device has no FP8 Tensor Cores.
        choice: which products are FP8: ``all`` that can be, or those that are ``timed`` faster than in BF16 on the
            device; ``auto``: timed where nothing is emulated.
        num_rows: rows (tokens of one micro-batch) of the products that are timed.
        fast_accumulation: let Hopper accumulate forward products in fewer bits than FP32 has.
        compile: compile the casts; ``auto``: on a GPU with FP8 Tensor Cores and a compiler.
    """

    recipe: str = "tensorwise"
    weight_scale: str = "current"
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
        if self.recipe == "rowwise" and self.weight_scale == "delayed":
            raise ConfigError(
                "float8 weight_scale=delayed needs recipe=tensorwise: a row has no scale of its own to keep"
            )

    def on(self, device: torch.device) -> Float8Options:
        """The options as ``device`` can honour them, with nothing left at ``auto``.

        Raises:
            ConfigError: no emulation, or compiled casts, on a GPU without FP8 Tensor Cores; compiled casts without a
                compiler.
        """
        has_float8 = has_tensor_cores(device)
        if self.emulate is False and device.type == "cuda" and not has_float8:
            major, minor = torch.cuda.get_device_capability(device)
            raise ConfigError(
                f"float8 emulate=false needs FP8 Tensor Cores (compute capability 8.9 or later); "
                f"{torch.cuda.get_device_name(device)} has {major}.{minor}; use emulate=auto"
            )
        can_compile = has_compiler(device) and (device.type != "cuda" or has_float8)  # Triton casts where hardware does
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


def has_tensor_cores(device: torch.device) -> bool:
    """Whether ``device`` multiplies FP8 matrices in hardware: Ada, Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@dataclass(frozen=True)
class Recipe:
    """What every product of a Float8Linear needs to know, with nothing left to decide.

    Attributes:
        rowwise: one scale a row, instead of one a tensor.
        grad_dtype: E5M2 or E4M3.
        out_dtype: of the output and of both gradients.
        emulate: see :func:`dtrain.precision.float8.matmul.multiply`.
        fast_accumulation: of the forward product only.
        compile: whether the casts are compiled.
    """

    rowwise: bool = False
    grad_dtype: torch.dtype = E5M2
    out_dtype: torch.dtype = torch.bfloat16
    emulate: bool = True
    fast_accumulation: bool = False
    compile: bool = False

    @staticmethod
    def of(options: Float8Options, out_dtype: torch.dtype) -> Recipe:
        """The recipe of ``options`` that are resolved, see :meth:`Float8Options.on`."""
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
        """For people: ``tensorwise, E5M2 gradients, emulated``."""
        parts = [
            "rowwise" if self.rowwise else "tensorwise",
            f"{'E4M3' if self.grad_dtype == E4M3 else 'E5M2'} gradients",
        ]
        parts += ["emulated"] * self.emulate + ["fast accumulation"] * self.fast_accumulation
        return ", ".join(parts + ["compiled casts"] * self.compile)
