"""Integers that callers give: lengths of rows, and states of paths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arraylogchain._arrays import on_host
from arraylogchain._context import Array, Context
from arraylogchain._fold import Shape, check_batches
from arraylogchain._inputs.chain import Chain


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
                f"lengths has shape {found.shape}; it must broadcast to the batch axes {batch}"
            )
    if found.size and not (found.min() >= 1 and found.max() <= num_steps):
        raise ValueError(
            f"lengths has values from {found.min()} to {found.max()}; they must lie between 1 and "
            f"{num_steps}, the number of steps of log_potentials"
        )
    return None if np.all(found == num_steps) else found.astype(np.int64)


def check_states(ctx: Context, states: Array, chain: Chain) -> Array:
    """Return paths [..., T] in the library that computes, 0 past the ends of their chains."""
    if ctx.xp.__name__.endswith("numpy") or isinstance(states, (np.ndarray, Sequence)):
        path = ctx.xp.asarray(on_host("states", states), device=ctx.device)
    else:
        path = states
    check_integers("states", path.dtype)
    check_path_shape(tuple(path.shape), chain.batch, chain.num_steps)
    path = ctx.xp.astype(path, ctx.index_dtype, copy=False)
    if chain.lengths is not None:
        lengths = ctx.integers(chain.lengths)
        times = ctx.xp.arange(chain.num_steps, dtype=ctx.index_dtype, device=ctx.device)
        real = lengths[..., None] > times
        path = ctx.xp.where(real, path, ctx.xp.zeros_like(path))
    if 0 not in path.shape:
        check_range(int(ctx.xp.min(path)), int(ctx.xp.max(path)), chain.num_states)
    return path


def check_integers(name: str, dtype: object) -> None:
    kind = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    if not kind.startswith(("int", "uint")):
        raise TypeError(f"{name} has dtype {kind}; it must hold integers")


def check_path_shape(shape: Shape, batch: Shape, num_steps: int) -> None:
    if not shape or shape[-1] != num_steps:
        raise ValueError(
            f"states has shape {shape}; it must be [..., {num_steps}], a state for each step"
        )
    check_batches({"states": shape[:-1], "the chain": batch}, {"states": shape, "the chain": batch})


def check_range(least: int, most: int, num_states: int) -> None:
    if least < 0 or most >= num_states:
        raise ValueError(
            f"states has values from {least} to {most}; they must lie between 0 and "
            f"{num_states - 1}"
        )
