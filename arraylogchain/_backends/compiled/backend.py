"""The recursions of a piece of a chain, by loops."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from arraylogchain._backends.compiled import (
    best_paths,
    matrices,
    paths,
    recursion,
    suffixes,
    whole_chains,
)
from arraylogchain._backends.compiled.lanes import memory_size
from arraylogchain._backends.compiled.matrices import FULL
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

# From so many rows on they are taken side by side.
_SIDE_BY_SIDE = 8
# Numbers that are weighed by exponentials which are computed together, and steps at most.
_CHUNK, _CHUNK_STEPS = 4096, 64
_NO_WEIGHTS = np.empty(0)


# Products in a call for whole chains, which take about half a second: no interrupt ends a call.
_MAX_PRODUCTS = 1 << 32
# Lanes of whole chains, at most: of about one length where lengths differ.
_MAX_LANES, _MAX_RAGGED_LANES = 256, 64


@lru_cache(maxsize=256)
def _sizes(
    rows: int, T: int, K: int, num_matrices: int, is_ragged: bool
) -> tuple[tuple[int, int, int], int]:
    """Return the sizes of lanes whose messages of a step fit a cache, and of their scratch.

    The former are rows, steps whose potentials are exponentiated together, and steps of a chunk.
    """
    most = _MAX_RAGGED_LANES if is_ragged else _MAX_LANES
    lanes = min(rows, most, max(_SIDE_BY_SIDE, _CHUNK // K)) if rows >= _SIDE_BY_SIDE else 1
    batch = min(_CHUNK_STEPS, max(1, _CHUNK // (K * lanes)))
    sizes = lanes, batch, max(2, min(T, max(4, 2 * _CHUNK // (K * lanes))))
    return sizes, memory_size(K, num_matrices, *sizes)


class _BoundaryWeights(NamedTuple):
    """Copies of the initial and final weights [groups * rows, K], and whether they are logs."""

    initial: Floats
    final: Floats
    initial_is_log: bool
    final_is_log: bool


class _WholeChainArguments(NamedTuple):
    """Arguments of the loops over whole chains, as plain tuples; see `recursion`."""

    chains: tuple[Any, ...]  # the fields of `lanes.Chains`
    columns: tuple[Any, ...]  # those of `SparseColumns`
    sizes: tuple[int, ...]  # the first three of `lanes.Sizes`
    memory: Floats
    forms: Any  # int8 [2, lanes]


class CompiledBackend:
    """See `interface.Backend`.

    What loops leave are arrays [steps, G, K, R]: R rows that share a matrix side by side, or each
    row by itself, R being 1.
    """

    max_useful_rows, holds_matrices = 256, True

    def __init__(self, shard: Shard, workspace: int) -> None:
        self.shard, self.K, self.workspace = shard, shard.chain.num_states, workspace
        self.R = shard.rows if shard.rows >= _SIDE_BY_SIDE else 1
        # How many of what loops take share the matrices of one group.
        self.per_group = shard.rows // self.R
        self.G = shard.groups * self.per_group
        self.lengths = np.empty((self.G, self.R), np.int64)
        row_lengths = shard.lengths
        self.lengths[...] = (
            shard.num_steps if row_lengths is None else row_lengths.reshape(self.lengths.shape)
        )
        # Room for the factors of so many steps, and some more numbers: [K * R], flat, and [R].
        width = self.K * self.R
        count = min(_CHUNK_STEPS, max(1, _CHUNK // width))
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

    def log_partition(self, store_messages: bool) -> WholeChains | None:
        """Return log Z of whole chains; None where these do not fit the workspace."""
        shard, K = self.shard, self.K
        N, row_size = self.G * self.R, (shard.num_steps + 1) * K if store_messages else 0
        inputs = self._whole_chain_arguments(size=0)
        if inputs is None:
            return None
        chains, columns, sizes, memory, forms = inputs
        alpha = np.empty(N * row_size or 2 * K * sizes[0])
        log_z, declined = np.empty(N), np.empty(N, bool)
        sizes = *sizes, row_size, False
        whole_chains.log_partition(chains, columns, sizes, memory, alpha, forms, log_z, declined)
        shape, messages = (shard.groups, shard.rows), alpha if store_messages else None
        return WholeChains(log_z.reshape(shape), {}, declined.reshape(shape), messages)

    def posterior(
        self,
        cotangents: Array | None,
        requested: Collection[str],
        by_logs: bool,
        stored: WholeChains | None,
    ) -> WholeChains | None:
        """Return log Z and gradients of whole chains; None where these do not fit."""
        shard, K, T, N = self.shard, self.K, self.shard.num_steps, self.G * self.R
        with_states, with_pairs = "potentials" in requested, "transitions" in requested
        with_ends = "initial" in requested or "final" in requested
        inputs = self._whole_chain_arguments(size=N * T * K * (1 + with_states))
        if inputs is None:
            return None
        chains, columns, sizes, memory, forms = inputs
        back_columns = columns
        if len(columns[0]) > 0:
            back_columns = tuple(matrices.columns_of(chains[2][0, 0].T, chains[5]))
        potentials = np.empty((N * with_states, T, K))
        pairs = np.zeros((shard.groups * with_pairs, *chains[2].shape[1:]))
        boundary = np.empty((2, N * with_ends, K))
        row_size = (T + 1) * K
        if stored is None:
            alpha, sizes = np.empty(row_size * sizes[0]), (*sizes, 0, False)
            log_z, declined = np.empty(N), np.empty(N, bool)
        else:
            alpha, sizes = stored.messages, (*sizes, row_size, True)
            log_z, declined = stored.log_z.reshape(N), stored.declined.reshape(N).copy()
        whole_chains.posterior(
            chains,
            columns,
            back_columns,
            sizes,
            memory,
            alpha,
            forms,
            np.ones(N) if cotangents is None else np.array(cotangents, np.float64).reshape(N),
            (potentials, pairs, boundary, by_logs),
            log_z,
            declined,
        )
        shape, results = (shard.groups, shard.rows), {}
        if with_states:
            results["potentials"] = potentials.reshape(*shape, T, K)
        if with_pairs:
            results["transitions"] = pairs[:, None]
        for i, name in enumerate(("initial", "final") if with_ends else ()):
            if name in requested:
                results[name] = boundary[i].reshape(*shape, K)
        return WholeChains(log_z.reshape(shape), results, declined.reshape(shape))

    def _whole_chain_arguments(self, size: int) -> _WholeChainArguments | None:
        """Return these arguments; None if they and `size` more numbers do not fit the workspace."""
        shard, K, T, N = self.shard, self.K, self.shard.num_steps, self.G * self.R
        count = 1 if self.has_one else max(1, T - 1)
        sizes, scratch_size = _sizes(shard.rows, T, K, count, shard.lengths is not None)
        size += scratch_size + N * T * K + 2 * shard.groups * count * K * K
        if 8 * size > 3 * self.workspace or N * T * K * K > _MAX_PRODUCTS:
            return None
        transitions, is_log = self._transitions(count)
        initial, final, *boundary_is_log = self._boundary()
        x = self._potentials(slice(0, T)).reshape(N, T, K)
        chains = x, self.lengths.reshape(N), transitions, initial, final, is_log, *boundary_is_log
        columns = FULL
        if self.has_one and shard.groups == 1 and K >= matrices.MIN_SPARSE_STATES:
            columns = matrices.columns_of(transitions[0, 0], is_log)
        memory, forms = np.empty(scratch_size), np.empty((2, sizes[0]), np.int8)
        return _WholeChainArguments(chains, tuple(columns), sizes, memory, forms)

    def _transitions(self, count: int) -> tuple[Floats, bool]:
        """Return the matrices [groups, count, K, K] as given, and whether they are logs."""
        shard, K = self.shard, self.K
        if shard.chain.num_steps == 1:
            x: Any = np.zeros((shard.groups, count, K, K))
        else:
            x = np.ascontiguousarray(shard.matrices(slice(0, count)), np.float64)
        x = x.reshape(shard.groups, count, K, K)
        x.setflags(write=False)
        return x, "transitions" in shard.chain.logs

    def _boundary(self) -> _BoundaryWeights:
        """Return copies of the initial and final weights, [G * R, K]."""
        shape, views = (self.G * self.R, self.K), self.shard.views
        initial = final = np.zeros(shape)
        initial_is_log = final_is_log = True
        if "initial" in views:
            x, initial_is_log = self.shard.boundary_weights(False)
            initial = np.array(x, np.float64, order="C").reshape(shape)
        if "final" in views:
            x, final_is_log = self.shard.boundary_weights(True)
            final = np.array(x, np.float64, order="C").reshape(shape)
        return _BoundaryWeights(initial, final, initial_is_log, final_is_log)

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

    def _potentials(self, steps: slice) -> Floats:
        """Return potentials as [G, R, n, K], not to be written to."""
        x = np.ascontiguousarray(self.shard.potentials(steps), np.float64)
        potentials = x.reshape(self.G, self.R, -1, self.K)
        potentials.setflags(write=False)  # as callers' may be
        return potentials

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
