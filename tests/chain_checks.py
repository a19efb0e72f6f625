"""Checks of every operation of a chain, on any library, against one reference and error model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import arraylogchain as alc
from arraylogchain import _select
from tests import error_model
from tests.chain_reference import PARTS, Exact, all_paths
from tests.conftest import Backend
from tests.error_model import assert_gradient, assert_within
from tests.gradient_reference import Gradient

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
        """Return the chain of the case, with other arrays for the names in `arrays`."""
        options = {**self.arguments, **arrays}
        x = options.pop("log_potentials")
        return alc.LogChain(x, **options, lengths=self.lengths, workspace=self.workspace)

    def read(self, x: Any, dtype: str | None = None) -> np.ndarray:
        """Return a result with one axis for all rows, having checked its kind, dtype and shape."""
        result = self.backend.read(x, dtype or self.dtype)
        assert result.shape[: len(self.batch)] == self.batch, f"{result.shape}, batch {self.batch}"
        return result.reshape(self.exact.rows, *result.shape[len(self.batch) :])

    def autograd(self, call: Callable[[alc.LogChain], Any], g: Any) -> tuple[Any, dict[str, Any]]:
        """Return a value of the chain, and the gradients of its parts by torch's autograd."""
        leaves = {n: a.clone().requires_grad_() for n, a in self.arguments.items()}
        value = call(self.make(**leaves))
        value.backward(g)
        named = ((n if n in PARTS else n.removeprefix("log_"), a) for n, a in leaves.items())
        return value.detach(), {part: leaf.grad for part, leaf in named}

    def assert_unchanged(self) -> None:
        for name, array in self.arguments.items():
            np.testing.assert_array_equal(self.backend.to_numpy(array), self.held[name])

    def label(self, operation: str) -> str:
        backend = self.backend.name if _select.COMPILED else f"{self.backend.name}-array"
        return error_model.label(operation, backend, self.dtype)

    def assert_logs(
        self, operation: str, result: np.ndarray, exact: Any, gap: Any, steps: Any
    ) -> None:
        bound = error_model.chain_bound(exact, gap, steps, self.K, self.dtype)
        assert_within(result, exact, bound, self.label(operation))

    def assert_gradient(
        self, operation: str, result: Any, expected: Any, limit: float = np.inf
    ) -> None:
        result = self.backend.read(result, self.dtype)
        bound = error_model.posterior_bound(expected, self.T, self.K, self.dtype)
        assert_gradient(result, expected, bound, limit, self.label(operation))

    def assert_probabilities(self, operation: str, result: Any, expected: Any) -> None:
        self.assert_gradient(operation, result, expected)
        assert not np.any(self.backend.to_numpy(result) < 0), f"{self.label(operation)}: negative"

    @property
    def special(self) -> np.ndarray:
        """Tell which rows have weights that are NaN or lead to +inf."""
        z = self.exact.log_partition[0]
        return ~np.isfinite(z) & (z != -np.inf) | self.exact.broken


def check_log_partition(
    case: ChainCase, result: Any = None, operation: str = "log_partition"
) -> None:
    result = case.read(case.chain.log_partition() if result is None else result)
    case.assert_logs(operation, result, *case.exact.log_partition, case.exact.lengths)


def check_messages(case: ChainCase) -> None:
    exact, steps = case.exact, np.arange(1, case.T + 1)[:, None]
    alpha, beta = exact.forward, exact.backward
    for operation, logs, gaps, num_steps in (
        ("forward_messages", alpha.full + alpha.offset, alpha.full_gaps, steps),
        (
            "backward_messages",
            beta.bare + beta.bare_offset,
            beta.bare_gaps,
            exact.lengths[:, None, None] - steps + 1,
        ),
    ):
        result = case.read(getattr(case.chain, operation)())
        logs = np.where(exact.valid_steps[..., None], logs, -np.inf)
        case.assert_logs(operation, result, logs, gaps, num_steps)


