"""Chains by kernels: the recursion over time, and sums over pairs of neighbouring states."""
