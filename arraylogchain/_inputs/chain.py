"""Validation of the arguments of `LogChain`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from arraylogchain._core.axes import Box, Shape, boxes, check_batches, within
from arraylogchain._core.context import Array, Context, shape_of
from arraylogchain._inputs.arrays import (
    common_namespace,
    dtype_name,
    has_values,
    is_lazy,
    on_host,
    prepare_inputs,
    with_dtype_of,
)
from arraylogchain._inputs.tensors import is_compiling, layouts_of_tensors


class Argument(NamedTuple):
    """Names of an argument as weights and as logarithms, and its axes beyond the batch axes."""

    linear: str | None
    log: str
    axes: tuple[str, ...]


# In the order of gradients. One matrix may stand for all T - 1.
PARTS = {
    "potentials": Argument(None, "log_potentials", ("T", "K")),
    "transitions": Argument("transitions", "log_transitions", ("T - 1", "K", "K")),
    "initial": Argument("initial", "log_initial", ("K",)),
    "final": Argument("final", "log_final", ("K",)),
}
# Bytes for each state of a path that is checked: three copies and masks.
BYTES_PER_STATE = 64
# Part of each argument of `LogChain`.
ARGUMENTS = {
    name: part for part, names in PARTS.items() for name in (names.linear, names.log) if name
}


class Arrangement(NamedTuple):
    """Batch axes of groups and of rows, their lengths in this order, and how many of each."""

    group_axes: Shape
    row_axes: Shape
    lengths: Shape
    sizes: tuple[int, int]


@dataclass(slots=True, eq=False)  # making frozen ones takes three times as long
class Chain:
    """Validated arrays of chains, with their original batch axes; missing weights are ones.

    Attributes
    ----------
    batch : tuple of int
        The batch axes of the arrays, broadcast together.
    parts : dict of str to array
        'potentials' [..., T, K]; 'transitions' [..., 1 or T - 1, K, K], which only chains of one
        step may lack; 'initial' and 'final' [..., K].
    logs : collection of str
        Names of the parts that hold logarithms.
    lengths : numpy.ndarray [...] or None
        Number of steps of each row; values beyond it are never read. None if all have T.
    is_plain : bool
        Whether transitions were given as one matrix [K, K].
    num_steps, num_states : int
        T and K, at least 1.
    has_one_matrix : bool
        Whether one matrix stands for every step.
    group_axes, row_axes : tuple of int
        Batch axes along which the transition matrices differ, and the others: rows along these
        share the matrices of their group.
    arranged : tuple of int
        The batch axes in that order.
    sizes : tuple of int
        Numbers of groups and of rows in each.
    """

    batch: Shape
    parts: dict[str, Array]
    logs: Collection[str] = ("potentials",)
    lengths: np.ndarray | None = None
    is_plain: bool = False
    num_steps: int = field(init=False)
    num_states: int = field(init=False)
    has_one_matrix: bool = field(init=False)
    group_axes: Shape = field(init=False)
    row_axes: Shape = field(init=False)
    arranged: Shape = field(init=False)
    sizes: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_steps, self.num_states = self.parts["potentials"].shape[-2:]
        own_shape = self.parts["transitions"].shape[:-2] if "transitions" in self.parts else ()
        self.has_one_matrix = own_shape[-1:] == (1,)
        self.group_axes, self.row_axes, self.arranged, self.sizes = _arrange(self.batch, own_shape)


@lru_cache(maxsize=256)
def _arrange(batch: Shape, own_shape: Shape) -> Arrangement:
    """Return the arrangement of batch axes for matrices [*own_shape, K, K]."""
    groups = tuple(
        axis for axis, n in enumerate(own_shape[:-1], len(batch) + 1 - len(own_shape)) if n > 1
    )
    rows = tuple(axis for axis in range(len(batch)) if axis not in groups)
    arranged = tuple(batch[axis] for axis in groups + rows)
    sizes = math.prod(arranged[: len(groups)]), math.prod(arranged[len(groups) :])
    return Arrangement(groups, rows, arranged, sizes)


class PreparedChain(NamedTuple):
    """A context and chain that share the memory of arguments, and the layouts of these."""

    layouts: list[Any]
    ctx: Context
    chain: Chain


# Without an address, as these arrays are themselves the parts of the chain.
_LAYOUT = attrgetter("shape", "dtype")


@dataclass(slots=True, eq=False)
class ChainArguments:
    """Arguments of `LogChain`, read at each call; of these, only `lengths` is copied.

    Attributes
    ----------
    arrays : dict of str to array
        By name, those that are not None.
    lengths : array or None
        NumPy's, or Dask's.
    prepared : PreparedChain or None
        What `prepare` returns while the arrays keep their layouts.
    """

    arrays: dict[str, Array]
    lengths: Any = None
    prepared: PreparedChain | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ChainArguments, (self.arrays, self.lengths)

    @classmethod
    def validated(cls, arrays: Mapping[str, Array | None], lengths: Any) -> ChainArguments:
        """Return the arguments; raise TypeError or ValueError if they do not fit.

        Values are checked if they are in the host's memory; Dask arrays, and arguments while torch
        compiles, are not checked here.
        """
        selected = {n: x for n, x in arrays.items() if x is not None or n == "log_potentials"}
        if is_compiling():  # operators validate them
            return cls(selected, lengths)
        for linear, log, _ in PARTS.values():
            if linear in selected and log in selected:
                raise ValueError(f"{linear} or {log} must be None, got both")
        potentials = selected["log_potentials"]
        if isinstance(potentials, (list, tuple)):
            raise TypeError(
                f"log_potentials must be an array, got a {type(potentials).__name__}; np.asarray "
                "makes one, of sequences of different lengths after they are padded to [n, T, K], "
                "with lengths="
            )
        if lengths is not None and not is_lazy(lengths):
            lengths = np.array(on_host("lengths", lengths))  # once: reading may wait for a device
        if has_values(*selected.values(), lengths):
            ctx, ready = prepare_inputs(selected, like="log_potentials")
            chain = make_chain(ready, lengths)
            check_weights(ctx, chain)
            if ready is selected:
                layouts = list(map(_LAYOUT, selected.values()))
                return cls(selected, lengths, PreparedChain(layouts, ctx, chain))
            if ctx.is_numpy and (layouts := layouts_of_tensors(selected.values())):
                return cls(selected, lengths, PreparedChain(layouts, ctx, chain))
        elif not is_lazy(*selected.values(), lengths):
            common_namespace(floating := with_dtype_of("log_potentials", selected))
            check_shapes(floating)
        return cls(selected, lengths)

    def is_lazy(self) -> bool:
        """Return whether one of the arrays is a Dask array."""
        return is_lazy(*self.arrays.values(), self.lengths)

    def floating(self) -> Mapping[str, Array]:
        """Return the arrays, lists, integers and booleans in the dtype of the log potentials."""
        return with_dtype_of("log_potentials", self.arrays)

    def prepare(self) -> tuple[Context, Chain]:
        """Return the context and the chain of arrays in memory, detached from autograd."""
        known, values = self.prepared, self.arrays.values()
        if known is not None:
            is_numpy = known.ctx.hand_back is None  # else results are made tensors
            layouts = list(map(_LAYOUT, values)) if is_numpy else layouts_of_tensors(values)
            if layouts == known.layouts:
                return known.ctx, known.chain
        ctx, arrays = prepare_inputs(self.arrays, like="log_potentials")
        return ctx, make_chain(arrays, self.lengths)


def make_chain(arguments: Mapping[str, Array], lengths: Any) -> Chain:
    """Return the chain of arrays by the names of `LogChain`'s arguments; raise if shapes misfit."""
    batch = check_shapes(arguments)
    names, logs = _parts_of(tuple(arguments))
    parts = dict(zip(names, arguments.values()))  # noqa: B905
    if is_plain := "transitions" in parts and parts["transitions"].ndim == 2:
        parts["transitions"] = parts["transitions"][None, ...]
    if lengths is not None:
        lengths = check_lengths(lengths, batch, parts["potentials"].shape[-2])
    return Chain(batch, parts, logs, lengths, is_plain)


