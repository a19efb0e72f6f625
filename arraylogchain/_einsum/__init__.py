"""Equations of einsum, and their evaluation in pairs of operands."""
