"""Prepared factors of log products, linear or in logs, and gradients with a shift for each line."""

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain._array.products.certified import certified_product
from arraylogchain._array.products.factors import Factor
from arraylogchain._arrays import enter

EPS = {"float32": 2.0**-23, "float64": 2.0**-52}
CERTIFICATE = {"float32": 72, "float64": 673}


def draw(seed, dtype, linear):
    """Return logs near 0, a matrix with zeros, and its logs in long double."""
    rng = np.random.default_rng(seed)
    groups, rows, inner, columns = rng.integers(1, 9, 4)
    spread = rng.choice([1, 30, 300])
    left = (rng.normal(size=(groups, rows, inner)) * spread).astype(dtype)
    left -= np.rint(left.max(-1, keepdims=True))
    left[rng.random(left.shape) < 0.2] = -np.inf
    shape = (groups, inner, columns)
    if linear:
        decades = rng.choice([0, 3, 9])
        exponents = np.clip(rng.normal(size=shape) * decades + rng.choice([0, -29, 8]), -44, 37)
        matrix = (rng.random(shape) * 10.0**exponents).astype(dtype)
        matrix[rng.random(shape) < 0.3] = 0
        with np.errstate(divide="ignore"):
            return left, matrix, np.log(matrix.astype(np.longdouble))
    matrix = (rng.normal(size=shape) * spread + rng.choice([0, 1e5])).astype(dtype)
    matrix[rng.random(shape) < 0.2] = -np.inf
    return left, matrix, matrix.astype(np.longdouble)


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_what_is_kept_apart_is_not_rounded_in(dtype, linear, keep):
    for seed in range(100):
        left, matrix, logs = draw(seed, dtype, linear)
        ctx, _ = enter({"a": left})
        terms = left.astype(np.longdouble)[..., None] + logs[:, None]
        out = np.empty(terms.shape[:2] + terms.shape[3:], dtype)
        with ctx.computing():
            right = Factor(ctx, matrix, 1, in_logs=not linear, common=True)
            right = right.keep() if keep else right
            certified_product(ctx, Factor(ctx, left, 0, shifts=False), right, out, 1 << 20)
            apart = right.shift + right.powers * np.log(np.longdouble(2))
            exact = np.logaddexp.reduce(terms - apart[..., None], axis=2)
        np.testing.assert_array_equal(np.isneginf(out), np.isneginf(exact))
        finite = np.isfinite(exact)
        count = CERTIFICATE[dtype] + 4 * left.shape[-1] + 8
        bound = EPS[dtype] * (2 * np.abs(exact[finite]) + count)
        assert np.all(np.abs(out[finite] - exact[finite]) <= bound)


def test_every_line_has_a_shift_of_its_own():
    """With one shift for a whole operand entries near 0 lose digits to rows of large ones."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        a, b, g = rng.normal(size=(5, 2)), rng.normal(size=(2, 6)), rng.normal(size=(5, 6))
        a += rng.choice([30, 350], size=(5, 1))
        b += rng.choice([30, 350], size=(1, 6))
        terms = a.astype(np.longdouble)[:, :, None] + b
        p = np.exp(terms - np.logaddexp.reduce(terms, axis=1)[:, None])
        da, db = alc.vjp.logmatmulexp(a, b)[1](g)
        bound, size = 16 * EPS["float64"], np.abs(g)
        assert np.all(np.abs(da - (p * g[:, None]).sum(2)) <= bound * size.sum(1)[:, None])
        assert np.all(np.abs(db - (p * g[:, None]).sum(0)) <= bound * size.sum(0))