@cache
def _parts_of(arguments: tuple[str, ...]) -> tuple[list[str], frozenset[str]]:
    """Return the parts of arguments, and the names of those that hold logarithms."""
    logs = frozenset(ARGUMENTS[name] for name in arguments if name.startswith("log_"))
    return [ARGUMENTS[name] for name in arguments], logs


def check_shapes(arguments: Mapping[str, Array]) -> Shape:
    """Return the broadcast batch axes of a chain's arrays; raise ValueError if shapes misfit."""
    return _check_shapes(tuple(zip(arguments, map(attrgetter("shape"), arguments.values()))))  # noqa: B905


@lru_cache(maxsize=256)
def _check_shapes(arguments: tuple[tuple[str, Shape], ...]) -> Shape:
    # Libraries have shape classes of their own, which print differently.
    shapes = {name: tuple(shape) for name, shape in arguments}
    potentials = shapes["log_potentials"]
    if len(potentials) < 2 or 0 in potentials[-2:]:
        raise ValueError(
            "log_potentials must be [..., T, K] with at least one step and one state, got shape "
            f"{potentials}"
        )
    T, K = potentials[-2:]
    sizes, batches = {"T": T, "K": K, "T - 1": T - 1}, {}
    for name, shape in shapes.items():
        own_shape = tuple(sizes[axis] for axis in PARTS[ARGUMENTS[name]].axes)
        actual = shape[-len(own_shape) :]
        if len(own_shape) == 3 and actual in ((K, K), (1, K, K)):
            actual = own_shape  # one matrix for all steps
        if actual != own_shape:
            raise ValueError(_misfit(name, shape, potentials, own_shape))
        batches[name] = shape[: -len(own_shape)]
    if T > 1 and not shapes.keys() & {"transitions", "log_transitions"}:
        raise ValueError(
            f"transitions or log_transitions must be [{K}, {K}], [..., 1, {K}, {K}] or "
            f"[..., {T - 1}, {K}, {K}] for {T} steps, got None"
        )
    return check_batches(batches, shapes)


