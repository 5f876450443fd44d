"""Recomputation and compilation of a model's blocks."""
