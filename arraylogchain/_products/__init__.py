"""Products of matrices, and of logarithms."""
