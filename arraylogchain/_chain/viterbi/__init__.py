"""Paths of largest weight."""
