"""FP8 products: scales, casts, ``torch._scaled_mm`` and its emulation, and the Linear that computes with them."""
