"""Recursions as loops that Numba compiles."""
