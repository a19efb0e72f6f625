"""The compiled backend: recursions over the segments of a shard."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraylogchain._backends.compiled import (
    best_paths,
    matrices,
    paths,
    recursion,
    suffixes,
)
from arraylogchain._backends.compiled.matrices import FULL
from arraylogchain._backends.compiled.whole_chain_calls import (
    CHUNK,
    CHUNK_STEPS,
    SIDE_BY_SIDE,
    WholeChainCalls,
)
from arraylogchain._backends.interface import (
    BestPaths,
    Keep,
    Messages,
    SegmentMessages,
    Suffixes,
)
from arraylogchain._backends.shards import Shard
from arraylogchain._core.context import Array
from arraylogchain._core.scaled import add_scale, split_log
from arraylogchain._numba.compiling import Floats, Integers

_NO_WEIGHTS = np.empty(0)


class CompiledBackend(WholeChainCalls):
    """See `interface.Backend`.

    The compiled loops return arrays [steps, G, K, R]: R rows that share a matrix side by side, or
    each row by itself, R being 1.
    """

    max_useful_rows, holds_matrices = 256, True

    def __init__(self, shard: Shard, workspace: int) -> None:
        self.shard, self.K, self.workspace = shard, shard.chain.num_states, workspace
        self.R = shard.rows if shard.rows >= SIDE_BY_SIDE else 1
        # Blocks of R rows that share the matrices of one group.
        self.per_group = shard.rows // self.R
        self.G = shard.groups * self.per_group
        self.lengths = np.empty((self.G, self.R), np.int64)
        row_lengths = shard.lengths
        self.lengths[...] = (
            shard.num_steps if row_lengths is None else row_lengths.reshape(self.lengths.shape)
        )
        # Room for the factors of so many steps, and some more numbers: [K * R], flat, and [R].
        width = self.K * self.R
        count = min(CHUNK_STEPS, max(1, CHUNK // width))
        self.scratch = (count + 4) * width, (count + 3, self.R)
        self.has_one = shard.chain.has_one_matrix or shard.chain.num_steps == 1
        self._prepared: dict[tuple[str, bool], Any] = {}

    def advance(
        self, carry: Messages | None, steps: slice, backward: bool, keep: Keep
    ) -> SegmentMessages:
        G, K, R, S = self.G, self.K, self.R, steps.stop - steps.start
        new_carry = weights, scales, forms = self._initial_carry(carry, backward)
        (prepared, bounds, sparse), first = self._matrices("weights", steps, backward)
        predicted = np.empty((S, G, K * R) if keep == Keep.ALL else (2, 1, K * R))
        updated = np.empty((2, 1, K * R) if keep == Keep.NOTHING else (S + 1, G, K * R))
        predicted_scales = np.empty((2, S if keep == Keep.ALL else 0, G, R))
        updated_scales = np.empty((2, 0 if keep == Keep.NOTHING else S + 1, G, R))
        x, edges = self._potentials(steps), (*prepared, self.per_group, first)
        stored, place = (
            (predicted, updated, predicted_scales, updated_scales),
            (steps.start, backward),
        )
        scratch = np.empty(self.scratch[0]), np.empty(self.scratch[1])
        count = recursion.advance(
            x, edges, bounds, sparse, self.lengths, new_carry, stored, scratch, *place
        )
        shifts, exponents, log_sums = scales.reshape(3, self.shard.groups, self.shard.rows)
        is_log = forms.view(bool).reshape(shifts.shape) if count else None  # LOGS is 1, LINEAR 0
        if keep == Keep.UPDATED:
            own_steps = slice(0, S) if backward else slice(1, None)
            updated, updated_scales = updated[own_steps], updated_scales[:, own_steps]
        return SegmentMessages(
            self._messages(predicted, predicted_scales, is_log) if keep == Keep.ALL else None,
            self._messages(updated, updated_scales, is_log) if keep != Keep.NOTHING else None,
            Messages(weights.reshape(*shifts.shape, K), shifts, exponents, is_log, log_sums),
        )

    def max_product(self, carry: Messages | None, steps: slice, keep: Keep) -> SegmentMessages:
        G, K, R, S = self.G, self.K, self.R, steps.stop - steps.start
        new_carry = weights, scales, _ = self._initial_carry(carry, backward=False)
        (edges, sparse), first = self._matrices("logs", steps, False)
        updated = np.empty((S, G, K * R) if keep == Keep.UPDATED else (2, 1, K * R))
        x, edges = self._potentials(steps), (*edges, self.per_group, first)
        scratch = np.empty(self.scratch[0]), np.empty(self.scratch[1])
        paths.max_product(x, edges, sparse, self.lengths, new_carry, updated, scratch, steps.start)
        shifts, exponents, _ = scales.reshape(3, self.shard.groups, self.shard.rows)
        is_log = np.ones(shifts.shape, bool)
        stored = (
            Messages(self._to_rows(updated), shifts, exponents, is_log)
            if keep == Keep.UPDATED
            else None
        )
        carry = Messages(weights.reshape(*shifts.shape, K), shifts, exponents, is_log)
        return SegmentMessages(None, stored, carry)

    def best_paths(self) -> BestPaths | None:
        """Return the best paths of few states that share a matrix; None for others."""
        shard, K, T = self.shard, self.K, self.shard.num_steps
        R = shard.groups * shard.rows
        if K > best_paths.MAX_STATES or not self.has_one:
            return None
        if 3 * self.workspace < 8 * (R * T * (K + 1) + T):
            return None
        V = 4 if K <= 4 else 8
        ((logs, shifts, _), _), _ = self._matrices("logs", slice(0, T), False)
        weights = self._boundary()
        final = np.zeros((2, R if "final" in shard.views else 0, K))
        if "final" in shard.views:
            final.reshape(2, *shard.state_shape)[:] = split_log(
                shard.ctx, *shard.boundary_weights(True)
            )
        states, log_weights = np.empty((R, T), np.int64), np.empty((3, R))
        declined, came_from = np.empty(R, bool), np.empty(T * V, np.int8)
        best_paths.best_paths(
            self._potentials(slice(0, T)).reshape(R, T, K),
            logs,
            shifts,
            self.lengths.reshape(R),
            (weights.initial, weights.initial_is_log, final),
            np.empty(4 * V * V),
            came_from,
            states,
            log_weights,
            declined,
        )
        shape = shard.groups, shard.rows
        log_weights = add_scale(*log_weights.reshape(3, *shape))
        return BestPaths(states.reshape(*shape, T), log_weights, declined.reshape(shape))

    def backtrace(self, updated: Messages, after: Array, steps: slice) -> Array:
        stored = self._from_rows(updated.values)
        states = self._states(after, len(stored), 1)
        (edges, sparse), first = self._matrices("logs", steps, True)
        edges = *edges, self.per_group, first
        paths.backtrace(stored, edges, sparse, self.lengths, states, steps.start)
        return states[:-1].reshape(-1, *after.shape)

    def backtrace_suffixes(
        self, updated: Messages, after: Suffixes, steps: slice
    ) -> tuple[Array, Suffixes]:
        stored, lead = self._from_rows(updated.values), after.losses.shape
        n = lead[-1]
        (edges, sparse), first = self._matrices("logs", steps, True)
        states = np.array(after.states, np.int64, order="C").reshape(self.G, self.R, n)
        losses = np.array(after.losses, np.float64, order="C").reshape(states.shape)
        links = np.empty((len(stored), *states.shape), np.int64)
        candidates = np.empty(2 * n), np.empty(2 * n, np.int64), np.empty(2 * n), np.empty(self.K)
        edges, both = (*edges, self.per_group, first), (states, losses)
        place = both, links, candidates, steps.start
        suffixes.backtrace_suffixes(stored, edges, sparse, self.lengths, *place)
        return links.reshape(-1, *lead), Suffixes(states.reshape(lead), losses.reshape(lead))

    def follow(self, links: Array, numbers: Array) -> tuple[Array, Array]:
        shape = len(links), self.G, self.R, links.shape[-1]
        numbers, states = np.array(numbers, order="C"), np.empty(shape, np.int64)
        contiguous = np.ascontiguousarray(links).reshape(shape)
        suffixes.follow(contiguous, numbers.reshape(shape[1:]), states, self.K)
        return states.reshape(links.shape), numbers

    def sampling_backtrace(
        self, updated: Messages, after: Array, steps: slice, uniforms: Array
    ) -> Array:
        states = self._states(after, len(uniforms), after.shape[-1])
        ((F, logs, _, count), bounds, _), first = self._matrices("weights", steps, True)
        edges, threshold = (F, logs, count, self.per_group, first), max(bounds[1], 2.0**-900)
        stored = self._from_rows(updated.values)
        is_log = np.zeros((self.G, self.R), bool)
        is_log[...] = False if updated.is_log is None else updated.is_log.reshape(is_log.shape)
        u = np.ascontiguousarray(uniforms, np.float64).reshape(-1, *states.shape[1:])
        scratch, lengths = np.empty(self.K), self.lengths
        paths.sampling_backtrace(
            stored, is_log, edges, threshold, lengths, u, states, scratch, steps.start
        )
        return states[:-1].reshape(-1, *after.shape)

    def _initial_carry(self, carry: Messages | None, backward: bool) -> tuple[Floats, Floats, Any]:
        """Return a state as loops change it: weights [G, R, K], scales [3, G, R], forms [G, R]."""
        G, R = self.G, self.R
        scales, forms = np.zeros((3, G, R)), np.zeros((G, R), np.int8)
        if carry is None:
            x, forms[...] = self.shard.boundary_weights(backward)
        else:
            x = carry.values
            forms[...] = 0 if carry.is_log is None else carry.is_log.reshape(G, R)
            scales[0], scales[1] = carry.shifts.reshape(G, R), carry.exponents.reshape(G, R)
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
        shard, last = self.shard, self.shard.chain.num_steps - 1
        key = form, backward and form == "weights"
        if key in self._prepared:
            return self._prepared[key], 0
        if self.has_one:
            requested = slice(0, int(last > 0))
        elif backward:
            requested = slice(steps.start, min(steps.stop, last))
        else:
            requested = slice(max(steps.start - 1, 0), steps.stop - 1)
        if requested.start < requested.stop:
            values, is_log = shard.matrices(requested), "transitions" in shard.chain.logs
        else:  # of which none is read
            values, is_log = np.zeros((shard.groups, 1, self.K, self.K)), False
        prepared: Any
        if form == "logs":
            logs = matrices.logs_of(values, is_log)
            prepared = logs, self._compressed(_NO_WEIGHTS, logs[0])
        else:
            weights, bounds = matrices.prepare(shard.ctx, values, is_log, backward)
            prepared = weights, bounds, self._compressed(*weights[:2])
        if self.has_one:
            self._prepared[key] = prepared
        return prepared, requested.start

    def _compressed(self, F: Floats, logs: Floats) -> tuple[Any, ...]:
        """Return the `SparseColumns` of the one matrix of a shard, which compiled loops name."""
        is_shared = self.has_one and self.shard.groups == 1
        return tuple(matrices.compress(F, logs) if is_shared else FULL)

    def _from_rows(self, x: Array) -> Floats:
        """Lay out what was kept, [n, groups, rows, K], as [n, G, K * R]."""
        x = np.ascontiguousarray(x if self.R == 1 else x.transpose(0, 1, 3, 2))
        return x.reshape(len(x), self.G, self.K * self.R)  # type: ignore[no-any-return]

    def _to_rows(self, x: Floats) -> Floats:
        """View an array [n, G, K * R] as [n, groups, rows, K]."""
        if self.R > 1:
            return x.reshape(-1, self.G, self.K, self.R).transpose(0, 1, 3, 2)
        return x.reshape(-1, self.shard.groups, self.shard.rows, self.K)

    def _messages(self, values: Floats, scales: Floats, is_log: Any) -> Messages:
        shifts, exponents = scales.reshape(2, -1, self.shard.groups, self.shard.rows)
        return Messages(self._to_rows(values), shifts, exponents, is_log)
