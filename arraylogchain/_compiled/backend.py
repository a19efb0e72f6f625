"""The recursions of a piece of a chain, by loops."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraylogchain._array.chains.pieces import (
    BOTH,
    NOTHING,
    Block,
    Messages,
    Piece,
    near_logs,
)
from arraylogchain._compiled import matrices, paths, recursion
from arraylogchain._compiled.compiling import Floats, Integers
from arraylogchain._compiled.matrices import MANY, frozen
from arraylogchain._compiled.steps import RAISED
from arraylogchain._context import Array, whole_maximum

# From so many rows on they are taken side by side.
_SIDE_BY_SIDE = 8
# Numbers that are weighed by exponentials which are computed together, and steps at most.
_CHUNK, _CHUNK_STEPS = 4096, 64


class Loops:
    """See `pieces.Backend`.

    What loops take are arrays [G, steps, K, R]: R rows that share a matrix side by side, or each
    row by itself, R being 1.
    """

    rows_together = 256

    def __init__(self, piece: Piece, workspace: int) -> None:
        self.piece, self.K = piece, piece.chain.num_states
        self.R = piece.rows if piece.rows >= _SIDE_BY_SIDE else 1
        # How many of what loops take share the matrices of one group.
        self.each = piece.rows // self.R
        self.G = piece.groups * self.each
        self.lengths = np.full((self.G, self.R), piece.num_steps)
        if piece.lengths is not None:
            self.lengths = piece.lengths.astype(np.int64).reshape(self.G, self.R)
        transitions = piece.chain.transitions
        self.has_one = transitions is None or transitions.shape[-3] < 2
        # Whether there is room to have a matrix's columns one after another.
        self.turns = self.has_one and 8 * piece.groups * self.K**2 <= workspace // 4
        self._prepared: dict[tuple[str, bool], Any] = {}

    def advance(self, state: Messages | None, steps: slice, backward: bool, keep: int) -> Block:
        G, K, R, S = self.G, self.K, self.R, steps.stop - steps.start
        begin = self._enter(self._begin(backward) if state is None else state)
        (prepared, proof, few), first = self._matrices("weights", steps, backward)
        arrived = np.empty((G, S, K * R) if keep == BOTH else (1, 2, K * R))
        left = np.empty((1, 2, K * R) if keep == NOTHING else (G, S + 1, K * R))
        scales = np.empty((2, G, S, R) if keep == BOTH else (2, 0, 0, 0))
        left_scales = np.empty((2, 0, 0, 0) if keep == NOTHING else (2, G, S + 1, R))
        recursion.advance(
            self._potentials(steps),
            (*prepared, self.each, first),
            proof,
            few,
            self.lengths,
            begin,
            (arrived, left, scales, left_scales),
            (*self._room(S), np.empty((3, R)), np.empty((4, K))),
            steps.start,
            backward,
        )
        weights, shifts, powers, forms = begin
        groups, rows = self.piece.groups, self.piece.rows
        in_logs = forms.astype(np.bool_).reshape(groups, rows)
        shifts, powers = shifts.reshape(groups, rows), powers.reshape(groups, rows)
        return Block(
            self._messages(arrived, scales, in_logs) if keep == BOTH else None,
            self._messages(left, left_scales, in_logs) if keep != NOTHING else None,
            Messages(self._leave(weights[:, None])[0], shifts, powers, in_logs),
        )

    def best(self, state: Array | None, steps: slice, keep: bool) -> tuple[Array | None, Array]:
        S = steps.stop - steps.start
        if state is None:
            state = self._begin(False).in_log_form(self.piece.ctx).values
        m = self._lay(state[None])[:, 0].copy()
        (L,), first = self._matrices("logs", steps, False)
        left = np.empty((self.G, S, m.shape[1]) if keep else (1, 2, m.shape[1]))
        x, room = self._potentials(steps), self._room(S)
        paths.best(x, (L, self.each, first), self.lengths, m, left, room, steps.start)
        return self._leave(left) if keep else None, self._leave(m[:, None])[0]

    def trace(self, left: Array, after: Array, steps: slice) -> Array:
        states = self._states(after[..., None], steps)
        (L,), first = self._matrices("logs", steps, True)
        m, edges = frozen(self._lay(left)), (L, self.each, first)
        paths.trace(m, edges, self.turns, self.lengths, states, steps.start)
        return self._over_time(states)[..., 0]

    def draw(self, left: Messages, after: Array, steps: slice, uniforms: Array) -> Array:
        states, own = self._states(after, steps), (self.G, self.R)
        ((F, logs, *_), proof, _), first = self._matrices("weights", steps, True)
        uniforms = np.ascontiguousarray(uniforms.transpose(1, 2, 0, 3), np.float64)
        paths.draw(
            frozen(self._lay(left.values)),
            np.ascontiguousarray(left.in_logs).reshape(own),
            (F, logs, self.each, first),
            max(proof[1], 2.0**-900),
            self.lengths,
            uniforms.reshape(*own, *uniforms.shape[2:]),
            states,
            np.empty(self.K),
            steps.start,
        )
        return self._over_time(states)

    def _states(self, after: Array, steps: slice) -> Integers:
        """Return room for states of paths, [G, R, S + 1, n], with those that come after."""
        shape = self.G, self.R, steps.stop - steps.start + 1, after.shape[-1]
        states = np.empty(shape, np.int64)
        states[:, :, -1] = after.reshape(self.G, self.R, shape[-1])
        return states

    def _over_time(self, states: Integers) -> Integers:
        """View such states as [S, groups, rows, n]."""
        groups, rows, (S, n) = self.piece.groups, self.piece.rows, states.shape[2:]
        return states.reshape(groups, rows, S, n).transpose(2, 0, 1, 3)[:-1]

    def _potentials(self, steps: slice) -> Array:
        return frozen(self._lay(self.piece.potentials(steps).transpose(2, 0, 1, 3)))

    def _room(self, S: int) -> tuple[Floats, Floats]:
        width = self.K * self.R
        B = min(S, _CHUNK_STEPS, max(1, _CHUNK // width))
        return np.empty((B, width)), np.empty((B, self.R))

    def _matrices(self, form: str, steps: slice, backward: bool) -> tuple[Any, int]:
        """Return prepared matrices, with the number of the first.

        The ones between a step and the one before it, or after it if `backward`.
        """
        own, last = (form, backward), self.piece.chain.num_steps - 1
        if self.has_one:
            if own not in self._prepared:
                self._prepared[own] = self._prepare(form, slice(0, min(last, 1)), backward)
            return self._prepared[own], 0
        wanted = slice(max(steps.start - 1, 0), steps.stop - 1)
        if backward:
            wanted = slice(steps.start, min(steps.stop, last))
        return self._prepare(form, wanted, backward), wanted.start

    def _prepare(self, form: str, wanted: slice, backward: bool) -> Any:
        if wanted.start < wanted.stop:
            given, in_logs = self.piece.matrices(wanted), self.piece.chain.transitions_in_logs
        else:  # of which none is read
            given, in_logs = np.zeros((self.piece.groups, 1, self.K, self.K)), False
        if form == "logs":
            return (matrices.logs_of(given, in_logs, backward and self.turns),)
        found = matrices.prepare(self.piece.ctx, given, in_logs, backward)
        F, logs, shifts, powers, *proof = found
        few = matrices.few_entries(F, logs) if self.has_one and len(F) == 1 else MANY
        return (F, logs, shifts, powers), tuple(proof), few

    def _begin(self, backward: bool) -> Messages:
        """Return what a recursion starts with, in logs or as weights that loops can take."""
        ctx, (weights, in_logs) = self.piece.ctx, self.piece.end(backward)
        shifts = powers = np.zeros((self.piece.groups, self.piece.rows))
        x = np.ones(self.piece.state_shape) if weights is None else ctx.load(weights, ctx.widest)
        if in_logs:
            top = whole_maximum(ctx, x, -1, ctx.widest)
            x, shifts = x - top, top[..., 0]
        elif x.min() >= 2.0**-60 and x.max() <= 2.0**60:
            x, powers = x * 2.0**RAISED, powers - RAISED
        else:
            (x, powers), in_logs = near_logs(ctx, x), True
        return Messages(x, shifts, powers, np.full(shifts.shape, in_logs))

    def _enter(self, state: Messages) -> tuple[Array, ...]:
        """Return a copy of a state, as loops take it."""
        shape, weights = (self.G, self.R), np.array(self._lay(state.values[None])[:, 0])
        scales = (np.array(x, np.float64).reshape(shape) for x in (state.shifts, state.powers))
        return weights, *scales, state.in_logs.astype(np.int64).reshape(shape)

    def _lay(self, x: Array) -> Floats:
        """Lay out an array [n, groups, rows, K] as [G, n, K * R]."""
        n = len(x)
        x = x.reshape(n, self.G, self.R, self.K).transpose(1, 0, 3, 2)
        return np.ascontiguousarray(x, np.float64).reshape(self.G, n, self.K * self.R)

    def _leave(self, x: Floats) -> Floats:
        """View an array [G, n, K * R] as [n, groups, rows, K]."""
        n, (groups, rows) = x.shape[1], (self.piece.groups, self.piece.rows)
        x = x.reshape(groups, self.each, n, self.K, self.R).transpose(2, 0, 1, 4, 3)
        return x.reshape(n, groups, rows, self.K)

    def _messages(self, values: Floats, scales: Floats, in_logs: Any) -> Messages:
        groups, rows = self.piece.groups, self.piece.rows
        shifts, powers = scales.transpose(0, 2, 1, 3).reshape(2, -1, groups, rows)
        return Messages(self._leave(values), shifts, powers, in_logs)
