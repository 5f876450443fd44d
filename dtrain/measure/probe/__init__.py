"""Tells what low precision does to a model, and what to choose."""
