"""Recursions as CUDA kernels."""
