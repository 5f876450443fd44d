"""Kernels and bytes of a Llama block in each FP8 recipe, as Inductor writes it for compute capability 9.0, not run.

Run: ``python -m tests.measure.fused_casts``. It prints a table for 4,096 tokens, width 2,048 and 5,632 inner features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.precision.float8.cast import E4M3
from dtrain.precision.float8.linear import Float8Linear, convert
from dtrain.precision.float8.options import PRODUCTS, Recipe
from dtrain.precision.float8.weights import Cache, QuantizedWeight
from tests.fake.device import DEVICE
from tests.helpers.inductor_code import Kernel, triton_code

TOKENS, DIM, INNER, HEADS = 4096, 2048, 5632, 16
BEFORE = 6
"""Bytes an element of a cast that the compiler does not see: measure, read again, write in both orders."""
IN_BLOCKS = 4
"""The same of lines of 128, which one kernel reads once."""


class LlamaBlock(nn.Module):
    """As transformers has it: q, k, v and gate, up are Linears of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.gate, self.up = (nn.Linear(DIM, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (part(y).view(1, TOKENS, HEADS, -1).transpose(1, 2) for part in self.qkv)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def kernels_of(recipe: str) -> list[Kernel]:
    """Returns the kernels of the block in BF16 (``bf16``), or in an FP8 recipe with E4M3 gradients."""
    with torch.device("meta"):
        block = LlamaBlock().bfloat16()
    if recipe != "bf16":
        products = PRODUCTS[: 2 if recipe == "rowwise_bf16_wgrad" else 3]
        options = Recipe(recipe, E4M3, emulate=False, compile=True, products=products)
        for linear in [module for module in block.modules() if type(module) is nn.Linear]:
            convert(linear, options, QuantizedWeight(options, Cache.UNTIL_WRITTEN))

    def inputs() -> list[Tensor]:
        for module in block.modules():
            for name, weight in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device=DEVICE)))
            if isinstance(module, Float8Linear):
                module.quantized_weight.key = torch.zeros((), dtype=torch.int64, device="cpu")
        return [torch.empty(1, TOKENS, DIM, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)]

    return triton_code(block, inputs)


def is_avoidable(kernel: Kernel) -> bool:
    """Whether a kernel casts alone what another generated kernel has made."""
    matrix = max(kernel.reads, key=lambda access: access.nbytes)
    by_attention = any("scaled_dot_product" in maker for maker in matrix.makers)
    return kernel.only_casts and bool(matrix.makers) and not by_attention


@dataclass(frozen=True)
class Counts:
    """Kernels and MiB of one pass of a block; ``casting`` ones only cast, for ``avoidable`` see ``is_avoidable``."""

    kernels: int
    mib: float
    casting: int
    avoidable: int


def count(kernels: list[Kernel], phase: str) -> Counts:
    own = [kernel for kernel in kernels if kernel.phase == phase]
    mib = sum(kernel.num_bytes for kernel in own) / 2**20
    return Counts(len(own), mib, sum(kernel.only_casts for kernel in own), sum(map(is_avoidable, own)))


def opaque_mib(recipe: str) -> dict[str, float]:
    """Returns the MiB of casts that the compiler does not see, by pass: as before for ``before``, else of blocks."""
    inputs = {"before": (6 * DIM + INNER), "blockwise": 3 * DIM + INNER}.get(recipe, 0)  # blocks: one for each input
    gradients = 5 * DIM + 2 * INNER if inputs else 0
    each = (BEFORE if recipe == "before" else IN_BLOCKS) * TOKENS / 2**20
    return {"forward": each * inputs, "backward": each * gradients}


def main() -> None:
    print("| recipe | forward: kernels | MiB | only cast | backward: kernels | MiB | only cast | MiB in all |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in ("bf16", "before", "tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise"):
        kernels, others = kernels_of("bf16" if name == "before" else name), opaque_mib(name)
        passes = [(count(kernels, phase), others[phase]) for phase in ("forward", "backward")]
        cells = [f"{one.kernels} | {one.mib + mib:.0f} | {one.casting}" for one, mib in passes]
        print(f"| {name} | {' | '.join(cells)} | {sum(one.mib + mib for one, mib in passes):.0f} |")


if __name__ == "__main__":
    main()
