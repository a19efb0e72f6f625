"""The recursions of a piece of a chain, by loops."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraylogchain._array.chains.pieces import BOTH, LEFT, NOTHING, Block, Messages, Piece
from arraylogchain._compiled import matrices, paths, recursion
from arraylogchain._compiled.compiling import Floats, Integers
from arraylogchain._compiled.matrices import FEW_STATES, MANY
from arraylogchain._context import Array

# From so many rows on they are taken side by side.
_SIDE_BY_SIDE = 8
# Numbers that are weighed by exponentials which are computed together, and steps at most.
_CHUNK, _CHUNK_STEPS = 4096, 64


class Loops:
    """See `pieces.Backend`.

    What loops leave are arrays [steps, G, K, R]: R rows that share a matrix side by side, or each
    row by itself, R being 1.
    """

    most_rows, holds_matrices = 256, True

    def __init__(self, piece: Piece, workspace: int) -> None:
        self.piece, self.K = piece, piece.chain.num_states
        self.R = piece.rows if piece.rows >= _SIDE_BY_SIDE else 1
        # How many of what loops take share the matrices of one group.
        self.each = piece.rows // self.R
        self.G = piece.groups * self.each
        self.lengths = np.empty((self.G, self.R), np.int64)
        ends = piece.lengths
        self.lengths[...] = piece.num_steps if ends is None else ends.reshape(self.lengths.shape)
        # Room for the factors of so many steps, and some more numbers: [K * R], flat, and [R].
        width = self.K * self.R
        count = min(_CHUNK_STEPS, max(1, _CHUNK // width))
        self.room = (count + 4) * width, (count + 3, self.R)
        self.has_one = piece.chain.has_one_matrix or piece.chain.num_steps == 1
        self._prepared: dict[tuple[str, bool], Any] = {}

    def advance(self, state: Messages | None, steps: slice, backward: bool, keep: int) -> Block:
        G, K, R, S = self.G, self.K, self.R, steps.stop - steps.start
        begin = weights, scales, forms = self._begin(state, backward)
        (prepared, proof, few), first = self._matrices("weights", steps, backward)
        arrived = np.empty((S, G, K * R) if keep == BOTH else (2, 1, K * R))
        left = np.empty((2, 1, K * R) if keep == NOTHING else (S + 1, G, K * R))
        arrived_scales = np.empty((2, S if keep == BOTH else 0, G, R))
        left_scales = np.empty((2, 0 if keep == NOTHING else S + 1, G, R))
        x, edges = self._potentials(steps), (*prepared, self.each, first)
        kept, where = (arrived, left, arrived_scales, left_scales), (steps.start, backward)
        room = np.empty(self.room[0]), np.empty(self.room[1])
        count = recursion.advance(x, edges, proof, few, self.lengths, begin, kept, room, *where)
        shifts, powers, totals = scales.reshape(3, self.piece.groups, self.piece.rows)
        in_logs = forms.view(bool).reshape(shifts.shape) if count else None  # LOGS is 1, LINEAR 0
        if keep == LEFT:
            own_steps = slice(0, S) if backward else slice(1, None)
            left, left_scales = left[own_steps], left_scales[:, own_steps]
        return Block(
            self._messages(arrived, arrived_scales, in_logs) if keep == BOTH else None,
            self._messages(left, left_scales, in_logs) if keep != NOTHING else None,
            Messages(weights.reshape(*shifts.shape, K), shifts, powers, in_logs, totals),
        )

    def best(self, state: Messages | None, steps: slice, keep: int) -> Block:
        G, K, R, S = self.G, self.K, self.R, steps.stop - steps.start
        begin = weights, scales, _ = self._begin(state, backward=False)
        edges, first = self._matrices("logs", steps, False)
        left = np.empty((S, G, K * R) if keep == LEFT else (2, 1, K * R))
        x, edges = self._potentials(steps), (*edges, self.each, first)
        room = np.empty(self.room[0]), np.empty(self.room[1])
        paths.best(x, edges, self.lengths, begin, left, room, steps.start)
        shifts, powers, _ = scales.reshape(3, self.piece.groups, self.piece.rows)
        in_logs = np.ones(shifts.shape, bool)
        kept = Messages(self._leave(left), shifts, powers, in_logs) if keep == LEFT else None
        state = Messages(weights.reshape(*shifts.shape, K), shifts, powers, in_logs)
        return Block(None, kept, state)

    def trace(self, left: Messages, after: Array, steps: slice) -> Array:
        kept = self._enter_steps(left.values)
        states = self._states(after, len(kept), 1)
        edges, first = self._matrices("logs", steps, True)
        paths.trace(kept, (*edges, self.each, first), self.lengths, states, steps.start)
        return states[:-1].reshape(-1, *after.shape)

    def draw(self, left: Messages, after: Array, steps: slice, uniforms: Array) -> Array:
        states = self._states(after, len(uniforms), after.shape[-1])
        ((F, logs, _, count), proof, _), first = self._matrices("weights", steps, True)
        edges, line = (F, logs, count, self.each, first), max(proof[1], 2.0**-900)
        kept = self._enter_steps(left.values)
        in_logs = np.zeros((self.G, self.R), bool)
        in_logs[...] = False if left.in_logs is None else left.in_logs.reshape(in_logs.shape)
        u = np.ascontiguousarray(uniforms, np.float64).reshape(-1, *states.shape[1:])
        room, ends = np.empty(self.K), self.lengths
        paths.draw(kept, in_logs, edges, line, ends, u, states, room, steps.start)
        return states[:-1].reshape(-1, *after.shape)

    def _begin(self, state: Messages | None, backward: bool) -> tuple[Floats, Floats, Any]:
        """Return a state as loops change it: weights [G, R, K], scales [3, G, R], forms [G, R]."""
        G, R = self.G, self.R
        scales, forms = np.zeros((3, G, R)), np.zeros((G, R), np.int8)
        if state is None:
            x, forms[...] = self.piece.end(backward)
        else:
            x = state.values
            forms[...] = 0 if state.in_logs is None else state.in_logs.reshape(G, R)
            scales[0], scales[1] = state.shifts.reshape(G, R), state.powers.reshape(G, R)
        return np.array(x, np.float64, order="C").reshape(G, R, self.K), scales, forms

    def _states(self, after: Array, S: int, n: int) -> Integers:
        """Return room for states of paths, [S + 1, G, R, n], with those that come after."""
        states = np.empty((S + 1, self.G, self.R, n), np.int64)
        states[-1] = after.reshape(self.G, self.R, n)
        return states

    def _matrices(self, form: str, steps: slice, backward: bool) -> tuple[Any, int]:
        """Return prepared matrices, with the number of the first.

        The ones between a step and the one before it, or after it if `backward`.
        """
        piece, last = self.piece, self.piece.chain.num_steps - 1
        own = form, backward and form == "weights"
        if own in self._prepared:
            return self._prepared[own], 0
        if self.has_one:
            wanted = slice(0, int(last > 0))
        elif backward:
            wanted = slice(steps.start, min(steps.stop, last))
        else:
            wanted = slice(max(steps.start - 1, 0), steps.stop - 1)
        if wanted.start < wanted.stop:
            given, in_logs = piece.matrices(wanted), "transitions" in piece.chain.logs
        else:  # of which none is read
            given, in_logs = np.zeros((piece.groups, 1, self.K, self.K)), False
        found: Any
        if form == "logs":
            found = matrices.logs_of(given, in_logs)
        else:
            weights, proof = matrices.prepare(piece.ctx, given, in_logs, backward)
            has_few = self.has_one and piece.groups == 1 and self.K >= FEW_STATES
            found = weights, proof, matrices.few_entries(*weights[:2]) if has_few else MANY
        if self.has_one:
            self._prepared[own] = found
        return found, wanted.start

    def _potentials(self, steps: slice) -> Floats:
        """Return potentials as [G, R, n, K], not to be written to."""
        x = np.ascontiguousarray(self.piece.potentials(steps), np.float64)
        found = x.reshape(self.G, self.R, -1, self.K)
        found.setflags(write=False)  # as callers' may be
        return found

    def _enter_steps(self, x: Array) -> Floats:
        """Lay out what was kept, [n, groups, rows, K], as [n, G, K * R]."""
        x = np.ascontiguousarray(x if self.R == 1 else x.transpose(0, 1, 3, 2))
        return x.reshape(len(x), self.G, self.K * self.R)  # type: ignore[no-any-return]

    def _leave(self, x: Floats) -> Floats:
        """View an array [n, G, K * R] as [n, groups, rows, K]."""
        if self.R > 1:
            return x.reshape(-1, self.G, self.K, self.R).transpose(0, 1, 3, 2)
        return x.reshape(-1, self.piece.groups, self.piece.rows, self.K)

    def _messages(self, values: Floats, scales: Floats, in_logs: Any) -> Messages:
        shifts, powers = scales.reshape(2, -1, self.piece.groups, self.piece.rows)
        return Messages(self._leave(values), shifts, powers, in_logs)
