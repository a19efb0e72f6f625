"""Foundations: array namespaces, precisions, scaled numbers, axes, threads, units."""
