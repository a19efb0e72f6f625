"""What backends and passes have in common: messages, and the methods of a backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from arraylogchain._backends.shards import Shard
from arraylogchain._core.context import Array, Context
from arraylogchain._core.scaled import add_scale, scaled_logs

# What is kept of a block of steps.
NOTHING, UPDATED, ALL = range(3)


@dataclass(slots=True)
class Messages:
    """Weights of the K states of rows, at some steps one after another or, as a state, at one.

    The true logarithm is ``log(values) + shifts + exponents * log(2)`` in rows that are linear, and
    ``values + shifts + exponents * log(2)`` in rows that are in logs, whose values are near 0 but
    for those that arrive: the largest of a row about 0, or off by the rounding of what has been
    moved into the scale. -inf in logs, and 0 in linear weights, is an exact zero; linear rows are
    proved: every weight is right to rounding, and finite.

    Attributes
    ----------
    values : array [n, groups, rows, K], of a state [groups, rows, K]
        Of any strides. float32 or float64, as the backend computes.
    shifts, exponents : array [n, groups, rows], of a state [groups, rows]
        Whole numbers, in the widest precision; they add up exactly.
    is_log : bool numpy.ndarray [groups, rows] or None
        Which rows are in logs, None for none: all steps of a row here have one form.
    log_sums : array [groups, rows] or None
        The true logs of the sums of a state's weights, where the backend has them.
    """

    values: Array
    shifts: Array
    exponents: Array
    is_log: np.ndarray | None
    log_sums: Array = None

    def to_log_space(self, ctx: Context) -> Messages:
        """Return the same with all rows in logs."""
        if self.is_log is not None and self.is_log.all():
            return self
        xp, (logs, exponents) = ctx.xp, scaled_logs(ctx, self.values)
        exponents = self.exponents + exponents
        if self.is_log is not None:
            mask = xp.asarray(self.is_log, device=ctx.device)
            logs = xp.where(mask[..., None], self.values, logs)
            exponents = xp.where(mask, self.exponents, exponents)
        return Messages(logs, self.shifts, exponents, np.ones(tuple(exponents.shape[-2:]), bool))

    def weights(self, ctx: Context) -> Array:
        """Return values as linear weights, of which those that are no normal numbers may be 0."""
        if self.is_log is None:
            return self.values
        weights = ctx.empty(tuple(self.values.shape), self.values.dtype)
        ctx.exp(self.values, weights)
        if self.is_log.all():
            return weights
        mask = ctx.xp.asarray(self.is_log, device=ctx.device)
        return ctx.xp.where(mask[..., None], weights, self.values)

    def logs(self, ctx: Context) -> Array:
        """Return the true logarithms, in the widest precision."""
        x = self.to_log_space(ctx)
        values, shifts, exponents = ctx.load(x.values, ctx.widest), x.shifts, x.exponents
        return add_scale(values, shifts[..., None], exponents[..., None])

    def steps(self, selection: slice) -> Messages:
        """Return those of some steps."""
        shifts, exponents = self.shifts[selection, ...], self.exponents[selection, ...]
        return Messages(self.values[selection, ...], shifts, exponents, self.is_log)


class SegmentMessages(NamedTuple):
    """What a recursion leaves of the steps s, ..., e - 1.

    Attributes
    ----------
    predicted : Messages or None
        Of the n = e - s steps, in the order of time, forward and backward: what comes to a step
        from its neighbour, before the step's own potentials. At the chain's start it is the initial
        weights; backward, at each row's last step, the final ones. Its scales are those of the
        neighbour and the matrix alone, whatever its size.
    updated : Messages or None
        ``predicted * exp(potentials)``. With ALL there is one step more, [n + 1, ...]: that of the
        state which the block began with, in the form that the block has. Forward it comes first
        (steps s - 1, ..., e - 1), backward it comes last (steps s, ..., e). Where nothing came
        before it, it is any numbers.
    carry : Messages
        After the last of the steps, for the next block.

    Steps past a row's length hold any numbers in both, NaN and infinities among them, but scales of
    some state. What came backward may be written over, but for `updated` at the first step, whose
    memory may be `carry`'s.
    """

    predicted: Any
    updated: Any
    carry: Messages


class Backend(Protocol):
    """A recursion over the steps of one piece; the rest is array operations on what it leaves.

    Its methods may be called by several threads at once, with the same states and others, and
    change nothing that they are given: what is prepared once (matrices) may be kept, as long as
    threads that prepare it twice do no harm. The same arguments give the same bits.
    """

    # Rows of a piece from which on more bring nothing: threads share pieces of so many, and compute
    # in float64. None where all rows are better taken together.
    max_useful_rows: int | None
    # Whether matrices of several steps are in memory at a time, not only of one, in panels.
    holds_matrices: bool

    def __init__(self, shard: Shard, workspace: int) -> None:
        """Take a piece, and the bytes for temporaries beyond what is returned."""

    def advance(
        self, carry: Messages | None, steps: slice, backward: bool, keep: int
    ) -> SegmentMessages:
        """Take a block of steps, forward or backward.

        forward:   predicted[t] = updated[t - 1] @ P[t - 1]
        backward:  predicted[t] = P[t] @ updated[t + 1]
        both:      updated[t] = predicted[t] * exp(x[t])

        Parameters
        ----------
        carry : Messages or None
            What the neighbouring block returned; None at the first step, and at the last one
            backward. Past a row's length it is what it was: forward the weights after its last
            step, and backward the final weights until its last step comes.
        steps : slice
            Numbers in time, the same ones in both directions.
        keep : int
            NOTHING but the state, the UPDATED messages, or ALL. The others are None.
        """

    def best(self, carry: Messages | None, steps: slice, keep: int) -> SegmentMessages:
        """Take a block of steps forward, with the largest of terms in the place of their sums.

        All are logs. Of UPDATED messages, if they are kept, the scales may be any numbers.
        """

    def trace(self, updated: Messages, after: Array, steps: slice) -> Array:
        """Return the states of best paths, integers [n, groups, rows].

        Parameters
        ----------
        updated : Messages
            What `best` kept of the steps.
        after : integer array [groups, rows]
            The states at the step after these. Of rows that have no such step, those at their last.
            Of states that are as good, the smallest is taken.
        """

    def draw(self, updated: Messages, after: Array, steps: slice, uniforms: Array) -> Array:
        """Return states of samples, integers [n, groups, rows, samples].

        State k of step t is drawn in proportion to ``updated[t][k] * P[t][k, state of t + 1]``.

        Parameters
        ----------
        updated : Messages
            As `advance` keeps it, forward.
        after : integer array [groups, rows, samples]
            As for `trace`: rows' last states are drawn by the caller.
        uniforms : array [n, groups, rows, samples]
            Numbers in [0, 1); those of rows' last steps and later ones are not for use.
        """
