"""The reference of chains is right: it agrees with the sum over all paths, by mpmath."""

from __future__ import annotations

import itertools

import mpmath
import numpy as np
import pytest

from tests.chain_reference import PARTS, Exact
from tests.chain_scenarios import make
from tests.error_model import assert_within

EPS = float(np.finfo(np.longdouble).eps)


def exact_chain(form, lengths):
    """Return a small chain, with weights of 0 among others."""
    rng = np.random.default_rng(0)
    arrays = {
        "log_potentials": rng.normal(0, 9, (3, 4, 3)),
        "transitions": rng.random((3, 3, 3)) * (rng.random((3, 3, 3)) < 0.8),
        "initial": rng.random((3, 3)),
        "final": np.array([0.5, 0.0, 2.0]),
    }
    if form == "logs":
        with np.errstate(divide="ignore"):
            for name in PARTS[1:]:
                arrays[f"log_{name}"] = np.log(arrays.pop(name))
    return arrays, Exact(arrays, lengths)


def by_paths(arrays, row, length):
    """Return log Z, entropy and the derivatives by every weight, from all paths of a row."""
    x = arrays["log_potentials"][row, :length]
    exp = np.vectorize(lambda v: mpmath.exp(mpmath.mpf(float(v))), otypes=[object])
    one = np.vectorize(lambda v: mpmath.mpf(float(v)), otypes=[object])
    weights = [exp(x)]
    for name in PARTS[1:]:
        weight = exp(arrays[f"log_{name}"]) if f"log_{name}" in arrays else one(arrays[name])
        weights.append(weight[row] if name == "initial" else weight)
    sums = [np.vectorize(lambda v: mpmath.mpf(0), otypes=[object])(w) for w in weights]
    total, products = mpmath.mpf(0), []
    for path in itertools.product(range(3), repeat=length):
        places = [(0, (t, k)) for t, k in enumerate(path)]
        places += [(1, (t, j, k)) for t, (j, k) in enumerate(itertools.pairwise(path))]
        places += [(2, (path[0],)), (3, (path[-1],))]
        along = [weights[array][at] for array, at in places]
        products.append(mpmath.fprod(along))
        total += products[-1]
        for i, (array, at) in enumerate(places):
            sums[array][at] += mpmath.fprod(along[:i] + along[i + 1 :])
    probabilities = [p / total for p in products if p]
    entropy = -mpmath.fsum(p * mpmath.log(p) for p in probabilities)
    for i, name in enumerate(PARTS):
        sums[i] = sums[i] / total
        if i == 0 or f"log_{name}" in arrays:
            sums[i] = sums[i] * weights[i]
    return mpmath.log(total), entropy, sums


def as_numbers(x):
    return np.vectorize(lambda v: np.longdouble(mpmath.nstr(v, 25)), otypes=[np.longdouble])(x)


@pytest.mark.parametrize("form", ["linear", "logs"])
@pytest.mark.parametrize("lengths", [[4, 4, 4], [4, 1, 3]])
def test_sums_and_derivatives(form, lengths):
    arrays, exact = exact_chain(form, lengths)
    with mpmath.workdps(50):
        for row, length in enumerate(lengths):
            log_z, entropy, derivatives = by_paths(arrays, row, length)
            for result, expected in ((exact.log_partition[0], log_z), (exact.entropy[0], entropy)):
                assert_within(result[row], as_numbers(expected), 1000 * EPS)
            g = np.eye(3)[row]
            for i, part in enumerate(PARTS):
                gradient = exact.gradient(part, g).exact
                expected = np.zeros_like(gradient)
                at = row if part in ("log_potentials", "initial") else slice(None)
                computed = as_numbers(derivatives[i])
                expected[at][: len(computed)] = computed
                assert_within(gradient, expected, 1000 * EPS * (1 + abs(expected)))


def test_what_decides_has_its_part_in_g():
    """A deciding path far below the others in both directions has a G of this distance."""
    options = make("hole, underflow from both ends")
    exact = Exact({"log_potentials": options["x"], "transitions": options["transitions"]})
    assert float(exact.log_partition[0][0]) == -2700
    assert exact.log_partition[1][0] > 2700