def _misfit(name: str, shape: Shape, potentials: Shape, own_shape: Shape) -> str:
    """Return the error message for the shape of an argument, with a hint."""
    T, K = potentials[-2:]
    expected = ", ".join(map(str, own_shape))
    text = f"{name} must be [..., {expected}]"
    if len(own_shape) == 3:
        text += f", or [{K}, {K}] or [..., 1, {K}, {K}] for one matrix at every step,"
    text += f" for log_potentials of shape {potentials}, got shape {shape}"
    per_row = len(own_shape) == len(shape) == 3 and shape[1:] == (K, K)
    if per_row and shape[:1] == potentials[-3:-2]:
        text += f"; one matrix for each of {shape[0]} rows is [{shape[0]}, 1, {K}, {K}]"
    elif T != K and shape[-min(len(own_shape), 2) :] == (T,) * min(len(own_shape), 2):
        text += (
            f"; log_potentials of {T} states at {K} steps would be [..., {K}, {T}], "
            "their last two axes swapped"
        )
    return text


def check_lengths(lengths: Any, batch: Shape, num_steps: int) -> np.ndarray | None:
    """Return lengths [...] as a NumPy array; None if all chains have `num_steps` steps.

    They are read on the host, as the cost of every step depends on them.
    """
    array = on_host("lengths", lengths)
    check_integers("lengths", array, "; mask.sum(-1) makes them of a mask")
    pairs = zip(array.shape[::-1], batch[::-1], strict=False)
    if array.ndim > len(batch) or any(n not in (1, rows) for n, rows in pairs):
        text = f"lengths must broadcast to the batch axes {batch}, got shape {array.shape}"
        if not batch and array.sum() == num_steps:
            text += "; sequences that follow one another are to be padded to [n, T, K]"
        raise ValueError(text)
    wrong = array[(array < 1) | (array > num_steps)]
    if wrong.size:
        raise ValueError(f"lengths must be from 1 to T = {num_steps}, got {wrong[0]}")
    return None if np.all(array == num_steps) else array.astype(np.int64, copy=False)


