"""Every product of every pair of operands in the table, with gradients, on every backend.

To add a pair, add a line to `pairs`: a name, both operands and, if need be, the cotangent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.chain_scenarios import normal
from tests.checks import check_logmatmulexp, check_matmul, check_maxplus
from tests.gradient_checks import CHECKS, COTANGENTS, check_vjp_logchainexp, check_vjp_logmatmulexp

INF, NAN = np.inf, np.nan
VALUES = {"logmatmulexp": check_logmatmulexp, "matmul": check_matmul, "maxplus": check_maxplus}
BATCHES = {
    "same batch": ((3,), (3,)),
    "batch of a alone": ((3, 2), ()),
    "batch of b alone": ((), (3, 2)),
    "a broadcasts": ((1,), (4,)),
    "a and b broadcast": ((3, 1), (1, 2)),
    "a and b broadcast, four axes": ((2, 1, 3, 1), (1, 4, 1, 5)),
    "a broadcasts between shared axes": ((2, 3, 1, 2), (3, 4, 2)),
    "a and b broadcast about a shared axis": ((2, 3, 1), (1, 3, 4)),
    "fewer axes in a": ((3,), (2, 1)),
    "axes of size 1": ((1, 1), (1,)),
    "empty batch": ((2, 1), (1, 0)),
}
EMPTY = {
    "no rows": ((0, 4), (4, 3)),
    "no columns": ((3, 4), (4, 0)),
    "no terms": ((3, 0), (0, 2)),
    "no rows, columns or terms": ((0, 0), (0, 0)),
    "empty vectors": ((0,), (0,)),
    "empty vector @ matrix": ((0,), (0, 3)),
    "matrix @ empty vector": ((3, 0), (0,)),
    "empty batch of a": ((0, 3, 4), (4, 2)),
    "no terms, broadcast batches": ((5, 1, 3, 0), (2, 0, 2)),
    "empty batch of b": ((5, 1, 3, 4), (0, 4, 2)),
}
VECTORS = {
    "vector @ vector": ((6,), (6,)),
    "vector @ matrix": ((6,), (6, 4)),
    "matrix @ vector": ((5, 6), (6,)),
    "vector @ batch": ((6,), (3, 2, 6, 4)),
    "batch @ vector": ((3, 2, 5, 6), (6,)),
}
SIZES = {
    "one entry": (1, 1, 1),
    "one sum": (1, 7, 1),
    "one column": (65, 3, 1),
    "one row": (1, 3, 67),
    "one column more than a tile": (32, 32, 33),
}
PLACES = {
    "a row": np.s_[3],
    "a column": np.s_[:, 4],
    "every entry": np.s_[:],
    "a corner": np.s_[2:, :9],
    "every other row and column": np.s_[::2, ::2],
}
BANDS = {
    "bidiagonal": (0, 1),
    "tridiagonal": (1, 1),
    "diagonal": (0, 0),
    "eight subdiagonals": (8, 0),
    "upper triangle but for its corner": (0, 40),
}


def pair(a_shape: tuple, b_shape: tuple, sd: float = 5) -> tuple[np.ndarray, np.ndarray]:
    return normal(*a_shape, sd=sd), normal(*b_shape, sd=sd, seed=1)


def band(n: int, below: int, above: int) -> np.ndarray:
    """Return an n x n matrix with entries in a band around the diagonal, and -inf elsewhere."""
    x, (rows, columns) = normal(n, n, sd=3), np.indices((n, n))
    x[(columns < rows - below) | (columns > rows + above)] = -INF
    return x


def closed(place: Any, sd: float, both: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return operands with exact zeros in places of one or of both."""
    a, b = pair((12, 10), (10, 11), sd)
    a[place] = -INF
    if both:
        b[place[::-1] if isinstance(place, tuple) else place] = -INF
    return a, b


def partly_certified(far: float) -> tuple[np.ndarray, np.ndarray]:
    """Return operands whose product has certified and uncertified entries in the same rows."""
    a, b = pair((33, 17), (17, 29), 1)
    a[::4, 1:] += far
    b[:-1, ::3] += far
    return a, b


def crossed(far: float, offset: float) -> tuple[np.ndarray, np.ndarray]:
    """Return operands whose largest term has neither the row's largest entry nor the column's."""
    a = np.array([[0.25, -far, -2 * far]]) - offset
    return a, np.array([[-far], [0.0], [-1.0]]) - offset / 3


