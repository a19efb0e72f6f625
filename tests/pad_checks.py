"""Checks of chains padded by `pad_states`, against all paths of the lists before padding."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

import arraylogchain as alc
from tests import error_model, reference
from tests.checks import Given
from tests.conftest import Backend
from tests.error_model import assert_within
from tests.gradient_checks import _exact_posterior, _forward, _options, assert_gradient
from tests.gradient_reference import Gradient
from tests.ragged_checks import _index
from tests.reference import logsumexp, wide


class Row:
    """One chain without batch axes, and what all of its paths add up to."""

    def __init__(self, xs: list, edges: list, start: Any, logs: tuple[bool, bool], dtype: str):
        self.xs, self.edges, self.start, self.logs, self.dtype = xs, edges, start, logs, dtype
        self.sizes = [len(x) for x in xs]
        self.steps = len(xs)
        self.paths = np.array(list(itertools.product(*map(range, self.sizes))), np.int64)
        self.paths = self.paths.reshape(-1, self.steps)
        with np.errstate(divide="ignore"):
            log_edges = edges if logs[0] else [np.log(wide(e)) for e in edges]
            log_start = start if logs[1] or start is None else np.log(wide(start))
        parts = [wide(x)[s] for x, s in zip(xs, self.paths.T, strict=True)]
        pairs = itertools.pairwise(self.paths.T)
        moves = [wide(e)[s, t] for e, (s, t) in zip(log_edges, pairs, strict=True)]
        first = 0 if start is None else wide(log_start)[self.paths[:, 0]]
        self.potentials, self.moves = np.array(parts), np.array(moves)
        with np.errstate(invalid="ignore"):
            self.weights = first + self.potentials.sum(0) + (self.moves.sum(0) if moves else 0)
        self.first = first
        self.log_z = logsumexp(self.weights, axis=-1)
        possible = self.log_z > -np.inf
        self.shares = (
            np.exp(self.weights - self.log_z)
            if possible
            else np.zeros(len(self.paths), np.longdouble)
        )

    def messages(self, i: int) -> tuple[list, list]:
        """Return the logs of sums over paths up to each state of a step, and from it on."""
        before = self.first + self.potentials[: i + 1].sum(0) + self._moved(slice(0, i))
        after = self.potentials[i + 1 :].sum(0) + self._moved(slice(i, None))
        alpha, beta = [], []
        for k in range(self.sizes[i]):
            here = self.paths[:, i] == k
            # Each beginning comes with every end; the ends in state 0 stand for all.
            alpha.append(_log_sum(before[here & ~self.paths[:, i + 1 :].any(1)]))
            beta.append(_log_sum(after[here & ~self.paths[:, :i].any(1)]))
        return alpha, beta

    def _moved(self, steps: slice) -> Any:
        return self.moves[steps].sum(0) if len(self.moves) else 0

    def marginals(self, i: int) -> list:
        return [self.shares[self.paths[:, i] == k].sum() for k in range(self.sizes[i])]

    def counts(self, i: int) -> np.ndarray:
        total = np.zeros((self.sizes[i], self.sizes[i + 1]), np.longdouble)
        np.add.at(total, (self.paths[:, i], self.paths[:, i + 1]), self.shares)
        return total

    def padded(self) -> list:
        """Return the arguments of a chain of the largest size: x, and weights by their form."""
        K = max(self.sizes)
        x = np.full((self.steps, K), -np.inf)
        edges = np.full((max(self.steps - 1, 1), K, K), -np.inf if self.logs[0] else 0.0)
        start = np.full(K, -np.inf if self.logs[1] else 0.0)
        for i, own in enumerate(self.xs):
            x[i, : len(own)] = own
        for i, own in enumerate(self.edges):
            edges[i, : own.shape[0], : own.shape[1]] = own
        start[: self.sizes[0]] = (
            (0.0 if self.logs[1] else 1.0) if self.start is None else self.start
        )
        return [
            x,
            *((None, edges) if self.logs[0] else (edges, None)),
            *((None, start) if self.logs[1] else (start, None)),
        ]


def _log_sum(logs: np.ndarray) -> np.longdouble:
    return logsumexp(logs, axis=-1) if len(logs) else np.longdouble(-np.inf)


class Case:
    """A chain given as lists of arrays, padded by the library.

    Parameters
    ----------
    xs, edges : list of array
    start : array or None
    logs : tuple of bool
        Whether transitions and initial weights are given as logs.
    """

    def __init__(
        self,
        backend: Backend,
        dtype: str,
        xs: list,
        edges: list,
        start: Any = None,
        logs: tuple[bool, bool] = (False, False),
        **options: Any,
    ) -> None:
        self.backend, self.dtype, self.logs = backend, dtype, logs
        self.steps, self.sizes = len(xs), [x.shape[-1] for x in xs]
        self.given = Given(backend, dtype, *xs, *edges, start)
        arrays, T = self.given.arrays, self.steps
        names = [
            "log_transitions" if logs[0] else "transitions",
            "log_initial" if logs[1] else "initial",
        ]
        weights = dict(zip(names, (tuple(arrays[T:-1]), arrays[-1]), strict=True))
        self.padded = alc.pad_states(arrays[:T], **weights)
        weights = dict(zip(names, self.padded[1:3], strict=True))
        self.chain = alc.LogChain(self.padded.log_potentials, **weights, **options)
        # Batch axes of potentials, transitions and initial weights, and of all together.
        self.batches = (
            np.broadcast_shapes(*(x.shape[:-1] for x in xs)),
            np.broadcast_shapes(*(e.shape[:-2] for e in edges)),
            None if start is None else start.shape[:-1],
        )
        self.batch = np.broadcast_shapes(*self.batches[:2], self.batches[2] or ())
        lengths = options.get("lengths")
        self.lengths = np.broadcast_to(T if lengths is None else lengths, self.batch)

    def rows(self) -> Iterator[tuple[tuple[int, ...], Row]]:
        *held, start = self.given.held
        for at in np.ndindex(self.batch):
            T = int(self.lengths[at])
            xs = [x[_index(x.shape[:-1], at)] for x in held[:T]]
            edges = [e[_index(e.shape[:-2], at)] for e in held[self.steps :][: T - 1]]
            own = None if start is None else start[_index(start.shape[:-1], at)]
            yield at, Row(xs, edges, own, self.logs, self.dtype)

    def read(self, x: Any, dtype: str | None = None) -> np.ndarray:
        return self.backend.read(x, dtype or self.dtype)

    def check_padding(self) -> None:
        """Compare the padded arrays with the lists, bit by bit."""
        sizes, T, K, logs = self.sizes, self.steps, max(self.sizes), (True, *self.logs)
        mask = self.read(self.padded.mask, "bool")
        np.testing.assert_array_equal(mask, np.arange(K) < np.array(sizes)[:, None])
        held = self.given.held
        parts = held[:T], held[T:-1], [held[-1]]
        for x, xs, batch, in_logs in zip(self.padded[:3], parts, self.batches, logs, strict=True):
            if batch is None:
                assert x is None
                continue
            core = (K, K) if xs is parts[1] else (K,)
            expected = np.full((*batch, len(xs), *core), -np.inf if in_logs else 0.0)
            for i, part in enumerate(xs):
                own = part.shape[part.ndim - len(core) :]
                expected[(..., i, *map(slice, own))] = part
            expected = expected[..., 0, :] if xs is parts[2] else expected
            np.testing.assert_array_equal(self.read(x), expected.astype(self.read(x).dtype))

    def check_sums(self) -> None:
        """Compare all that are sums over paths, and the gradients of log_partition by vjp."""
        self.check_padding()
        chain, dtype, T, K = self.chain, self.dtype, self.steps, max(self.sizes)
        partition = self.read(chain.log_partition())
        assert partition.shape == self.batch
        names = ("forward_messages", "backward_messages", "marginals")
        forward, backward, marginals = (self.read(getattr(chain, name)()) for name in names)
        counts = self.read(chain.expected_transitions())
        g = Given(self.backend, dtype, np.random.default_rng(0).normal(size=self.batch))
        value, pullback = alc.vjp.log_partition(chain)
        np.testing.assert_array_equal(self.read(value), partition)
        gradients = [x if x is None else self.read(x) for x in pullback(g.arrays[0])[:3]]
        sums = [
            None if x is None else _Sum(x.shape, batch)
            for x, batch in zip(gradients, self.batches, strict=True)
        ]
        count_sum = _Sum(counts.shape, self.batches[1])
        for at, row in self.rows():
            n = row.steps
            cut = row.padded()
            exact, posterior = _forward(cut, dtype), _exact_posterior(cut, dtype, g.held[0][at])
            bound = error_model.chain_bound(row.log_z, exact.partition_gap, n, K, dtype)
            assert_within(partition[at], row.log_z, bound)
            assert np.all(forward[at][n:] == -np.inf)
            assert np.all(backward[at][n:] == -np.inf)
            assert np.all(marginals[at][n:] == 0)
            for i in range(n):
                own = slice(self.sizes[i])
                alpha, beta = (np.array(m) for m in row.messages(i))
                gaps = exact.message_gaps[i, own], posterior.backward_gaps[i, own]
                for ours, sum_, gap in zip((forward, backward), (alpha, beta), gaps, strict=True):
                    bound = error_model.chain_bound(sum_, gap, n, K, dtype)
                    assert_within(ours[at][i, own], sum_, bound)
                assert np.all(forward[at][i, self.sizes[i] :] == -np.inf)
                p = _part(posterior.marginals, (i, own), np.array(row.marginals(i)))
                bound = error_model.posterior_bound(p, n, K, dtype)
                assert_gradient(marginals[at][i, own], p, bound)
                assert not np.any(marginals[at][i, self.sizes[i] :])
                sums[0].add(at, _part(posterior.log_potentials, (i, own)), (i, own))
                if i + 1 < n:
                    place = (i, own, slice(self.sizes[i + 1]))
                    count_sum.add(at, _part(posterior.counts, place, row.counts(i)), place)
                    sums[1].add(at, _part(posterior.transitions, place), place)
            if sums[2] is not None:
                first = (slice(self.sizes[0]),)
                sums[2].add(at, _part(posterior.initial, first), first)
        for ours, expected in zip([counts, *gradients], [count_sum, *sums], strict=True):
            if expected is not None:
                total = expected.total()
                bound = error_model.posterior_bound(total, T, K, dtype)
                assert_gradient(ours, total, bound + expected.rounded(dtype))
        self.given.assert_unchanged()

    def check_paths(self) -> None:
        """Compare viterbi, log weights of all paths, their entropy, and samples."""
        T, K, dtype = self.steps, max(self.sizes), self.dtype
        path = self.chain.viterbi()
        states, weight = self.read(path.states, "int64"), self.read(path.log_weight)
        entropy = self.read(self.chain.entropy())
        samples = self.read(self.chain.sample(30, np.random.default_rng(0)), "int64")
        assert samples.shape == (30, *self.batch, T)
        for at, row in self.rows():
            n, possible = row.steps, row.log_z > -np.inf
            arguments, options = _options(row.padded(), dtype)
            exact = reference.entropy(*arguments, **options)
            bound = error_model.entropy_bound(*exact, n, K, dtype)
            brute = -np.sum(row.shares * np.log(np.where(row.shares > 0, row.shares, 1)))
            assert_within(entropy[at], brute, bound)
            options.pop("log_form_beyond")
            lattice = reference.lattice(*arguments, **options)
            for found in (states[at][None], samples[(slice(None), *at)]):
                assert np.all(found[:, n:] == -1)
                found = found[:, :n]
                assert np.all(found < np.maximum(row.sizes, 1)), "a state that there is not"
                if possible:
                    weights, _ = reference.path_weights(found, lattice)
                    assert np.all(np.isfinite(weights)), "a path of weight 0"
                else:
                    assert not np.any(found)
            if not len(row.paths):
                continue
            best = row.paths[np.argmax(row.weights)] if possible else np.zeros(n, np.int64)
            if possible:
                np.testing.assert_array_equal(states[at][:n], best)
            exact, gap = reference.path_weights(best, lattice)
            exact = exact if possible else -np.inf
            bound = error_model.path_bound(exact, gap, n, K, dtype)
            assert_within(weight[at], np.asarray(exact, np.longdouble), bound)
        self._check_log_weights()
        self.given.assert_unchanged()

    def _check_log_weights(self) -> None:
        paths = np.array(list(itertools.product(*map(range, self.sizes))), np.int64)
        if not len(paths):
            return
        lead = (len(paths), *(1 for _ in self.batch), self.steps)
        given = self.backend.asarray(paths.reshape(lead))
        found = self.read(self.chain.log_weight(given))
        assert found.shape == (len(paths), *self.batch)
        for at, row in self.rows():
            arguments, options = _options(row.padded(), self.dtype)
            options.pop("log_form_beyond")
            own = paths[:, : row.steps]
            _, gap = reference.path_weights(own, reference.lattice(*arguments, **options))
            place = np.ravel_multi_index(tuple(own.T), row.sizes)
            exact = row.weights[place]
            bound = error_model.path_bound(exact, gap, row.steps, max(self.sizes), self.dtype)
            assert_within(found[(slice(None), *at)], exact, bound)


def _part(x: Gradient, place: tuple, exact: np.ndarray | None = None) -> Gradient:
    """Return a part of a gradient, with its exact value if that is known better."""
    parts = {name: getattr(x, name)[place] for name in ("exact", "mass", "gap", "scale")}
    if exact is not None:
        np.testing.assert_allclose(parts["exact"], exact, rtol=1e-12, atol=1e-14)
        parts["exact"] = exact
    return Gradient(**parts, terms=x.terms)


class _Sum:
    """Gradients of rows, added up where rows share an array; 0 for states that do not exist."""

    def __init__(self, shape: tuple[int, ...], batch: tuple[int, ...]) -> None:
        self.batch = batch
        self.parts = {
            name: np.zeros(shape, np.longdouble) for name in ("exact", "mass", "gap", "scale")
        }
        # By step: each has sums of its own.
        self.terms: Counter[str] = Counter()

    def add(self, at: tuple[int, ...], row: Gradient, place: tuple) -> None:
        for name, total in self.parts.items():
            total[_index(self.batch, at)][place] += getattr(row, name)
        self.terms[str(place)] += row.terms

    def total(self) -> Gradient:
        return Gradient(**self.parts, terms=self._most_terms)

    @property
    def _most_terms(self) -> int:
        return max(self.terms.values(), default=1)

    def rounded(self, dtype: str) -> Any:
        """Return what it costs that half precisions are rounded before they are added up."""
        return error_model.half_ulp(self.parts["mass"], dtype) * (2 if self._most_terms > 1 else 0)
