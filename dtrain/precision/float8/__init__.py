"""FP8 products: scales, casts, ``scaled_mm`` and its emulation, and the Linear that computes with them."""