def check_posterior(case: ChainCase) -> None:
    """Check marginals and counts, alone and together with log Z."""
    chain, exact = case.chain, case.exact
    posterior = chain.posterior()
    assert posterior._fields == ("log_partition", "marginals", "expected_transitions")
    check_log_partition(case, posterior.log_partition, "posterior.log_partition")
    marginals = exact.marginals()
    case.assert_probabilities("marginals", chain.marginals(), marginals)
    case.assert_probabilities("posterior.marginals", posterior.marginals, marginals)
    if "transitions" not in exact.shapes:
        assert posterior.expected_transitions is None
        return
    counts = exact.counts()
    case.assert_probabilities("expected_transitions", chain.expected_transitions(), counts)
    together = posterior.expected_transitions
    case.assert_probabilities("posterior.expected_transitions", together, counts)


def check_gradients(case: ChainCase, g: Any = None) -> None:
    """Check the value and the gradients of every array, and in torch also by autograd."""
    g = np.random.default_rng(0).normal(size=case.batch) if g is None else g
    cotangent = case.backend.asarray(g, case.dtype)
    value, pullback = alc.vjp.log_partition(case.chain)
    check_log_partition(case, value, "vjp.log_partition")
    result = pullback(cotangent)
    assert result._fields == PARTS
    check_parts(case, "vjp.log_partition", result._asdict(), case.backend.to_numpy(cotangent))
    for first, again in zip(result, pullback(cotangent), strict=True):
        if first is not None:
            np.testing.assert_array_equal(*map(case.backend.to_numpy, (first, again)))
    if case.backend.library == "torch":
        _, grads = case.autograd(lambda chain: chain.log_partition(), cotangent)
        check_parts(case, "backward", grads, case.backend.to_numpy(cotangent))


def check_parts(case: ChainCase, operation: str, result: dict[str, Any], g: np.ndarray) -> None:
    largest = error_model.LARGEST_DERIVATIVE[error_model.compute_dtype(case.dtype)]
    largest *= float(np.max(np.abs(g), initial=0))
    for part in PARTS:
        if part not in case.exact.shapes:
            assert result.get(part) is None
            continue
        is_linear = part != "log_potentials" and not case.exact.is_log[part]
        limit = largest if is_linear else np.inf
        name = f"{operation}, gradient of {part}"
        case.assert_gradient(name, result[part], case.exact.gradient(part, g), limit)


def check_filtered(case: ChainCase) -> None:
    result = case.chain.filtered()
    assert result._fields == ("probabilities", "log_normalizers")
    steps = np.arange(1, case.T + 1)
    bounds = error_model.filtered_bounds(*case.exact.filtered, steps, case.K, case.dtype)
    for i, name in enumerate(result._fields):
        label = case.label(f"filtered.{name}")
        assert_within(case.read(result[i]), case.exact.filtered[i], bounds[i], label)


def check_entropy(case: ChainCase) -> None:
    result = case.read(case.chain.entropy())
    exact = case.exact.entropy
    bound = error_model.entropy_bound(*exact, case.exact.lengths, case.K, case.dtype)
    assert_within(result, exact[0], bound, case.label("entropy"))


def check_paths(case: ChainCase) -> tuple[np.ndarray, np.ndarray]:
    """Check that no path is better than the one returned, its weight, and that of another.

    Two paths whose weights agree to rounding may both be best: so the exact weight of the returned
    path is compared with that of the best one.
    """
    exact, path = case.exact, case.chain.viterbi()
    assert path._fields == ("states", "log_weight")
    states, weight = case.read(path.states, "int64"), case.read(path.log_weight)
    assert states.shape == (exact.rows, case.T)
    assert_states(case, states, np.isnan(weight))
    ordinary = ~case.special
    if np.all(ordinary):
        best_weight = exact.best[1]
        path_weight, gap = exact.weights_in_recursion(states)
        path_weight = np.where(best_weight == -np.inf, -np.inf, path_weight)
        case.assert_logs("viterbi.log_weight", weight, path_weight, gap, exact.lengths)
        np.testing.assert_array_equal(weight == -np.inf, best_weight == -np.inf)
        label = case.label("viterbi.states")
        assert_as_good(exact, states, error_model.compute_dtype(case.dtype), label)
        assert not np.any(states[best_weight == -np.inf] > 0)
    rng = np.random.default_rng(1)
    past = rng.choice([-1, 0, 10**6], states.shape)
    random_states = rng.integers(0, case.K, states.shape)
    paths = np.where(exact.valid_steps, np.maximum(states, 0), past)
    paths = np.stack([paths, random_states])
    check_log_weight(case, paths.reshape(2, *case.batch, case.T))
    return states, weight


