"""Calls of the loops over whole chains: log Z, posteriors and gradients of a shard."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from arraylogchain._backends.compiled import matrices, whole_chains
from arraylogchain._backends.compiled.lanes import memory_size
from arraylogchain._backends.compiled.matrices import FULL
from arraylogchain._backends.interface import WholeChains
from arraylogchain._backends.shards import Shard
from arraylogchain._core.context import Array
from arraylogchain._numba.compiling import Floats

# From so many rows on they are taken side by side.
SIDE_BY_SIDE = 8
# Numbers that are weighed by exponentials which are computed together, and steps at most.
CHUNK, CHUNK_STEPS = 4096, 64
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
    lanes = min(rows, most, max(SIDE_BY_SIDE, CHUNK // K)) if rows >= SIDE_BY_SIDE else 1
    batch = min(CHUNK_STEPS, max(1, CHUNK // (K * lanes)))
    sizes = lanes, batch, max(2, min(T, max(4, 2 * CHUNK // (K * lanes))))
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


class WholeChainCalls:
    """The methods of `CompiledBackend` that compute whole chains in one call.

    Attributes
    ----------
    shard : Shard
    K, G, R : int
        States, groups of rows that share a matrix, and rows of each.
    lengths : array [G, R]
    has_one : bool
        Whether one matrix stands for every step.
    workspace : int
    """

    shard: Shard
    K: int
    G: int
    R: int
    lengths: Any
    has_one: bool
    workspace: int

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

    def _potentials(self, steps: slice) -> Floats:
        """Return potentials as [G, R, n, K], not to be written to."""
        x = np.ascontiguousarray(self.shard.potentials(steps), np.float64)
        potentials = x.reshape(self.G, self.R, -1, self.K)
        potentials.setflags(write=False)  # as callers' may be
        return potentials
