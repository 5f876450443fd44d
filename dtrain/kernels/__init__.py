"""Hand-written Triton kernels: one launch over any number of tensors.

Importing a module of this package imports Triton, so engines do it only on a GPU.
"""
