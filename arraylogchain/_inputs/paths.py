"""Checks of the states of given paths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arraylogchain._arrays import on_host
from arraylogchain._context import Array, Context
from arraylogchain._fold import Shape, check_batches
from arraylogchain._inputs.chain import Chain
from arraylogchain._inputs.lengths import check_integers, fill_past_ends


def check_states(ctx: Context, states: Array, chain: Chain) -> Array:
    """Return paths [..., T] in the library that computes, 0 past the ends of their chains."""
    if ctx.is_numpy or isinstance(states, (np.ndarray, Sequence)):
        path = ctx.xp.asarray(on_host("states", states), device=ctx.device)
    else:
        path = states
    check_integers("states", path.dtype)
    check_path_shape(tuple(path.shape), chain.batch, chain.num_steps)
    path = ctx.xp.astype(path, ctx.index_dtype, copy=False)
    path = fill_past_ends(ctx, path, chain.lengths, 0)
    if 0 not in path.shape:
        check_range(int(ctx.xp.min(path)), int(ctx.xp.max(path)), chain.num_states)
    return path


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
