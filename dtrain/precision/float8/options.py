"""Options of FP8 matmuls, and the recipe that they resolve to on a device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dtrain.config.precision import Float8
from dtrain.device import cublaslt_version
from dtrain.errors import ConfigError
from dtrain.precision.float8.cast import BLOCK, E4M3, E5M2, Scaling
from dtrain.precision.float8.matmul import ALIGNMENT
from dtrain.precision.hardware import has_compiler, has_float8_tensor_cores, has_row_scales_on_cpu

_NUM_ROWS = 8192  # of a timed product, if neither the user nor a training run says it


def resolve_float8(options: Float8, device: torch.device) -> Float8:
    """Returns the options for ``device``, with every ``auto`` resolved.

    Raises:
        ConfigError: ``emulate=False`` or ``compile=True`` on a GPU without FP8 Tensor Cores, a recipe that the device
            or its libraries cannot multiply, options that the recipe does not have, or ``compile=True`` without a
            compiler.
    """
    has_float8 = has_float8_tensor_cores(device)
    if options.emulate is False and device.type == "cuda" and not has_float8:
        major, minor = torch.cuda.get_device_capability(device)
        raise ConfigError(
            f"float8 emulate=false needs FP8 Tensor Cores (compute capability 8.9 or later); "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}; use emulate=auto"
        )
    in_blocks = _SCALINGS[options.recipe].in_blocks
    others = ["grad_format=e5m2"] * (options.grad_format == "e5m2")
    others += ["fast_accumulation=true"] * options.fast_accumulation
    if in_blocks and others:
        raise ConfigError(
            f"float8 recipe=blockwise multiplies E4M3 by E4M3 and adds in FP32; leave out {' and '.join(others)}, or "
            "use recipe=tensorwise"
        )
    emulate = not has_float8 if options.emulate == "auto" else options.emulate
    if not emulate:
        _check_products(options.recipe, device)
    can_compile = has_float8 and has_compiler(device)  # Triton casts to FP8 in hardware only
    if options.compile is True and not can_compile:
        raise ConfigError(
            f"float8 compile=true casts by Triton kernels, which need a GPU of compute capability 8.9 or later and a C "
            f"compiler; {device} lacks one of them; use compile=auto"
        )
    grad_format = "e5m2" if options.recipe == "tensorwise" else "e4m3"
    return replace(
        options,
        emulate=emulate,
        grad_format=grad_format if options.grad_format == "auto" else options.grad_format,
        choice=("all" if emulate else "timed") if options.choice == "auto" else options.choice,
        num_rows=options.num_rows or _NUM_ROWS,
        compile=can_compile if options.compile == "auto" else options.compile,
    )


def _check_products(recipe: str, device: torch.device) -> None:
    """Raises ``ConfigError`` if ``device`` cannot multiply in ``recipe``."""
    scaling, needs = _SCALINGS[recipe], f"float8 recipe={recipe} needs"
    if device.type == "cpu" and scaling is Scaling.ROWS and not has_row_scales_on_cpu():
        lacks = f"which torch {torch.__version__} lacks"
        raise ConfigError(f"{needs} a scaled_mm with one scale per row on CPUs, {lacks}; use emulate=auto")
    if device.type == "cpu" or not scaling.in_blocks:
        return  # a plan for a GPU runs on fake tensors of a CPU, blocks too
    name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        raise ConfigError(
            f"{needs} compute capability 9.0 (H100, H200); {name} has {major}.{minor}; use recipe=rowwise"
        )
    version = cublaslt_version()
    if version is not None and tuple(map(int, version.split("."))) < (12, 9):
        raise ConfigError(
            f"{needs} cublasLt 12.9 or later; torch {torch.__version__} runs with {version}; install the wheel of CUDA "
            f"13.0 (cu130), not those of 12.6 or 12.8, or use recipe=rowwise"
        )


PRODUCTS = ("fprop", "dgrad", "wgrad")
"""The products of a Linear: its output, and the gradients of its input and of its weight."""

_SCALINGS = {
    "tensorwise": Scaling.TENSOR,
    "rowwise": Scaling.ROWS,
    "rowwise_bf16_wgrad": Scaling.ROWS,
    "blockwise": Scaling.LINES,
}
_by_key: dict[str, Recipe] = {}


@dataclass(frozen=True)
class Recipe:
    """Resolved options of the matmuls of a ``dtrain.precision.float8.linear.Float8Linear``.

    Attributes:
        name: ``precision.float8.recipe``.
        grad_dtype: E5M2 or E4M3, the format of the output gradient.
        out_dtype: dtype of the output and of both gradients.
        emulate: see ``dtrain.precision.float8.matmul.multiply``.
        fast_accumulation: affects the forward matmul only.
        products: those of ``PRODUCTS`` that are FP8; the others multiply in ``out_dtype``.
    """

    name: str = "tensorwise"
    grad_dtype: torch.dtype = E5M2
    out_dtype: torch.dtype = torch.bfloat16
    emulate: bool = True
    fast_accumulation: bool = False
    compile: bool = False
    products: tuple[str, ...] = PRODUCTS

    @staticmethod
    def of(options: Float8, out_dtype: torch.dtype) -> Recipe:
        """Returns the recipe of resolved ``options`` (see ``resolve_float8``)."""
        assert isinstance(options.emulate, bool), options
        assert isinstance(options.compile, bool), options
        return Recipe(
            name=options.recipe,
            grad_dtype={"e5m2": E5M2, "e4m3": E4M3}[options.grad_format],
            out_dtype=out_dtype,
            emulate=options.emulate,
            fast_accumulation=options.fast_accumulation,
            compile=options.compile,
            products=PRODUCTS[:2] if options.recipe == "rowwise_bf16_wgrad" else PRODUCTS,
        )

    @property
    def key(self) -> str:
        """A constant for graphs of compiled code, by which ``of_key`` returns the recipe."""
        _by_key.setdefault(repr(self), self)
        return repr(self)

    @staticmethod
    def of_key(key: str) -> Recipe:
        """Returns the recipe of that ``key``."""
        return _by_key[key]

    @property
    def scaling(self) -> Scaling:
        """Which elements of an input or a gradient share a scale."""
        return _SCALINGS[self.name]

    @property
    def weight_scaling(self) -> Scaling:
        """Which elements of a weight share a scale."""
        return Scaling.SQUARES if self.scaling.in_blocks else self.scaling

    @property
    def alignment(self) -> int:
        """Number whose multiples the dimensions of products are padded to, as Tensor Cores take them."""
        return BLOCK if self.scaling.in_blocks else ALIGNMENT

    def describe(self) -> str:
        """Returns a description such as ``tensorwise, E5M2 gradients, emulated``."""
        parts = [self.name, f"{'E4M3' if self.grad_dtype == E4M3 else 'E5M2'} gradients"]
        parts += ["emulated"] * self.emulate + ["fast accumulation"] * self.fast_accumulation
        return ", ".join(parts + ["casts by kernels"] * self.compile)
