"""Checks of chains with lengths: every row is compared with the reference of its first steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import arraylogchain as alc
from tests import error_model, reference
from tests.checks import Given
from tests.conftest import Backend
from tests.error_model import assert_within
from tests.gradient_checks import _exact_posterior, _forward, _options, assert_gradient
from tests.gradient_reference import Gradient, Posterior
from tests.reference import BestPath, Lattice

NAMES = ("x", "transitions", "log_transitions", "initial", "log_initial")
CORE = (2, 3, 3, 1, 1)  # axes that are no batch axes


class Ragged:
    """A chain with lengths, handed to the library with garbage wherever no row reads."""

    def __init__(
        self,
        backend: Backend,
        dtype: str,
        x: Any,
        lengths: Any,
        *,
        garbage: float = np.nan,
        workspace: int | None = None,
        **options: Any,
    ) -> None:
        self.backend, self.dtype = backend, dtype
        arrays = [np.array(x, float), *(options.get(name) for name in NAMES[1:])]
        arrays = [None if a is None else np.array(a, float) for a in arrays]
        batches = [
            a.shape[: a.ndim - n] for a, n in zip(arrays, CORE, strict=True) if a is not None
        ]
        self.batch = np.broadcast_shapes(*batches)
        self.lengths = np.broadcast_to(lengths, self.batch)
        self.steps, self.size = arrays[0].shape[-2:]
        for array, n in zip(arrays[:3], CORE, strict=False):
            if array is not None:
                array[~self._is_read(array, n)] = garbage
        self.given = Given(backend, dtype, *arrays)
        options = {
            name: a for name, a in zip(NAMES, self.given.arrays, strict=True) if a is not None
        }
        self.chain = alc.LogChain(options.pop("x"), **options, lengths=lengths, workspace=workspace)

    def _is_read(self, array: np.ndarray, core: int) -> np.ndarray:
        """Tell which steps of an array some row reads, as a mask over all but its last axes."""
        batch = array.shape[: array.ndim - core]
        mask = np.zeros((*batch, array.shape[len(batch)]), bool)
        for at in np.ndindex(self.batch):
            mask[_index(batch, at)][self._part(array, core, at)] = True
        return mask

    def _part(self, array: np.ndarray, core: int, at: tuple[int, ...]) -> slice:
        """Return the steps of an array that a row reads."""
        length = int(self.lengths[at])
        if core == 1:
            return slice(None)
        if core == 2:
            return slice(length)
        return slice(min(length - 1, array.shape[-3]))

    def rows(self) -> Iterator[tuple[tuple[int, ...], list]]:
        """Yield every row's place in the batch, and its arrays cut to its length."""
        for at in np.ndindex(self.batch):
            cut = []
            for array, core in zip(self.given.held, CORE, strict=True):
                if array is not None:
                    batch = array.shape[: array.ndim - core]
                    array = array[_index(batch, at)][self._part(array, core, at)]
                    # Of a matrix for every step, a single step has none.
                    array = np.zeros((1, *array.shape[1:])) if array.shape[0] == 0 else array
                cut.append(array)
            yield at, cut

    def read(self, x: Any, dtype: str | None = None) -> np.ndarray:
        return self.backend.read(x, dtype or self.dtype)

    def check_sums(self) -> None:
        """Compare all that are sums over paths, and the gradients of log_partition by vjp."""
        chain, K = self.chain, self.size
        partition = self.read(chain.log_partition())
        forward, backward, marginals = (
            self.read(x)
            for x in (chain.forward_messages(), chain.backward_messages(), chain.marginals())
        )
        assert partition.shape == self.batch
        for states in (forward, backward, marginals):
            assert states.shape == (*self.batch, self.steps, K)
        g = Given(self.backend, self.dtype, np.random.default_rng(0).normal(size=self.batch))
        _, pullback = alc.vjp.log_partition(chain)
        gradients = pullback(g.arrays[0])

        x, linear, logs, p0, log_p0 = self.given.held
        edges, start = (linear if logs is None else logs), (p0 if log_p0 is None else log_p0)
        counts, sums = _Sums(edges, 3), [_Sums(x, 2), _Sums(edges, 3), _Sums(start, 1)]
        for at, cut in self.rows():
            T = int(self.lengths[at])
            exact, posterior = _once(_exact_row, cut, self.dtype, float(g.held[0][at]))
            self._assert_log(partition[at], exact.log_partition, exact.partition_gap, T)
            count = np.arange(1, T + 1)[:, None]
            self._assert_log(forward[at][:T], exact.messages, exact.message_gaps, count)
            back = posterior.backward, posterior.backward_gaps
            self._assert_log(backward[at][:T], *back, count[::-1])
            bound = error_model.posterior_bound(posterior.marginals, T, K, self.dtype)
            assert_gradient(marginals[at][:T], posterior.marginals, bound)
            assert np.all(forward[at][T:] == -np.inf)
            assert np.all(backward[at][T:] == -np.inf)
            assert np.all(marginals[at][T:] == 0)
            counts.add(at, slice(T - 1), posterior.counts)
            parts = (slice(T), slice(T - 1), slice(None))
            of_row = (posterior.log_potentials, posterior.transitions, posterior.initial)
            for total, part, gradient in zip(sums, parts, of_row, strict=True):
                total.add(at, part, gradient)
        if edges is not None:
            self._assert_gradient(self.read(chain.expected_transitions()), counts)
        for found, expected in zip(gradients[:3], sums, strict=True):
            if expected.shape is None:
                assert found is None
            else:
                self._assert_gradient(self.read(found), expected)
        self.given.assert_unchanged()

    def check_paths(self) -> None:
        """Compare viterbi, log_weight of that path and of any other, and the entropy."""
        rng = np.random.default_rng(1)
        path = self.chain.viterbi()
        states, weight = self.read(path.states, "int64"), self.read(path.log_weight)
        entropy = self.read(self.chain.entropy())
        # Past the end a state may be anything.
        others = rng.integers(0, self.size, states.shape)
        past = np.arange(self.steps) >= self.lengths[..., None]
        others = np.where(past, rng.choice([-1, 0, 10**6], states.shape), others)
        both = self.backend.asarray(np.stack([states, others]))
        weights = self.read(self.chain.log_weight(both))
        assert np.all(states[past] == -1)
        for at, cut in self.rows():
            T, K = int(self.lengths[at]), self.size
            exact, lattice, best = _once(_exact_paths, cut, self.dtype)
            bound = error_model.entropy_bound(*exact, T, K, self.dtype)
            assert_within(entropy[at], exact.entropy, bound)
            # The draws of the tests have one best path, by far more than rounding.
            np.testing.assert_array_equal(states[at][:T], best.states)
            self._assert_log(weight[at], *reference.path_weights(best.states, lattice), T)
            for i, given in enumerate((states, others)):
                exact, gap = reference.path_weights(given[at][:T], lattice)
                self._assert_log(weights[i][at], exact, gap, T)

    def _assert_log(self, found: Any, exact: Any, gap: Any, steps: Any) -> None:
        bound = error_model.chain_bound(exact, gap, steps, self.size, self.dtype)
        assert_within(np.asarray(found), np.asarray(exact), bound)

    def _assert_gradient(self, found: np.ndarray, expected: _Sums) -> None:
        total = expected.total()
        bound = error_model.posterior_bound(total, self.steps, self.size, self.dtype)
        largest = error_model.LARGEST_DERIVATIVE[error_model.compute_dtype(self.dtype)]
        assert_gradient(found, total, bound, largest)


