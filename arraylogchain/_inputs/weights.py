"""Checks of linear weights: that none is negative, where values can be read without waiting."""

from __future__ import annotations

import numpy as np

from arraylogchain._context import Array, Context
from arraylogchain._inputs.chain import Chain


def check_weights(ctx: Context, chain: Chain) -> None:
    """Raise where a linear weight is negative. On a device it gives NaN."""
    weights = (
        ("transitions", chain.transitions, chain.transitions_in_logs),
        ("initial", chain.initial, chain.initial_in_logs),
        ("final", chain.final, chain.final_in_logs),
    )
    for name, x, in_logs in weights:
        if x is None or in_logs:
            continue
        x = _on_host(ctx, x)
        # The minimum is NaN if there is one, and may be of what is past the ends.
        if x.size and not np.minimum.reduce(x, axis=None) >= 0:
            negative = np.any(x < 0, axis=(-2, -1)) if name == "transitions" else x < 0
            if name == "transitions" and chain.lengths is not None:
                moves = np.arange(1, negative.shape[-1] + 1)
                negative = negative & (chain.lengths[..., None] > moves)
            if np.any(negative):
                raise ValueError(
                    f"{name} has negative entries, and weights must be at least 0; pass logarithms "
                    f"as log_{name}"
                )


def _on_host(ctx: Context, x: Array) -> np.ndarray:
    """Return a NumPy array without waiting for a device, one without entries if that cannot be."""
    if not ctx.is_numpy:
        if str(ctx.device) != "cpu":
            return np.empty(0)
        # The one of torch's formats that NumPy lacks.
        x = x.float() if str(x.dtype) == "torch.bfloat16" else x
    return np.asarray(x)
