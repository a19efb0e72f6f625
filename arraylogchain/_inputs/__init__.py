"""Validation of the caller's arrays, and their conversion for computation."""