class _Sums:
    """Gradients of rows, added up where rows share an array."""

    def __init__(self, array: np.ndarray | None, core: int) -> None:
        self.shape = None if array is None else array.shape
        if array is not None:
            self.batch = array.shape[: array.ndim - core]
            self.parts = {
                name: np.zeros(array.shape, np.longdouble)
                for name in ("exact", "mass", "gap", "scale")
            }
            self.terms = 0

    def add(self, at: tuple[int, ...], steps: slice, row: Gradient | None) -> None:
        if self.shape is None or row is None:
            return
        for name, total in self.parts.items():
            part, own = getattr(row, name), total[_index(self.batch, at)]
            if own.shape == part.shape:
                own += part
            else:
                own[steps] += part[: len(own[steps])]
        self.terms += row.terms

    def total(self) -> Gradient:
        return Gradient(**self.parts, terms=max(self.terms, 1))


_KNOWN: dict[tuple, Any] = {}


def _once(compute: Callable[..., Any], cut: list, *rest: Any) -> Any:
    """Return what is exact for a row; it is the same for all libraries."""
    arrays = (None if a is None else (a.shape, a.dtype.name, a.tobytes()) for a in cut)
    key = (compute, *arrays, *rest)
    if key not in _KNOWN:
        _KNOWN[key] = compute(cut, *rest)
    return _KNOWN[key]


def _exact_row(cut: list, dtype: str, g: float) -> tuple[reference.Chain, Posterior]:
    return _forward(cut, dtype), _exact_posterior(cut, dtype, g)


def _exact_paths(cut: list, dtype: str) -> tuple[reference.Entropy, Lattice, BestPath]:
    arguments, options = _options(cut, dtype)
    exact = reference.entropy(*arguments, **options)
    options.pop("log_form_beyond")
    lattice = reference.lattice(*arguments, **options)
    return exact, lattice, reference.best_path(lattice)


def _index(batch: tuple[int, ...], at: tuple[int, ...]) -> tuple[int, ...]:
    """Return where an array with these batch axes holds what the row at `at` reads."""
    own = at[len(at) - len(batch) :]
    return tuple(i if n > 1 else 0 for i, n in zip(own, batch, strict=True))
