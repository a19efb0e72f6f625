"""Checks of every operation of a chain, on any library, against one reference and error model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import arraylogchain as alc
from tests import error_model
from tests.chain_reference import PARTS, Exact
from tests.conftest import Backend
from tests.error_model import assert_gradient, assert_within

NAMES = ("log_potentials", "transitions", "log_transitions", "initial", "log_initial")
NAMES = (*NAMES, "final", "log_final")
AXES = dict(zip(NAMES, (2, 3, 3, 1, 1, 1, 1), strict=True))


def check_chain(
    backend: Backend, dtype: str, x: Any, *, only: tuple[str, ...] = (), **options: Any
) -> ChainCase:
    """Compare every operation of a chain with the reference, or those that are named.

    `options` are `LogChain`'s; `garbage` is written wherever no row reads.
    """
    case = ChainCase(backend, dtype, x, **options)
    for name in only or CHECKS:
        CHECKS[name](case)
    case.assert_unchanged()
    return case


class ChainCase:
    """A chain handed to a library, and the reference of the numbers that it was handed."""

    def __init__(
        self,
        backend: Backend,
        dtype: str,
        x: Any,
        *,
        lengths: Any = None,
        garbage: float = np.nan,
        workspace: int | None = None,
        **weights: Any,
    ) -> None:
        self.backend, self.dtype, self.workspace = backend, dtype, workspace
        arrays = {"log_potentials": x, **weights}
        arrays = {n: np.array(a, float) for n, a in arrays.items() if a is not None}
        if lengths is not None:
            fill_in_garbage(arrays, lengths, garbage)
        with np.errstate(over="ignore"):
            self.arguments = {n: backend.asarray(a, dtype) for n, a in arrays.items()}
        self.held = {n: np.array(backend.to_numpy(a)) for n, a in self.arguments.items()}
        self.lengths = lengths
        self.exact = exact_of(self.held, lengths)
        self.batch, self.T, self.K = self.exact.batch, self.exact.T, self.exact.K
        self.chain = self.make()

    def make(self, **arrays: Any) -> alc.LogChain:
        """Return the chain of what was given, or of other arrays of the same names."""
        options = {**self.arguments, **arrays}
        x = options.pop("log_potentials")
        return alc.LogChain(x, **options, lengths=self.lengths, workspace=self.workspace)

    def read(self, x: Any, dtype: str | None = None) -> np.ndarray:
        """Return a result with one axis for all rows, having checked its kind, dtype and shape."""
        result = self.backend.read(x, dtype or self.dtype)
        assert result.shape[: len(self.batch)] == self.batch, f"{result.shape}, batch {self.batch}"
        return result.reshape(self.exact.rows, *result.shape[len(self.batch) :])

    def assert_unchanged(self) -> None:
        for name, array in self.arguments.items():
            np.testing.assert_array_equal(self.backend.to_numpy(array), self.held[name])

    def assert_logs(self, result: np.ndarray, exact: Any, gap: Any, steps: Any) -> None:
        bound = error_model.chain_bound(exact, gap, steps, self.K, self.dtype)
        assert_within(result, exact, bound)

    def assert_gradient(self, result: Any, expected: Any, limit: float = np.inf) -> None:
        result = self.backend.read(result, self.dtype)
        bound = error_model.posterior_bound(expected, self.T, self.K, self.dtype)
        assert_gradient(result, expected, bound, limit)

    @property
    def special(self) -> np.ndarray:
        """Tell which rows have weights that are NaN or lead to +inf."""
        z = self.exact.log_partition[0]
        return ~np.isfinite(z) & (z != -np.inf) | self.exact.broken


def check_log_partition(case: ChainCase, result: Any = None) -> None:
    result = case.read(case.chain.log_partition() if result is None else result)
    case.assert_logs(result, *case.exact.log_partition, case.exact.lengths)


def check_messages(case: ChainCase) -> None:
    exact, count = case.exact, np.arange(1, case.T + 1)[:, None]
    for way, result in (
        ("forward", case.chain.forward_messages()),
        ("backward", case.chain.backward_messages()),
    ):
        messages = getattr(exact, way)
        logs = messages.full + messages.offset
        if way == "backward":
            logs = messages.bare + messages.bare_offset
        gaps = messages.full_gaps if way == "forward" else messages.bare_gaps
        steps = count if way == "forward" else exact.lengths[:, None, None] - count + 1
        logs = np.where(exact.valid_steps[..., None], logs, -np.inf)
        case.assert_logs(case.read(result), logs, gaps, steps)


def check_posterior(case: ChainCase) -> None:
    """Check marginals and counts, alone and together with log Z."""
    chain, exact = case.chain, case.exact
    together = chain.posterior()
    assert together._fields == ("log_partition", "marginals", "expected_transitions")
    check_log_partition(case, together.log_partition)
    for result in (chain.marginals(), together.marginals):
        case.assert_gradient(result, exact.marginals())
        assert not np.any(case.backend.to_numpy(result) < 0)
    if "transitions" not in exact.shapes:
        assert together.expected_transitions is None
        return
    for result in (chain.expected_transitions(), together.expected_transitions):
        case.assert_gradient(result, exact.counts())
        assert not np.any(case.backend.to_numpy(result) < 0)


def check_gradients(case: ChainCase, g: Any = None) -> None:
    """Check value and gradients by every part, and in torch those of its autograd."""
    g = np.random.default_rng(0).normal(size=case.batch) if g is None else g
    arguments = case.backend.asarray(g, case.dtype)
    value, pullback = alc.vjp.log_partition(case.chain)
    check_log_partition(case, value)
    result = pullback(arguments)
    assert result._fields == PARTS
    check_parts(case, result._asdict(), case.backend.to_numpy(arguments))
    for first, again in zip(result, pullback(arguments), strict=True):
        if first is not None:
            np.testing.assert_array_equal(*map(case.backend.to_numpy, (first, again)))
    if case.backend.library == "torch":
        leaves = {n: a.clone().requires_grad_() for n, a in case.arguments.items()}
        case.make(**leaves).log_partition().backward(arguments)
        grads = {n.removeprefix("log_"): a.grad for n, a in leaves.items() if n != "log_potentials"}
        grads["log_potentials"] = leaves["log_potentials"].grad
        check_parts(case, grads, case.backend.to_numpy(arguments))


def check_parts(case: ChainCase, result: dict[str, Any], g: np.ndarray) -> None:
    largest = error_model.LARGEST_DERIVATIVE[error_model.compute_dtype(case.dtype)]
    largest *= float(np.max(np.abs(g), initial=0))
    for part in PARTS:
        if part not in case.exact.shapes:
            assert result.get(part) is None
            continue
        is_linear = part != "log_potentials" and not case.exact.is_log[part]
        limit = largest if is_linear else np.inf
        case.assert_gradient(result[part], case.exact.gradient(part, g), limit)


def check_filtered(case: ChainCase) -> None:
    result = case.chain.filtered()
    assert result._fields == ("probabilities", "log_normalizers")
    steps = np.arange(1, case.T + 1)
    bounds = error_model.filtered_bounds(*case.exact.filtered, steps, case.K, case.dtype)
    assert_within(case.read(result.probabilities), case.exact.filtered[0], bounds[0])
    assert_within(case.read(result.log_normalizers), case.exact.filtered[1], bounds[1])


def check_entropy(case: ChainCase) -> None:
    result = case.read(case.chain.entropy())
    exact = case.exact.entropy
    bound = error_model.entropy_bound(*exact, case.exact.lengths, case.K, case.dtype)
    assert_within(result, exact[0], bound)


def check_paths(case: ChainCase) -> tuple[np.ndarray, np.ndarray]:
    """Check that no path is better than the one returned, its weight, and that of another.

    Two paths whose weights agree to rounding may both be best: so what is compared is the exact
    weight of the returned path, with that of the best one.
    """
    exact, path = case.exact, case.chain.viterbi()
    assert path._fields == ("states", "log_weight")
    states, weight = case.read(path.states, "int64"), case.read(path.log_weight)
    assert states.shape == (exact.rows, case.T)
    assert_states(case, states, np.isnan(weight))
    ordinary = ~case.special
    if np.all(ordinary):
        best_weight = exact.best[1]
        own_weights, gap = exact.weights_in_recursion(states)
        case.assert_logs(
            weight, np.where(best_weight == -np.inf, -np.inf, own_weights), gap, exact.lengths
        )
        np.testing.assert_array_equal(weight == -np.inf, best_weight == -np.inf)
        assert_as_good(exact, states, error_model.compute_dtype(case.dtype))
        assert not np.any(states[best_weight == -np.inf] > 0)
    rng = np.random.default_rng(1)
    past = rng.choice([-1, 0, 10**6], states.shape)
    others = rng.integers(0, case.K, states.shape)
    arguments = np.stack([np.where(exact.valid_steps, np.maximum(states, 0), past), others])
    check_log_weight(case, arguments.reshape(2, *case.batch, case.T))
    return states, weight


def check_log_weight(case: ChainCase, states: np.ndarray) -> np.ndarray:
    """Check log weights of paths [..., T], whose axes broadcast with the batch; return them."""
    weights = case.backend.read(case.chain.log_weight(case.backend.asarray(states)), case.dtype)
    shape = np.broadcast_shapes(states.shape[:-1], case.batch)
    assert weights.shape == shape
    more = shape[: len(shape) - len(case.batch)]
    paths = np.broadcast_to(states, (*shape, case.T)).reshape(*more, case.exact.rows, case.T)
    paths = np.where(case.exact.valid_steps, paths, 0).astype(np.int64)
    expected, gaps = case.exact.path_weights(paths)
    result = weights.reshape(*more, case.exact.rows)
    case.assert_logs(result, expected, gaps, case.exact.lengths)
    return weights


def assert_as_good(exact: Exact, result: np.ndarray, dtype: str) -> None:
    """Check that no path is better than those found by more than the recursion rounds."""
    best, best_weight, _ = exact.best
    possible, lost = best_weight > -np.inf, 0
    for states in (best, result):
        own_weights, gap = exact.weights_in_recursion(states)
        # The totals that paths have in common are no part of a comparison.
        lost = lost + error_model.chain_bound(0 * gap, gap, exact.lengths, exact.K, dtype)
    assert_within(own_weights[possible], best_weight[possible], lost[possible])


def check_samples(case: ChainCase) -> None:
    """Check that samples have a positive weight wherever a path has, and are 0 elsewhere."""
    exact, n = case.exact, 4
    if case.backend.library == "torch":
        rng = case.backend.xp.Generator(case.arguments["log_potentials"].device).manual_seed(0)
    elif case.backend.library == "cupy":
        rng = case.backend.xp.random.default_rng(0)
    else:
        rng = np.random.default_rng(0)
    states = case.backend.read(case.chain.sample(n, rng=rng), "int64")
    assert states.shape == (n, *case.batch, case.T)
    assert_possible(case, states.reshape(n, exact.rows, case.T))


def assert_possible(case: ChainCase, states: np.ndarray) -> None:
    """Check that paths [n, rows, T] have a positive weight where one has, and are 0 elsewhere.

    Where the sum of all weights is NaN, they are -1.
    """
    ordinary, z = ~case.special, case.exact.log_partition[0]
    assert_states(case, states, np.isnan(z))
    weights = case.exact.path_weights(np.maximum(states, 0))[0]
    assert np.all((weights > -np.inf)[:, ordinary & (z > -np.inf)])
    assert not np.any(states[:, ordinary & (z == -np.inf)] > 0)


def assert_states(case: ChainCase, states: np.ndarray, no_number: np.ndarray) -> None:
    """Check that states [..., rows, T] are within range, and -1 past a row's end.

    They are -1 in rows [rows] whose weights are no number.
    """
    real = np.broadcast_to(case.exact.valid_steps & ~no_number[:, None], states.shape)
    assert np.all((states[real] >= 0) & (states[real] < case.K))
    assert np.all(states[~real] == -1)


CHECKS: dict[str, Callable[[ChainCase], Any]] = {
    "log_partition": check_log_partition,
    "messages": check_messages,
    "posterior": check_posterior,
    "gradients": check_gradients,
    "filtered": check_filtered,
    "entropy": check_entropy,
    "paths": check_paths,
    "samples": check_samples,
}


def exact_of(held: dict[str, np.ndarray], lengths: Any) -> Exact:
    """Return the reference of arrays; it is the same for all libraries, and kept for them."""
    arguments = tuple((n, a.dtype.str, a.shape, a.tobytes()) for n, a in sorted(held.items()))
    return _exact(arguments, None if lengths is None else (np.shape(lengths), *np.ravel(lengths)))


@functools.lru_cache(maxsize=64)
def _exact(arguments: tuple, lengths: tuple | None) -> Exact:
    arrays = {n: np.frombuffer(b, dtype).reshape(shape) for n, dtype, shape, b in arguments}
    return Exact(arrays, None if lengths is None else np.reshape(lengths[1:], lengths[0]))


def fill_in_garbage(arrays: dict[str, np.ndarray], lengths: Any, garbage: float) -> None:
    """Write `garbage` to all steps of potentials and transitions that no row reads."""
    batch = np.broadcast_shapes(*(a.shape[: max(a.ndim - AXES[n], 0)] for n, a in arrays.items()))
    lengths = np.broadcast_to(lengths, batch)
    for name, array in arrays.items():
        if (
            AXES[name] == 1
            or (array.ndim == 2 and AXES[name] == 3)
            or array.shape[-AXES[name]] == 0
        ):
            continue
        own_shape = array.shape[: array.ndim - AXES[name]]
        longest = lengths
        for axis, n in enumerate((1,) * (len(batch) - len(own_shape)) + own_shape):
            longest = longest if n > 1 else longest.max(axis=axis, keepdims=True, initial=0)
        longest = longest.reshape(own_shape)[..., None]
        steps = np.arange(array.shape[-AXES[name]])
        read = steps < longest - (AXES[name] == 3)
        read = read | (array.shape[-3] == 1 if AXES[name] == 3 else False) & (longest > 1)
        array[~read] = garbage
