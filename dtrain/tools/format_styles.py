"""Color, dash and line width of each format, the same in every picture."""

from __future__ import annotations

from dtrain.precision.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32

# The palette of Okabe and Ito, which color-blind readers can distinguish.
# TF32 and FP16 have the same error where their ranges overlap: the wide line stays visible behind the dashed one
STYLES = {
    FP32: ("#0072B2", "-", 1.8),
    TF32: ("#56B4E9", "-", 5.0),
    BF16: ("#009E73", "-", 1.8),
    FP16: ("#D55E00", "--", 1.8),
    FP8_E4M3: ("#CC79A7", "-", 1.8),
    FP8_E5M2: ("#E69F00", "-.", 1.8),
}
GREY = "#7f7f7f"
PRECISION_COLORS = {
    "fp32": STYLES[FP32][0],
    "tf32": STYLES[TF32][0],
    "bf16": STYLES[BF16][0],
    "fp16": STYLES[FP16][0],
    "fp8": STYLES[FP8_E4M3][0],
}
"""Color of a model that computes in ``precision=NAME``."""
