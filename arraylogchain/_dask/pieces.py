"""Chunks of time as chains in memory, with messages from both sides; called by workers.

A message is an array [..., K + 2] in float64: logs, of which the largest is 0; the log that they
are relative to; and how large they were before they were made relative, for that is how they are
rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from arraylogchain import vjp
from arraylogchain._context import DOUBLE, SINGLE, Array
from arraylogchain._dask.blocks import AXES, FIELD_OF
from arraylogchain.chain import LogChain

# Numbers of a message beside those of the states.
MORE = 2
# Steps after which messages are made relative to their largest number.
_BLOCK = 4096


def eps_of(dtype: str) -> float:
    return (DOUBLE if dtype == "float64" else SINGLE).eps


def leaving(*blocks: Array, names: Sequence[str], backward: bool) -> Array:
    """Return the message that leaves some steps, backward to the step before them."""
    arrays = dict(zip(names, blocks, strict=True))
    x, message = arrays["log_potentials"], arrays.get("message")
    xp, count = array_namespace(x), x.shape[-2]
    vector: Any = None if message is None else message[..., :-MORE]
    scale: Any = 0.0 if message is None else message[..., -2]
    size: Any = 0.0
    for first in sorted(range(0, count, _BLOCK), reverse=backward):
        part = slice(first, min(first + _BLOCK, count))
        if backward:
            in_front = xp.zeros_like(x[..., 0, :])
            if "batch" in arrays:
                in_front = in_front + xp.zeros_like(arrays["batch"])
            chain, shift = _chain(arrays, part, in_front, vector)
            vector = chain.backward_messages()[..., 0, :]
        else:
            chain, shift = _chain(arrays, part, vector, None)
            vector = chain.forward_messages()[..., -1, :]
        top = _finite(xp, xp.max(vector, axis=-1, keepdims=True))
        vector, size = vector - top, xp.abs(top)
        scale = scale + top[..., 0] + xp.sum(shift, axis=-1)
    scale = xp.broadcast_to(xp.asarray(scale), vector.shape[:-1])[..., None]
    return xp.concat([vector, scale, size], axis=-1)


def guessed(
    *blocks: Array, names: Sequence[str], names_before: Sequence[str], backward: bool
) -> Array:
    """Return a guess of the message that enters a chunk, and the message that leaves it then."""
    own, before = blocks[: len(names) - 1], blocks[len(names) - 1 :]
    guess = leaving(*before, names=names_before, backward=backward)
    result = leaving(*own, guess, names=names, backward=backward)
    return array_namespace(guess).concat([guess, result], axis=-1)


def verified(*blocks: Array, names: Sequence[str], backward: bool, eps: float) -> Array:
    """Return the message that leaves a chunk: what a guess resulted in, if the guess holds.

    The last block is the guess and its result.

    It holds where, up to a factor, it agrees with the message that enters to eps / 4 for each step,
    beside the rounding of both, and has its zeros in the same places.
    """
    *own, pair = blocks
    arrays = dict(zip(names, own, strict=True))
    message = arrays["message"]
    guess, result = pair[..., : message.shape[-1]], pair[..., message.shape[-1] :]
    xp, steps = array_namespace(message), arrays["log_potentials"].shape[-2]
    true, other = (x[..., :-MORE] for x in (message, guess))
    dead = xp.maximum(true, other) == -np.inf
    with np.errstate(invalid="ignore"):
        difference = true - other
        high = xp.max(xp.where(dead, -np.inf, difference), axis=-1)
        low = xp.min(xp.where(dead, np.inf, difference), axis=-1)
        nothing = xp.all(dead, axis=-1)
        high, low = (xp.where(nothing, 0.0, x) for x in (high, low))
        rounding = 2 * DOUBLE.eps * (message[..., -1] + guess[..., -1])
        holds = xp.all(high - low <= steps * eps / 4 + rounding)
    if not bool(holds):
        return leaving(*own, names=names, backward=backward)
    factor = message[..., -2] + (high + low) / 2 - guess[..., -2]
    return xp.concat(
        [result[..., :-MORE], (result[..., -2] + factor)[..., None], result[..., -1:]], axis=-1
    )


def total(message: Array, kind: str) -> Array:
    """Return the log of the sum of what a message weighs."""
    from arraylogchain.einsum import logeinsumexp

    out = logeinsumexp("...k->...", message[..., :-MORE]) + message[..., -2]
    return out.astype(kind)


def within(*blocks: Array, names: Sequence[str], operation: str, kind: str) -> Array:
    """Return marginals or messages of a chunk, between the messages that enter it."""
    arrays = dict(zip(names, blocks, strict=True))
    x = arrays["log_potentials"]
    xp = array_namespace(x)
    chain, shift = _between(arrays)
    out = getattr(chain, operation)()[..., chain_start(chain, x) :, :]
    shifts = xp.cumulative_sum(shift, axis=-1)
    if operation == "forward_messages":
        out = (
            out
            + (shifts + (arrays["before"][..., -2:-1] if "before" in arrays else 0.0))[..., None]
        )
    elif operation == "backward_messages":
        shifts = shifts[..., -1:] - shifts
        if "after" in arrays:
            out[..., -1, :] = arrays["after"][..., :-MORE]
            shifts = shifts + arrays["after"][..., -2:-1]
        out = out + shifts[..., None]
    return out.astype(kind)


def chain_start(chain: LogChain, x: Array) -> int:
    """Return how many steps a chain has in front of those of x."""
    return int(chain.arrays["log_potentials"].shape[-2] - x.shape[-2])


def counts(*blocks: Array, names: Sequence[str], wanted: Sequence[str]) -> tuple[Array]:
    """Return expected transitions into the steps of a chunk, with all batch axes."""
    chain, _ = _between(dict(zip(names, blocks, strict=True)))
    return (with_batch(chain, wanted[0], chain.expected_transitions()),)


def gradients(*blocks: Array, names: Sequence[str], wanted: Sequence[str]) -> tuple[Array, ...]:
    """Return gradients with respect to arrays of a chunk, with all batch axes.

    The last block is the cotangent.
    """
    *blocks_of_chunk, g = blocks
    arrays = dict(zip(names, blocks_of_chunk, strict=True))
    (chain, _), x = _between(arrays), arrays["log_potentials"]
    _, pullback = vjp.log_partition(chain)
    found = dict(
        zip(
            vjp.ChainGradients._fields,
            pullback(g, [FIELD_OF[name] for name in wanted]),
            strict=True,
        )
    )
    out = []
    for name in wanted:
        y: Any = found[FIELD_OF[name]]
        if name == "log_potentials":
            y = y[..., chain_start(chain, x) :, :]
            y = y[(None,) * (len(chain._batch) + 2 - y.ndim)]
            # Messages may have expanded axes that rows share.
            own = (1,) * (y.ndim - x.ndim) + x.shape
            axes = tuple(i for i, n in enumerate(own) if n != y.shape[i])
            y = y.sum(axis=axes, keepdims=True) if axes else y
        out.append(with_batch(chain, name, y))
    return tuple(out)


def with_batch(chain: LogChain, name: str, x: Array) -> Array:
    """Return an array of a chain with all of its batch axes."""
    return x[(None,) * (len(chain._batch) + len(AXES[name]) - x.ndim)]


def _between(arrays: dict[str, Array]) -> tuple[LogChain, Array]:
    """Return a whole chunk, between the messages that enter it; and as `_chain` does."""
    vectors = (
        None if name not in arrays else arrays[name][..., :-MORE] for name in ("before", "after")
    )
    return _chain(arrays, slice(0, arrays["log_potentials"].shape[-2]), *vectors)


def _chain(
    arrays: dict[str, Array], steps: slice, before: Array | None, after: Array | None
) -> tuple[LogChain, Array]:
    """Return some steps of a chunk as a chain in float64, and what its potentials are relative to.

    Parameters
    ----------
    arrays : dict of str to array
        Of the chunk. Transitions lead into its steps: into the first one too, but for the first
        chunk of all, and where steps are the beginning of a guess.
    steps : slice
    before : array [..., K], optional
        Logs of the weights of one more step in front.
    after : array [..., K], optional
        Logs of the weights of what follows the last step.
    """
    x = arrays["log_potentials"]
    xp, count = array_namespace(x), x.shape[-2]
    name = next(name for name in arrays if name.endswith("transitions"))
    options: dict[str, Any] = {}
    matrices = arrays[name]
    if matrices.shape[-3] != 1:
        missing = count - matrices.shape[-3]  # 1 where none leads into the first step
        first = steps.start - missing + (before is None)
        matrices = matrices[..., first : steps.stop - missing, :, :]
    x = x[..., steps, :].astype("float64")
    top = _finite(xp, xp.round(xp.max(x, axis=-1, keepdims=True)))
    x = x - top
    if after is not None:
        last = x[..., -1:, :] + after[..., None, :]
        x = xp.broadcast_to(x, (*last.shape[:-2], *x.shape[-2:]))
        x = xp.concat([x[..., :-1, :], last], axis=-2)
    if before is not None:
        x = xp.concat([xp.zeros_like(x[..., :1, :]), x], axis=-2)
        options["log_initial"] = before
    elif steps.start == 0:
        options = {key: y for key, y in arrays.items() if key.endswith("initial")}
    if not options and "batch" in arrays:
        options["log_initial"] = xp.zeros_like(arrays["batch"])
    return LogChain(x, **{name: matrices}, **options), top[..., 0]


def _finite(xp: Any, x: Array) -> Array:
    return xp.where(xp.isfinite(x), x, xp.zeros_like(x))
