"""Checks of paths, their weights and their entropy that many tests share."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

import arraylogchain as alc
from tests import error_model, reference
from tests.checks import Given, make_chain
from tests.conftest import Backend
from tests.error_model import assert_within
from tests.gradient_checks import _options
from tests.reference import Lattice

# Linear weights and logs of both kinds, mixed: (transitions, initial) as they are given.
MIXED_FORMS = [("linear", "linear"), ("logs", "logs"), ("linear", "logs"), ("logs", "linear")]


def given_in_forms(forms: tuple[str, str], transitions: Any, initial: Any = None) -> dict[str, Any]:
    """Return the options for weights that are given in linear space or as logs, each its way."""
    options = {}
    for name, form, weights in zip(
        ("transitions", "initial"), forms, (transitions, initial), strict=True
    ):
        if weights is not None:
            with np.errstate(divide="ignore"):
                in_logs = form == "logs"
                options[f"log_{name}" if in_logs else name] = (
                    np.log(weights) if in_logs else weights
                )
    return options


class Case:
    """A chain handed to the library, and its lattice in long double as the library was given it."""

    def __init__(
        self,
        backend: Backend,
        dtype: str,
        x: Any,
        *,
        transitions: Any = None,
        log_transitions: Any = None,
        initial: Any = None,
        log_initial: Any = None,
        workspace: int | None = None,
    ) -> None:
        self.backend, self.dtype = backend, dtype
        self.given = Given(backend, dtype, x, transitions, log_transitions, initial, log_initial)
        self.chain = make_chain(self.given.arrays, workspace)
        self.steps, self.size = np.shape(x)[-2:]
        # The exact arguments of reference.chain, and how they were given.
        self.arguments, self.options = _options(self.given.held, dtype)

    @cached_property
    def lattice(self) -> Lattice:
        forms = {k: v for k, v in self.options.items() if k != "log_form_beyond"}
        return reference.lattice(*self.arguments, **forms)

    def read(self, x: Any, dtype: str | None = None) -> np.ndarray:
        return self.backend.read(x, dtype or self.dtype)

    def check_log_weight(self, states: Any) -> np.ndarray:
        """Compare log_weight with a sum in long double."""
        states = np.asarray(states)
        found = self.read(self.chain.log_weight(self.backend.asarray(states)))
        exact, gap = reference.path_weights(states, self.lattice)
        self.assert_weight(found, exact, gap)
        self.given.assert_unchanged()
        return found

    def assert_weight(self, found: np.ndarray, exact: np.ndarray, gap: np.ndarray) -> None:
        bound = error_model.path_bound(exact, gap, self.steps, self.size, self.dtype)
        assert_within(found, exact, bound)

    def check_viterbi(self) -> tuple[np.ndarray, np.ndarray]:
        """Check that no path is better than the one returned, and its weight; return both.

        Two paths whose weights agree to rounding may both be best: so what is compared is the exact
        weight of the returned path, with that of the best one.
        """
        path = self.chain.viterbi()
        assert isinstance(path, alc.ChainPath)
        assert path._fields == ("states", "log_weight")
        states, weight = self.read(path.states, "int64"), self.read(path.log_weight)
        lattice = self.lattice
        batch = lattice.x.shape[:-2]
        assert states.shape == (*batch, self.steps)
        if self.size == 0:
            assert not np.any(states)
            np.testing.assert_array_equal(weight, np.full(batch, -np.inf))
            return states, weight
        assert np.all((states >= 0) & (states < self.size))
        best = reference.best_path(lattice)
        exact, gap = reference.path_weights(states, lattice)
        self.assert_weight(weight, exact, gap)
        impossible = best.log_weight == -np.inf
        np.testing.assert_array_equal(weight == -np.inf, impossible)
        assert not np.any(states[impossible])
        lost = self._rounding(best.states, best) + self._rounding(states, best)
        assert_within(exact, best.log_weight, lost)
        again = self.read(self.chain.log_weight(path.states))
        self.assert_weight(again, exact, gap)
        self.given.assert_unchanged()
        return states, weight

    def _rounding(self, states: np.ndarray, best: reference.BestPath) -> np.ndarray:
        """Return what the recursion's number for a path may be off by."""
        _, gap = reference.path_weights(states, self.lattice)
        depth = np.take_along_axis(best.depths, states[..., None], axis=-1)[..., 0]
        gap = gap + np.sum(depth, axis=-1)
        computed = error_model.compute_dtype(self.dtype)
        # The totals that paths have in common are no part of a comparison.
        return error_model.path_bound(0 * gap, gap, self.steps, self.size, computed)

    def check_entropy(self) -> np.ndarray:
        """Compare the entropy with the reference."""
        found = self.read(self.chain.entropy())
        exact = reference.entropy(*self.arguments, **self.options)
        bound = error_model.entropy_bound(*exact, self.steps, self.size, self.dtype)
        assert_within(found, exact.entropy, bound)
        self.given.assert_unchanged()
        return found