def check_best_paths(case: ChainCase, num_paths: int = 5) -> None:
    """Check that the first path is Viterbi's and, where they can be listed, that none is missed."""
    if getattr(case.arguments["log_potentials"], "numblocks", (1, 1))[-2] > 1:
        return  # Dask arrays in several chunks along time
    exact, shape = case.exact, (num_paths, case.exact.rows)
    paths, best = case.chain.best_paths(num_paths), case.chain.viterbi()
    largest = np.abs(case.backend.to_numpy(best.log_weight).astype(float))
    for result, first in zip(paths, best, strict=True):
        array, expected = (case.backend.to_numpy(x).astype(float) for x in (result, first))
        assert array.shape == (num_paths, *expected.shape)
        is_exact = ~(largest >= 2**53)  # sums of whole numbers are
        if first is best.states:
            np.testing.assert_array_equal(array[0][is_exact], expected[is_exact])
        else:  # kernels add scales up in another order
            size = np.where(np.isfinite(expected), np.abs(expected), 0.0)
            bound = 2 * error_model.half_ulp(expected, case.dtype) + 1e-12
            bound = bound + 2 * error_model.eps_of(case.dtype) * size
            assert_within(array[0], expected, bound, case.label("best_paths, first weight"))
    states = case.backend.read(paths.states, "int64").reshape(*shape, case.T)
    weights = case.backend.read(paths.log_weight, case.dtype).reshape(shape)
    assert_states(case, states, np.isnan(weights[0]))
    if np.any(case.special):
        return
    has_path = weights > -np.inf
    assert not np.any(states[~has_path] > 0)
    for row, found in zip(states.swapaxes(0, 1), has_path.T, strict=True):
        assert len(np.unique(row[found], axis=0)) == np.sum(found)
    label, dtype = case.label("best_paths"), error_model.compute_dtype(case.dtype)
    every = all_in_order(exact, num_paths) if case.K**case.T * exact.rows <= 10_000 else states
    for i in range(num_paths):
        (weight, gap), (expected, gap_of_best) = map(
            exact.weights_in_recursion, (states[i], every[i])
        )
        weight, expected = (np.where(has_path[i], x, -np.inf) for x in (weight, expected))
        case.assert_logs("best_paths.log_weight", weights[i], weight, gap, exact.lengths)
        bound = error_model.chain_bound(0 * gap, gap + gap_of_best, exact.lengths, case.K, dtype)
        assert_within(weight[has_path[i]], expected[has_path[i]], 2 * bound[has_path[i]], label)


def all_in_order(exact: Exact, num_paths: int) -> np.ndarray:
    """Return the paths of largest weight among all, [num_paths, rows, T]; -1 if there are fewer."""
    paths, weights = all_paths(exact)
    past_end = (paths[:, None] > 0) & ~exact.valid_steps
    weights = np.where(past_end.any(-1), -np.inf, weights)
    order = np.argsort(-weights, axis=0, kind="stable")[:num_paths]
    result = np.full((num_paths, exact.rows, exact.T), -1)
    found = np.take_along_axis(weights, order, 0) > -np.inf
    result[: len(order)] = np.where(found[..., None], paths[order], -1)
    return result


def check_log_weight(case: ChainCase, states: np.ndarray) -> np.ndarray:
    """Check log weights of paths [..., T], whose axes broadcast with the batch; return them."""
    weights = case.backend.read(case.chain.log_weight(case.backend.asarray(states)), case.dtype)
    shape = np.broadcast_shapes(states.shape[:-1], case.batch)
    assert weights.shape == shape
    path_axes = shape[: len(shape) - len(case.batch)]
    paths = np.broadcast_to(states, (*shape, case.T)).reshape(*path_axes, case.exact.rows, case.T)
    paths = np.where(case.exact.valid_steps, paths, 0).astype(np.int64)
    expected, gaps = case.exact.path_weights(paths)
    result = weights.reshape(*path_axes, case.exact.rows)
    case.assert_logs("log_weight", result, expected, gaps, case.exact.lengths)
    return weights


