"""The compiled backend: recursions over the segments of a shard, and whole chains in one call."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from arraylogchain._backends.compiled import best_paths, matrices, paths, recursion, suffixes
from arraylogchain._backends.compiled.matrices import EMPTY, FULL
from arraylogchain._backends.compiled.row_blocks import SIDE_BY_SIDE, batch_size, block_sizes
from arraylogchain._backends.compiled.whole_chains import whole_chains
from arraylogchain._backends.interface import (
    BestPaths,
    Keep,
    Messages,
    SegmentMessages,
    Suffixes,
    WholeChains,
)
from arraylogchain._backends.shards import Shard
from arraylogchain._core.context import Array
from arraylogchain._core.scaled import add_scale, split_log
from arraylogchain._numba.compiling import Floats, Integers

# Products in a call for whole chains, which take about half a second: no interrupt ends a call.
_MAX_PRODUCTS = 1 << 32


class CompiledBackend:
    """See `interface.Backend`.

    The compiled loops return arrays [steps, G, K, R]: R rows that share a matrix side by side, or
    each row by itself, R being 1.
    """

    max_useful_rows, holds_matrices = 256, True

    def __init__(self, shard: Shard, workspace: int) -> None:
        self.shard, self.K = shard, shard.chain.num_states
        # Numbers of a call for whole chains. The workspace is a quarter of the shard's memory.
        self.capacity = 3 * workspace // 8
        self.R = shard.rows if shard.rows >= SIDE_BY_SIDE else 1
        # Blocks of R rows that share the matrices of one group.
        self.per_group = shard.rows // self.R
        self.G = shard.groups * self.per_group
        lengths = shard.num_steps if shard.lengths is None else shard.lengths
        self.lengths = np.empty((self.G, self.R), np.int64)
        self.lengths.reshape(shard.groups, shard.rows)[...] = lengths
        self.has_one = shard.chain.has_one_matrix or shard.chain.num_steps == 1
        self.may_be_sparse = (
            self.has_one and shard.groups == 1 and self.K >= matrices.MIN_SPARSE_STATES
        )
        # Whether all rows left linear space forward in a call for whole chains, as they may again.
        self.leaves_linear_space = False
        self._prepared: dict[str, tuple[Any, ...]] = {}

    def advance(
        self, carry: Messages | None, steps: slice, backward: bool, keep: Keep
    ) -> SegmentMessages:
        G, K, R, S = self.G, self.K, self.R, steps.stop - steps.start
        new_carry = weights, scales, forms = self._initial_carry(carry, backward)
        form = "transposed" if backward else "weights"
        x, prepared = self._potentials(steps), self._matrices(form, steps, backward)
        if self.leaves_linear_space and not (backward or steps.start):
            # No weight is at least inf: the first segment is not tried in linear space.
            transitions, bounds, sparse = prepared
            prepared = transitions, (math.inf, *bounds[1:]), sparse
        predicted = np.empty((S, G, K * R) if keep == Keep.ALL else (2, 1, K * R))
        updated = np.empty((2, 1, K * R) if keep == Keep.NOTHING else (S + 1, G, K * R))
        predicted_scales = np.empty((2, S if keep == Keep.ALL else 0, G, R))
        updated_scales = np.empty((2, 0 if keep == Keep.NOTHING else S + 1, G, R))
        stored, scratch = (predicted, updated, predicted_scales, updated_scales), self._scratch()
        count = recursion.advance(
            x, prepared, self.lengths, new_carry, stored, scratch, steps.start, backward
        )
        shifts, exponents, log_sums = scales.reshape(3, self.shard.groups, self.shard.rows)
        is_log = forms.view(bool).reshape(shifts.shape) if count else None  # LOGS is 1, LINEAR 0
        if keep == Keep.UPDATED:
            segment_steps = slice(0, S) if backward else slice(1, None)
            updated, updated_scales = updated[segment_steps], updated_scales[:, segment_steps]
        return SegmentMessages(
            self._messages(predicted, predicted_scales, is_log) if keep == Keep.ALL else None,
            self._messages(updated, updated_scales, is_log) if keep != Keep.NOTHING else None,
            Messages(weights.reshape(*shifts.shape, K), shifts, exponents, is_log, log_sums),
        )

    def max_product(self, carry: Messages | None, steps: slice, keep: Keep) -> SegmentMessages:
        G, K, R, S = self.G, self.K, self.R, steps.stop - steps.start
        new_carry = weights, scales, _ = self._initial_carry(carry, backward=False)
        transitions, _, sparse = self._matrices("logs", steps, backward=False)
        updated = np.empty((S, G, K * R) if keep == Keep.UPDATED else (2, 1, K * R))
        x, scratch = self._potentials(steps), self._scratch()
        arrays = self.lengths, new_carry, updated, scratch
        paths.max_product(x, transitions, sparse, *arrays, steps.start)
        shifts, exponents, _ = scales.reshape(3, self.shard.groups, self.shard.rows)
        is_log = np.ones(shifts.shape, bool)
        carry = Messages(weights.reshape(*shifts.shape, K), shifts, exponents, is_log)
        if keep != Keep.UPDATED:
            return SegmentMessages(None, None, carry)
        stored = Messages(self._to_rows(updated), shifts, exponents, is_log)
        return SegmentMessages(None, stored, carry)

    def best_paths(self) -> BestPaths | None:
        """Return the best paths of few states that share a matrix; None for others."""
        shard, K, T = self.shard, self.K, self.shard.num_steps
        R = shard.groups * shard.rows
        size = R * T * (K + 1) + T
        if size > self.capacity or K > best_paths.MAX_STATES or not self.has_one:
            return None
        (_, *logs, _), *_ = self._matrices("logs", slice(0, T), backward=False)
        final = np.empty((2, 0, K))
        if "final" in shard.views:
            parts = split_log(shard.ctx, *shard.boundary_weights(True))
            final = np.array(parts, np.float64).reshape(2, R, K)
        results = np.empty((R, T), np.int64), np.empty((3, R)), np.empty(R, bool)
        scratch = np.empty(4 * 8 * 8), np.empty(T * 8, np.int8)
        (initial, _), (is_log, _) = self._boundary()
        boundary, lengths = (initial, is_log, final), self.lengths.reshape(R)
        x = self._potentials(slice(0, T)).reshape(R, T, K)
        best_paths.best_paths(x, *logs, lengths, boundary, *scratch, *results)
        shape, (states, log_weights, declined) = (shard.groups, shard.rows), results
        log_weights = add_scale(*log_weights.reshape(3, *shape))
        return BestPaths(states.reshape(*shape, T), log_weights, declined.reshape(shape))

    def log_partition(self, store_messages: bool) -> WholeChains | None:
        """Return log Z of whole chains; None where these do not fit the workspace."""
        return self.posterior(None, (), by_logs=False, stored=None, store_messages=store_messages)

    def posterior(
        self,
        cotangents: Array | None,
        requested: Collection[str],
        by_logs: bool,
        stored: WholeChains | None,
        store_messages: bool = False,
    ) -> WholeChains | None:
        """Return log Z of whole chains, and requested gradients times cotangents.

        None where they exceed the workspace, or would take too long. Without gradients,
        `store_messages` stores the forward messages; with gradients, `stored` is such a result, and
        replaces the forward pass.
        """
        shard, K, T, N = self.shard, self.K, self.shard.num_steps, self.lengths.size
        has_gradients = len(requested) > 0
        count = 1 if self.has_one else max(1, T - 1)
        sizes, memory_size = block_sizes(shard.rows, T, K, count, shard.lengths is not None)
        size = memory_size + 2 * shard.groups * count * K * K
        size += N * T * K * (1 + has_gradients + ("potentials" in requested))
        if size > self.capacity or N * T * K * K > _MAX_PRODUCTS:
            return None
        transitions, is_log = self._transitions(slice(0, count))
        x, boundary = self._potentials(slice(0, T)).reshape(N, T, K), self._boundary()
        chains = x, self.lengths.reshape(N), transitions, is_log, *boundary
        columns = [tuple(FULL)] * (1 + has_gradients)
        if self.may_be_sparse:
            for i, P in enumerate((transitions[0, 0], transitions[0, 0].T)[: len(columns)]):
                F, logs = (EMPTY, P) if is_log else (P, EMPTY)
                columns[i] = tuple(matrices.compress(F, logs))
        row_size = (T + 1) * K if store_messages or stored is not None else 0
        if stored is None:
            length = N * row_size or (T + 1 if has_gradients else 2) * K * sizes[0]
            alpha, log_z, declined = np.empty(length), np.empty(N), np.zeros(N, bool)
        else:
            alpha, log_z = stored.messages, stored.log_z.reshape(N)
            declined = stored.declined.reshape(N).copy()
        g, gradients = None, None
        views: dict[str, Array] = {}
        if has_gradients:
            g = np.ones(N) if cotangents is None else np.array(cotangents, np.float64).reshape(N)
            gradients, views = self._gradients(requested, count, by_logs)
        scratch = np.empty(memory_size), alpha, np.empty((2, sizes[0]), np.int8)
        all_sizes, results = (*sizes, row_size), (log_z, declined)
        arrays = chains, tuple(columns), all_sizes, scratch, g, gradients, results
        self.leaves_linear_space = whole_chains(*arrays) == N
        return WholeChains(
            log_z.reshape(shard.groups, -1),
            views,
            declined.reshape(shard.groups, -1),
            alpha if store_messages else None,
        )

    def _gradients(
        self, requested: Collection[str], num_matrices: int, by_logs: bool
    ) -> tuple[tuple[Any, ...], dict[str, Array]]:
        """Return memory for gradients, as the fields of `Gradients` and by requested names.

        Transitions are 0, as blocks of rows are added to them; all else is undefined.
        """
        shard, K, T = self.shard, self.K, self.shard.num_steps
        with_states, with_pairs = "potentials" in requested, "transitions" in requested
        with_boundary = "initial" in requested or "final" in requested
        states = np.empty((shard.groups * with_states, shard.rows, T, K))
        pairs = np.zeros((shard.groups * with_pairs, 1, num_matrices, K, K))
        initial, final = boundary = np.empty((2, shard.groups * with_boundary, shard.rows, K))
        views = {"potentials": states, "transitions": pairs, "initial": initial, "final": final}
        for name in views.keys() - requested:
            del views[name]
        fields = states.reshape(-1, T, K), pairs[:, 0], boundary.reshape(2, -1, K), by_logs
        return fields, views

    def backtrace(self, updated: Messages, after: Array, steps: slice) -> Array:
        stored = self._from_rows(updated.values)
        states = self._states(after, len(stored), 1)
        transitions, _, sparse = self._matrices("logs", steps, backward=True)
        paths.backtrace(stored, transitions, sparse, self.lengths, states, steps.start)
        return states[:-1].reshape(-1, *after.shape)

    def backtrace_suffixes(
        self, updated: Messages, after: Suffixes, steps: slice
    ) -> tuple[Array, Suffixes]:
        stored, shape = self._from_rows(updated.values), after.losses.shape
        n = shape[-1]
        transitions, _, sparse = self._matrices("logs", steps, backward=True)
        states = np.array(after.states, np.int64, order="C").reshape(self.G, self.R, n)
        losses = np.array(after.losses, np.float64, order="C").reshape(states.shape)
        links = np.empty((len(stored), *states.shape), np.int64)
        candidates = np.empty(2 * n), np.empty(2 * n, np.int64), np.empty(2 * n), np.empty(self.K)
        outputs = (states, losses), links, candidates, steps.start
        suffixes.backtrace_suffixes(stored, transitions, sparse, self.lengths, *outputs)
        return links.reshape(-1, *shape), Suffixes(states.reshape(shape), losses.reshape(shape))

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
        transitions, bounds, _ = self._matrices("weights", steps, backward=True)
        threshold = max(bounds[1], 2.0**-900)  # smaller sums may have lost terms by underflow
        stored = self._from_rows(updated.values)
        is_log, lengths = updated.is_log, self.lengths
        is_log = np.zeros(lengths.shape, bool) if is_log is None else is_log.reshape(lengths.shape)
        u = np.ascontiguousarray(uniforms, np.float64).reshape(-1, *states.shape[1:])
        arrays = lengths, u, states, np.empty(self.K)
        paths.sampling_backtrace(stored, is_log, transitions, threshold, *arrays, steps.start)
        return states[:-1].reshape(-1, *after.shape)

    def _potentials(self, steps: slice) -> Floats:
        """Return potentials as [G, R, n, K], not to be written to."""
        x = np.ascontiguousarray(self.shard.potentials(steps), np.float64)
        potentials = x.reshape(self.G, self.R, -1, self.K)
        potentials.setflags(write=False)  # as callers' may be
        return potentials

    def _transitions(self, steps: slice) -> tuple[Floats, bool]:
        """Return matrices [groups, n, K, K], not to be written to, and whether they are logs.

        Without a transition from these steps they are zeros, which are not read.
        """
        shard = self.shard
        if steps.start >= min(steps.stop, shard.chain.num_steps - 1):
            x, is_log = np.zeros((shard.groups, 1, self.K, self.K)), False
        else:
            x, is_log = shard.matrices(steps), "transitions" in shard.chain.logs
        x = np.ascontiguousarray(x, np.float64).reshape(shard.groups, -1, self.K, self.K)
        x.setflags(write=False)
        return x, is_log

    def _boundary(self) -> tuple[Floats, tuple[bool, bool]]:
        """Return a copy of initial and final weights, [2, G * R, K], and which are logs."""
        weights, are_logs = np.zeros((2, *self.shard.state_shape)), [True, True]
        for i, name in enumerate(("initial", "final")):
            if name in self.shard.views:
                weights[i], are_logs[i] = self.shard.boundary_weights(name == "final")
        return weights.reshape(2, -1, self.K), (are_logs[0], are_logs[1])

    def _initial_carry(self, carry: Messages | None, backward: bool) -> tuple[Floats, Floats, Any]:
        """Return a carry that loops change: weights [G, R, K], scales [3, G, R], forms [G, R]."""
        G, R = self.G, self.R
        scales, forms = np.zeros((3, G, R)), np.zeros((G, R), np.int8)
        if carry is None:
            x, forms[...] = self.shard.boundary_weights(backward)
        else:
            x = carry.values
            forms[...] = 0 if carry.is_log is None else carry.is_log.reshape(G, R)
            scales[0], scales[1] = carry.shifts.reshape(G, R), carry.exponents.reshape(G, R)
        return np.array(x, np.float64, order="C").reshape(G, R, self.K), scales, forms

    def _scratch(self) -> tuple[Floats, Floats]:
        """Return the fields of a `linear_space.Scratch`."""
        width, count = self.K * self.R, batch_size(self.K * self.R)
        return np.empty((count + 4) * width), np.empty((count + 3, self.R))

    def _states(self, after: Array, S: int, n: int) -> Integers:
        """Return memory for states of paths, [S + 1, G, R, n], whose last ones are `after`."""
        states = np.empty((S + 1, self.G, self.R, n), np.int64)
        states[-1] = after.reshape(self.G, self.R, n)
        return states

    def _matrices(self, form: str, steps: slice, backward: bool) -> tuple[Any, ...]:
        """Return matrices, bounds and sparse columns, as in `recursion.PreparedMatrices`.

        The form is 'weights' [from, to], 'transposed' weights [to, from], or 'logs' [from, to],
        which have empty weights, shifts [n] as scales, and None as bounds. Matrices lead from each
        step to the next if `backward`, else from the one before it.
        """
        shard = self.shard
        if form in self._prepared:
            return self._prepared[form]
        if self.has_one:
            requested = slice(0, 1)
        elif backward:
            requested = slice(steps.start, min(steps.stop, shard.chain.num_steps - 1))
        else:
            requested = slice(max(steps.start - 1, 0), steps.stop - 1)
        values, is_log = self._transitions(requested)
        place = values.shape[1], self.per_group, requested.start
        if form == "logs":
            F, (logs, scales), bounds = EMPTY, matrices.logs_of(values, is_log), None
        else:
            transposed = form == "transposed"
            (F, logs, scales), bounds = matrices.prepare(shard.ctx, values, is_log, transposed)
        sparse = tuple(matrices.compress(F, logs) if self.may_be_sparse else FULL)
        result = (F, logs, scales, place), bounds, sparse
        if self.has_one:
            self._prepared[form] = result
        return result

    def _from_rows(self, x: Array) -> Floats:
        """Return messages [n, groups, rows, K] as [n, G, K * R]."""
        x = np.ascontiguousarray(x if self.R == 1 else x.transpose(0, 1, 3, 2))
        return x.reshape(len(x), self.G, self.K * self.R)  # type: ignore[no-any-return]

    def _to_rows(self, x: Floats) -> Floats:
        """View an array [n, G, K * R] as [n, groups, rows, K]."""
        x = x.reshape(-1, self.G, self.K, self.R).transpose(0, 1, 3, 2)
        return x.reshape(-1, self.shard.groups, self.shard.rows, self.K)

    def _messages(self, values: Floats, scales: Floats, is_log: Any) -> Messages:
        shifts, exponents = scales.reshape(2, -1, self.shard.groups, self.shard.rows)
        return Messages(self._to_rows(values), shifts, exponents, is_log)
