"""Checks of how long the rows of a chain are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arraylogchain._arrays import on_host
from arraylogchain._context import Array, Context
from arraylogchain._fold import Shape


def check_lengths(
    lengths: Array | Sequence[int] | int | None, batch: Shape, num_steps: int
) -> np.ndarray | None:
    """Return lengths [...] as a NumPy array; None if all chains have `num_steps` steps.

    The cost of everything depends on them, so that they are read on the host.
    """
    if lengths is None:
        return None
    found = on_host("lengths", lengths)
    if found.dtype == bool:
        raise TypeError(
            "lengths has dtype bool; it must hold integers, and mask.sum(-1) makes them of a mask"
        )
    check_integers("lengths", found.dtype)
    if found.shape != batch[len(batch) - found.ndim :] or found.ndim > len(batch):
        try:
            fits = np.broadcast_shapes(found.shape, batch) == batch
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"lengths has shape {found.shape}; it must broadcast to the batch axes {batch}: "
                f"an integer from 1 to T = {num_steps} for each chain"
            )
    if found.size and not (found.min() >= 1 and found.max() <= num_steps):
        raise ValueError(
            f"lengths has values from {found.min()} to {found.max()}; they must lie between 1 and "
            f"{num_steps}, the number of steps of log_potentials"
        )
    return None if np.all(found == num_steps) else found.astype(np.int64)


def fill_past_ends(ctx: Context, x: Array, lengths: np.ndarray | None, value: int) -> Array:
    """Return x [..., T] with a value in the place of what lies past the ends of rows."""
    if lengths is None:
        return x
    times = ctx.xp.arange(x.shape[-1], dtype=ctx.index_dtype, device=ctx.device)
    real = ctx.integers(lengths)[..., None] > times
    return ctx.xp.where(real, x, ctx.xp.full_like(x, value))


def check_integers(name: str, dtype: object) -> None:
    kind = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    if not kind.startswith(("int", "uint")):
        raise TypeError(f"{name} has dtype {kind}; it must hold integers")
