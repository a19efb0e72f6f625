"""Leaves: what knows of arrays, numbers and threads, and of no chain and no product."""