def check_integers(name: str, x: Array, hint: str = "") -> None:
    if not dtype_name(x.dtype).startswith(("int", "uint")):
        raise TypeError(f"{name} must hold integers, got dtype {dtype_name(x.dtype)}{hint}")


def check_weights(ctx: Context, chain: Chain) -> None:
    """Raise ValueError if a linear weight that is read is negative; on a device it gives NaN."""
    if not ctx.is_numpy and "cpu" not in str(ctx.device).lower():
        return
    for name, x in chain.parts.items():
        if name in chain.logs or 0 in x.shape:
            continue
        # This is also False for NaN, and for negative weights past the end of a row.
        if not ctx.are_between(x, 0.0, math.inf):
            negative = np.asarray(x < 0)
            if name == "transitions":
                lengths = np.asarray(chain.num_steps if chain.lengths is None else chain.lengths)
                is_read = lengths[..., None] > np.arange(1, x.shape[-3] + 1)
                negative = negative.any((-2, -1)) & is_read
            if np.any(negative):
                raise ValueError(
                    f"{name} must be at least 0, got negative weights; logarithms are passed as "
                    f"log_{name}"
                )


def check_paths(states: Array, batch: Shape, num_steps: int) -> Shape:
    """Return the batch axes of paths of a chain; raise if an array cannot hold such paths."""
    check_integers("states", states)
    shape = shape_of(states)
    if shape[-1:] != (num_steps,):
        raise ValueError(
            f"states must be [..., {num_steps}], a state for each step, got shape {shape}"
        )
    shapes = {"states": shape, "the chain": (*batch, num_steps)}
    return check_batches({name: x[:-1] for name, x in shapes.items()}, shapes)


def check_states(ctx: Context, states: Array, chain: Chain, workspace: int) -> Array:
    """Return paths with broadcast batch axes; raise if a state that is read is out of range.

    See `states_of`. Paths are not copied, except to the host if `ctx` computes there.
    """
    if ctx.is_numpy or isinstance(states, np.ndarray) or not hasattr(states, "dtype"):
        states = on_host("states", states)
    batch = check_paths(states, chain.batch, chain.num_steps)
    if shape_of(states) != (shape := (*batch, chain.num_steps)):
        xp = np if isinstance(states, np.ndarray) else ctx.xp
        states = xp.broadcast_to(states, shape)
    lengths = None if chain.lengths is None else ctx.integers(chain.lengths)
    if 0 in batch:
        return states
    for box in boxes(shape, max(1, workspace // BYTES_PER_STATE)):
        block = states_of(ctx, states, lengths, box)
        extremes = block
        if not ctx.is_numpy:  # both are read at once, as a read waits for a device
            extremes = on_host("states", ctx.xp.stack([ctx.xp.min(block), ctx.xp.max(block)]))
        if not 0 <= extremes.min() <= extremes.max() < chain.num_states:
            wrong = on_host("states", block)
            # The block has wrapped integers that its dtype cannot represent; report the originals.
            out_of_range = on_host("states", states[box])[(wrong < 0) | (wrong >= chain.num_states)]
            raise ValueError(
                f"states must be from 0 to {chain.num_states - 1}, got {out_of_range.flat[0]}"
            )
    return states


def states_of(ctx: Context, states: Array, lengths: Array | None, box: Box) -> Array:
    """Return a box of paths in the library that computes, with 0 past the length of a row.

    Lengths broadcast with the leading axes, or are None.
    """
    block = states[box]
    if isinstance(block, np.ndarray):
        # torch accepts no other byte order and no negative strides.
        block = ctx.xp.asarray(np.ascontiguousarray(block, np.int64), device=ctx.device)
    block = ctx.xp.astype(block, ctx.index_dtype, copy=False)
    if lengths is None:
        return block
    start = box[-1].start or 0
    times = ctx.xp.arange(start, start + block.shape[-1], dtype=ctx.index_dtype, device=ctx.device)
    return ctx.xp.where(ends_of(lengths, box) > times, block, 0)


def ends_of(lengths: Array, box: Box) -> Array:
    """Return lengths [..., 1] of the chains of a box of paths."""
    lead = box[:-1]
    return lengths[within(lead[len(lead) - lengths.ndim :], shape_of(lengths))][..., None]
