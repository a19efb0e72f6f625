"""Recursions over time: their interface; array operations, compiled loops and kernels."""