def magnitudes(decades: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    a, b = pair((20, 16), (16, 18), 1)
    return tuple(x * 10.0 ** rng.integers(-decades, decades, x.shape) for x in (a, b))


def special(value: float, sd: float) -> tuple[np.ndarray, np.ndarray]:
    a, b = pair((9, 8), (8, 7), sd)
    a[2, 3], b[5, 6], b[4, 1] = value, value, -INF
    return a, b


def every_special_pair(others: float) -> tuple[np.ndarray, np.ndarray]:
    """Return +inf, -inf and NaN against each other, beside an ordinary term or alone."""
    left, right = (v.ravel() for v in np.meshgrid(*[[-INF, -800.0, 0.0, 800.0, INF, NAN]] * 2))
    a = np.stack([left, right, np.full(left.shape, others)], axis=-1)
    return a, a.T


def ties(rows: int, inner: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return small integers, whose sums are exact in every dtype and tie often."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 3, n).astype(float) for n in ((rows, inner), (inner, columns)))
    a[:, : inner // 2] = -5.0
    return a, b


def distant_rows(sd: float, far: float) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns far from one another, which a common shift would round."""
    a, b = pair((12, 20), (20, 12), sd)
    return a + far * np.arange(12)[:, None], b + far * np.arange(12)


def pairs() -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Yield a name, and two operands."""
    for sd in (1, 10, 20, 30, 100, 1000, 1e6):
        yield f"sd = {sd:g}", pair((21, 30), (30, 17), sd)
    for name, (rows, inner, columns) in SIZES.items():
        yield name, pair((rows, inner), (inner, columns))
    for sd in (1, 20, 1000):
        yield f"sums of 3000 terms, sd = {sd}", pair((3, 3000), (3000, 4), sd)
    yield from pairs_of_axes()
    yield from pairs_of_uncertified_entries()
    yield from pairs_of_offsets()
    yield "ties", ties(20, 60, 30)
    for decades in (2, 4):
        yield f"entries from 1e-{decades} to 1e{decades}", magnitudes(decades)
    yield from pairs_with_zeros()
    for value in (INF, NAN):
        for sd in (1, 30, 1000):
            yield f"{value} in both, sd = {sd}", special(value, sd)
    for others in (-INF, -1e4, 0.0, 200.0):
        yield f"infinities and NaN beside {others:g}", every_special_pair(others)


def pairs_of_axes() -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Yield operands with batch axes, with one axis, and without entries."""
    for name, (a_batch, b_batch) in BATCHES.items():
        for sd in (5, 1000):
            a, b = pair((*a_batch, 5, 6), (*b_batch, 6, 4), sd)
            a[..., 2, :3] = -INF
            yield f"{name}, sd = {sd}", (a, b)
    for name, shapes in (VECTORS | EMPTY).items():
        yield name, pair(*shapes, 50)


def pairs_of_uncertified_entries() -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    for low in (-10, -60, -80, -110, -400, -800, -1e4, -1e30):
        yield f"crossed maxima, low = {low:g}", (np.array([[0.0, low]]), np.array([[low], [0.0]]))
    for far in (-80, -110.0, -800.0):
        yield f"partly certified, far = {far:g}", partly_certified(far)
    for far in (150.0, 1500.0):
        for offset in (0.0, 1e4, 1e6):
            yield f"crossed, far = {far:g}, offset = {offset:g}", crossed(far, offset)


def pairs_of_offsets() -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    for center in (1e4, -1e4, 1e30):
        for sign in (1, -1):
            a, b = pair((9, 12), (12, 7), 3)
            yield f"a near {center:g}, b near {sign * center:g}", (a + center, b + sign * center)
    for offset in (1e4, 1e6):
        for signs, sign in (("equal signs", 1), ("opposite signs", -1)):
            a, b = pair((9, 12), (12, 7), 1000)
            name = f"sd = 1000, offsets of {offset:g}, {signs}"
            yield name, (a + offset, b + sign * offset / 3)
    for sd, far in ((1, 2), (1, 29), (20, 300), (1, 1e4)):
        yield f"rows {far:g} apart, sd = {sd}", distant_rows(sd, far)


def pairs_with_zeros() -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    for name, place in PLACES.items():
        for sd in (1, 1000):
            yield f"zeros in {name} of a, sd = {sd}", closed(place, sd, False)
            yield f"zeros in {name} of both, sd = {sd}", closed(place, sd, True)
    for name, (below, above) in BANDS.items():
        yield name, (band(44, below, above), band(44, below, above))
    a = band(44, 6, 3)
    a[:, 15:30] -= 700
    yield "band that underflows", (a, a.T)
    a, b = pair((6, 8), (8, 7))
    a[:, 4:], b[:4] = -INF, -INF
    yield "disjoint supports", (a, b)


PAIRS = dict(pairs())


def test_names_differ():
    assert len(PAIRS) == len(list(pairs()))


@pytest.mark.parametrize("name", PAIRS)
def test_values(backend, dtype, name):
    a, b = PAIRS[name]
    for check in VALUES.values():
        check(backend, dtype, a, b)
    turned = (np.swapaxes(x, -1, -2) if x.ndim > 1 else x for x in (b, a))
    check_logmatmulexp(backend, dtype, *turned)


@pytest.mark.parametrize("name", PAIRS)
def test_gradients(backend, dtype, name):
    a, b = PAIRS[name]
    for function, check in CHECKS.items():
        if function != "matmul" or (np.all(np.isfinite(a)) and np.all(np.isfinite(b))):
            check(backend, dtype, a, b)


@pytest.mark.parametrize("kind", COTANGENTS)
@pytest.mark.parametrize(
    "name",
    [
        "sd = 1",
        "sd = 30",
        "sd = 1000",
        "rows 29 apart, sd = 1",
        "zeros in a corner of a, sd = 1000",
    ],
)
def test_cotangents(backend, dtype, name, kind):
    check_vjp_logmatmulexp(backend, dtype, *PAIRS[name], kind)


@pytest.mark.parametrize(
    "name",
    ["sd = 1", "sd = 30", "sd = 1000", "zeros in a corner of a, sd = 1", "tridiagonal"],
)
def test_half_precision(backend, half, name):
    a, b = PAIRS[name]
    for check in (*VALUES.values(), *(CHECKS[f] for f in ("logmatmulexp", "maxplus_matmul"))):
        check(backend, half, a, b)


def test_entries_of_all_magnitudes(backend, dtype):
    """Gradients are not compared: sums that tie to rounding leave softmax weights undetermined."""
    check_logmatmulexp(backend, dtype, *magnitudes(30))


LARGE = {f"large, sd = {sd}": pair((200, 20), (20, 700), sd) for sd in (1, 25, 1000)}
LARGE["sums beyond the workspace"] = pair((2, 30_000), (30_000, 3), 1000)
LARGE["ties of distant terms"] = ties(5, 6000, 7)


@pytest.mark.parametrize("name", LARGE)
def test_workspace_changes_no_answer(np_backend, dtype, name):
    a, b = LARGE[name]
    for check in (*CHECKS.values(), check_maxplus):
        check(np_backend, dtype, a, b, workspace=1 << 20)


# The cheap order of a product is from the right, from the left, or from the inside.
WAISTS = {
    "narrow end": [40, 30, 20, 1],
    "narrow start": [1, 20, 30, 40],
    "narrow inside": [30, 1, 40, 1, 30],
    "wide between narrow": [2, 50, 3, 50, 2],
    "no terms": [3, 0, 4, 2],
}
STACKS: dict[str, Any] = {
    **{f"n = {n}, sd = {sd}": normal(n, 5, 5, sd=sd) for n in (1, 2, 3, 5, 8) for sd in (1, 30)},
    "batch": normal(2, 3, 4, 5, 5, sd=1000),
    "sparse": np.where(np.random.default_rng(1).random((6, 7, 7)) < 0.6, -INF, normal(6, 7, 7)),
    "rectangles": [normal(3, 4), normal(4, 7, seed=1), normal(7, 2, seed=2)],
    **{
        name: [normal(*s, sd=10) for s in itertools.pairwise(sizes)]
        for name, sizes in WAISTS.items()
    },
    "two of the largest range": [np.array([[3e38, -3e38]]), np.array([[-3e38], [3e38]])],
    "stack of the largest range": 3e38 * np.array([[[1.0, -1.0]] * 2, [[-1.0, -1.0], [1.0, 1.0]]]),
    "batches that broadcast": [normal(2, 1, 3, 4), normal(3, 4, 5), normal(5, 2, sd=100)],
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks(backend, dtype, name):
    check_vjp_logchainexp(backend, dtype, STACKS[name])