def check_log_probability(case: ChainCase, result: Any = None) -> np.ndarray:
    """Check the log probabilities of `some_paths`, and return the exact ones."""
    paths, states = some_paths(case)
    expected, *terms = map(np.stack, zip(*map(case.exact.log_probabilities, paths), strict=True))
    bound = error_model.chain_bound(expected, *terms, case.K, case.dtype)
    bound += error_model.SMALLEST_NORMAL[error_model.compute_dtype(case.dtype)]
    result = case.chain.log_probability(states) if result is None else result
    result = case.backend.read(result, case.dtype)
    assert result.shape == (2, *case.batch)
    assert not np.any(result > 0)
    label = case.label("log_probability")
    assert_within(result.reshape(expected.shape), expected, bound, label)
    return expected


def check_path_gradients(case: ChainCase) -> None:
    """Check gradients of log probabilities, whose errors are relative: they are no differences."""
    if case.backend.name == "dask":  # it has no such pullback
        return
    paths, states = some_paths(case)
    g = np.random.default_rng(0).normal(size=(2, *case.batch))
    cotangent = case.backend.asarray(g, case.dtype)
    value, pullback = alc.vjp.log_probability(case.chain, states)
    expected = check_log_probability(case, value)
    g = case.backend.to_numpy(cotangent).astype(float).reshape(expected.shape)
    g = np.where(np.isinf(expected), 0, g)
    results = [pullback(cotangent)._asdict()]
    if case.backend.library == "torch":
        value, grads = case.autograd(lambda chain: chain.log_probability(states), cotangent)
        check_log_probability(case, value)
        results.append(grads)
    for part in case.exact.shapes:
        both = (case.exact.path_gradient(part, *pair) for pair in zip(g, paths, strict=True))
        gradient = Gradient(*map(sum, zip(*both, strict=True)))
        scale = error_model.eps_of(case.dtype) * gradient.scale
        for result in results:
            name = f"log_probability, gradient of {part}"
            case.assert_gradient(name, result[part], gradient._replace(scale=scale))


def some_paths(case: ChainCase) -> tuple[np.ndarray, Any]:
    """Return a best path and a random one, [2, rows, T], and as given, with garbage past ends."""
    random = np.random.default_rng(1).integers(0, case.K, (case.exact.rows, case.T))
    valid_steps = case.exact.valid_steps
    paths = np.where(valid_steps, [np.maximum(case.exact.best[0], 0), random], 0)
    given = np.where(valid_steps, paths, 10**6).reshape(2, *case.batch, case.T)
    return paths, case.backend.asarray(given)


def assert_as_good(exact: Exact, result: np.ndarray, dtype: str, label: str) -> None:
    """Check that no path is better than the result by more than the recursion rounds."""
    best, best_weight, _ = exact.best
    is_possible, bound = best_weight > -np.inf, 0
    for states in (best, result):
        weights, gap = exact.weights_in_recursion(states)
        # Terms that both paths have in common do not enter the comparison.
        bound = bound + error_model.chain_bound(0 * gap, gap, exact.lengths, exact.K, dtype)
    assert_within(weights[is_possible], best_weight[is_possible], bound[is_possible], label)


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
    "log_probability": check_log_probability,
    "path_gradients": check_path_gradients,
    "best paths": check_best_paths,
    "samples": check_samples,
}


def exact_of(held: dict[str, np.ndarray], lengths: Any) -> Exact:
    """Return the reference of arrays; it is the same for all libraries, and kept for them."""
    items = tuple((n, a.dtype.str, a.shape, a.tobytes()) for n, a in sorted(held.items()))
    return _exact(items, None if lengths is None else (np.shape(lengths), *np.ravel(lengths)))


@functools.lru_cache(maxsize=64)
def _exact(items: tuple, lengths: tuple | None) -> Exact:
    arrays = {n: np.frombuffer(b, dtype).reshape(shape) for n, dtype, shape, b in items}
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
        array_batch = array.shape[: array.ndim - AXES[name]]
        longest = lengths
        for axis, n in enumerate((1,) * (len(batch) - len(array_batch)) + array_batch):
            longest = longest if n > 1 else longest.max(axis=axis, keepdims=True, initial=0)
        longest = longest.reshape(array_batch)[..., None]
        steps = np.arange(array.shape[-AXES[name]])
        read = steps < longest - (AXES[name] == 3)
        read = read | (array.shape[-3] == 1 if AXES[name] == 3 else False) & (longest > 1)
        array[~read] = garbage
