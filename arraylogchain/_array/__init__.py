"""Implementations in array operations, which run everywhere and define what is right."""
