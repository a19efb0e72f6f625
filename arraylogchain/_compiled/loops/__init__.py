"""Loops over steps of chains. Numba finds out the types of what it compiles: none are written."""
