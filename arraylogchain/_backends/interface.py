"""Messages, and the methods of a backend: what backends and passes have in common."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import numpy as np

from arraylogchain._backends.shards import Shard
from arraylogchain._core.context import Array, Context
from arraylogchain._core.scaled import add_scale, scaled_logs


class Keep(Enum):
    """Messages of a segment that a backend returns besides the carry.

    UPDATED are the updated messages of its steps; ALL are these, the updated message of the
    neighboring segment, and the predicted messages.
    """

    NOTHING = auto()
    UPDATED = auto()
    ALL = auto()


@dataclass(slots=True)
class Messages:
    """Messages of the rows of a shard: values of the K states, and their scales.

    A row is in linear space or in log space, at all steps. The true logarithm of an entry is
    ``log(values) + shifts + exponents * log(2)`` in linear space and
    ``values + shifts + exponents * log(2)`` in log space. Updated messages in log space have their
    largest value near 0. Exact zeros are 0, or -inf. In linear space every entry is certified:
    finite, and right to rounding.

    Attributes
    ----------
    values : array [n, groups, rows, K], of one step [groups, rows, K]
        Of any strides. float32 or float64, as the backend computes.
    shifts, exponents : array [n, groups, rows], of one step [groups, rows]
        The scale: whole nats and powers of two, in the widest precision; their sums are exact.
    is_log : bool numpy.ndarray [groups, rows] or None
        Which rows are in log space; None if none is.
    log_sums : array [groups, rows] or None
        True logarithms of the sums over states, where the backend has them.
    """

    values: Array
    shifts: Array
    exponents: Array
    is_log: np.ndarray | None
    log_sums: Array = None

    def to_log_space(self, ctx: Context) -> Messages:
        """Return the same messages with all rows in log space."""
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
        """Return values in linear space, where subnormal ones may be flushed to 0."""
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
        """Return the messages of a slice of steps."""
        shifts, exponents = self.shifts[selection, ...], self.exponents[selection, ...]
        return Messages(self.values[selection, ...], shifts, exponents, self.is_log)


class SegmentMessages(NamedTuple):
    """Messages of the steps s, ..., e - 1, returned by `Backend.advance`.

    Attributes
    ----------
    predicted : Messages or None
        The messages of the n = e - s steps, in the order of time in both directions, before the
        potentials of their step are applied. At the first step of a chain they are the initial
        weights; backward, at the last step of a row, the final weights. Their scale is that of the
        neighboring message plus that of the matrix, whatever their size.
    updated : Messages or None
        The messages after potentials are applied, ``predicted * exp(potentials)``. With `Keep.ALL`
        they have n + 1 steps: forward s - 1, ..., e - 1, backward s, ..., e. The additional step is
        the carry that the segment starts from; undefined at the start of the recursion.
    carry : Messages
        After the last of the steps, for the next segment.

    Values beyond a row's length are undefined (they may be NaN or infinite), their scales finite.
    Callers may overwrite backward messages, except `updated` at the first step, whose memory may be
    that of `carry`.
    """

    predicted: Any
    updated: Any
    carry: Messages


class Suffixes(NamedTuple):
    """The best suffixes of the paths of a shard: the states of a path from some step on.

    They are in the order of their last states, then of the states before these, and so on.

    Attributes
    ----------
    states : integer array [groups, rows, paths]
        The first states of the suffixes; of rows that have ended before, their last states.
    losses : array [groups, rows, paths]
        How far the log weight of the best path with this suffix lies below that of the best path;
        inf where there is no suffix, whose state is undefined.
    """

    states: Array
    losses: Array


class BestPaths(NamedTuple):
    """Best paths of the whole chains of a shard.

    Attributes
    ----------
    states : integer array [groups, rows, T]
        -1 past a row's end, 0 where no path has a positive weight.
    log_weights : array [groups, rows]
    declined : bool numpy.ndarray [groups, rows]
        Rows of which nothing was computed.
    """

    states: Array
    log_weights: Array
    declined: np.ndarray


class WholeChains(NamedTuple):
    """log Z of the whole chains of a shard, and gradients times cotangents.

    Attributes
    ----------
    log_z : array [groups, rows]
    gradients : dict of str to array
        Of the requested ones: 'potentials' [groups, rows, T, K], 'transitions' [groups, 1, n, K,
        K], 'initial' and 'final' [groups, rows, K]. They are 0 for declined rows.
    declined : bool numpy.ndarray [groups, rows]
        Rows of which nothing was computed.
    messages : object
        What `posterior` reads of an earlier call, if it was asked to be stored; else None.
    """

    log_z: Array
    gradients: dict[str, Array]
    declined: np.ndarray
    messages: Any = None


class Backend(Protocol):
    """A recursion over the steps of one shard.

    A backend may have methods for whole chains, which need no segments. They decline a shard by
    returning None, or some of its rows; segments then take over for these.

        best_paths() -> BestPaths or None
        log_partition(store_messages) -> WholeChains or None
        posterior(cotangents, requested, by_logs, stored) -> WholeChains or None

    Cotangents are an array [groups, rows], or None for ones; `requested` are names of gradients,
    and `by_logs` tells whether that of transitions is with respect to their logarithms. `stored` is
    the result of `log_partition`, whose declined rows are declined again, or None.

    Threads may call its methods at the same time; they do not change their arguments. Prepared
    matrices may be cached if preparing them twice does no harm. The same arguments give the same
    bits.

    Attributes
    ----------
    max_useful_rows : int or None
        Largest useful shard, in rows; larger batches are split across threads, which compute in
        float64. None if all rows are best computed together.
    holds_matrices : bool
        Whether prepared matrices of several steps are in memory at a time.
    """

    max_useful_rows: int | None
    holds_matrices: bool

    def __init__(self, shard: Shard, workspace: int) -> None:
        """Prepare a recursion over a shard, with bytes for temporaries beyond results."""

    def advance(
        self, carry: Messages | None, steps: slice, backward: bool, keep: Keep
    ) -> SegmentMessages:
        """Return the messages of one segment, forward or backward.

        forward:   predicted[t] = updated[t - 1] @ P[t - 1]
        backward:  predicted[t] = P[t] @ updated[t + 1]
        both:      updated[t] = predicted[t] * exp(x[t])

        Parameters
        ----------
        carry : Messages or None
            That of the neighboring segment; None at the start of the recursion. Beyond a row's
            length it stays the same: forward the message of its last step, backward the final
            weights.
        steps : slice
            In time, whatever the direction.
        backward : bool
        keep : Keep
            Messages to return; the others are None.
        """

    def max_product(self, carry: Messages | None, steps: slice, keep: Keep) -> SegmentMessages:
        """Return the messages of one segment forward, with maxima instead of sums.

        They are in log space; the scales of updated messages are undefined.
        """

    def backtrace(self, updated: Messages, after: Array, steps: slice) -> Array:
        """Return the states of best paths, integers [n, groups, rows].

        Of equally good states the smallest is chosen.

        Parameters
        ----------
        updated : Messages
            Of the segment, from `max_product`.
        after : integer array [groups, rows]
            The state at the step after the segment; of rows that have ended, their last state.
        steps : slice
        """

    def backtrace_suffixes(
        self, updated: Messages, after: Suffixes, steps: slice
    ) -> tuple[Array, Suffixes]:
        """Extend the best suffixes to the start of a segment, as many at every step.

        Of equal losses the first are kept. For the state that `backtrace` chooses nothing is lost.

        Parameters
        ----------
        updated : Messages
            Of the segment, from `max_product`.
        after : Suffixes
        steps : slice

        Returns
        -------
        links : integer array [n, groups, rows, paths]
            The number of the suffix that was extended, times K, plus the state.
        suffixes : Suffixes
        """

    def follow(self, links: Array, numbers: Array) -> tuple[Array, Array]:
        """Return the states of paths, integers [n, groups, rows, paths], and numbers for later.

        Parameters
        ----------
        links : integer array [n, groups, rows, paths]
            Of a segment, from `backtrace_suffixes`.
        numbers : integer array [groups, rows, paths]
            Those of the paths' suffixes at the first step; what is returned are those at the step
            after the last.
        """

    def sampling_backtrace(
        self, updated: Messages, after: Array, steps: slice, uniforms: Array
    ) -> Array:
        """Return the states of samples, integers [n, groups, rows, samples].

        State k of step t has a probability in proportion to
        ``updated[t][k] * P[t][k, state of t + 1]``.

        Parameters
        ----------
        updated : Messages
            Forward, of the segment.
        after : integer array [groups, rows, samples]
            As for `backtrace`; callers draw the last state of each row.
        steps : slice
        uniforms : array [n, groups, rows, samples]
            Numbers in [0, 1); undefined from each row's last step on.
        """
