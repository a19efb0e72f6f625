"""Operators of torch for exported programs: importing this module registers them."""

import arraylogchain._torch.operators  # noqa: F401

__all__: list[str] = []
