"""Infinities and NaN: those of scipy.special.logsumexp, in every position."""

import numpy as np
import pytest

from tests.checks import check_chain, check_logmatmulexp

INF, NAN = np.inf, np.nan


def normal(*shape, sd=1.0, seed=0):
    return np.random.default_rng(seed).normal(0, sd, shape)


def band(n, below, above):
    """Return an n x n matrix with entries in a band around the diagonal, and -inf elsewhere."""
    x = normal(n, n, sd=3)
    rows, columns = np.indices((n, n))
    x[(columns < rows - below) | (columns > rows + above)] = -INF
    return x


@pytest.mark.parametrize("sd", [1, 1000])
@pytest.mark.parametrize(
    "place",
    [
        np.s_[3],
        np.s_[:, 4],
        np.s_[:],
        np.s_[2:, :9],
        np.s_[::2, ::2],
    ],
    ids=["row", "column", "everything", "block", "checkerboard"],
)
def test_minus_infinity(backend, dtype, place, sd):
    """-inf is an exact zero: sums of such terms only are exactly -inf, the others as ever."""
    a, b = normal(12, 10, sd=sd), normal(10, 11, sd=sd, seed=1)
    a[place] = -INF
    check_logmatmulexp(backend, dtype, a, b)
    check_logmatmulexp(backend, dtype, b.T, a.T)
    b[place[::-1] if isinstance(place, tuple) else place] = -INF
    check_logmatmulexp(backend, dtype, a, b)


@pytest.mark.parametrize(("below", "above"), [(0, 1), (1, 1), (0, 0), (8, 0), (0, 40)])
def test_bands(backend, dtype, below, above):
    a = band(90, below, above)
    out = check_logmatmulexp(backend, dtype, a, band(90, below, above))
    rows, columns = np.indices(a.shape)
    reached = (columns >= rows - 2 * below) & (columns <= rows + 2 * above)
    np.testing.assert_array_equal(np.isfinite(out), reached)


def test_band_with_underflow(backend, dtype):
    """Entries to be computed again lie beside true zeros in the same rows."""
    a = band(60, 6, 3)
    a[:, 20:40] -= 700 if dtype == "float64" else 90
    check_logmatmulexp(backend, dtype, a, a.T)


def test_disjoint_supports(backend, dtype):
    """No sum has a finite term, though every row and column has finite entries."""
    a, b = normal(6, 8), normal(8, 7)
    a[:, 4:], b[:4] = -INF, -INF
    assert np.all(check_logmatmulexp(backend, dtype, a, b) == -INF)


def test_disjoint_supports_of_large_entries(backend, dtype):
    """Sums without a term are -inf even where the operands' maxima add up to infinity."""
    top = 0.9 * float(np.finfo(dtype).max)
    out = check_logmatmulexp(backend, dtype, [[top, -INF], [-INF, 0.0]], [[-INF, 0.0], [top, -INF]])
    assert out[0, 0] == -INF


@pytest.mark.parametrize("others", [-INF, -1e4, 0.0, 200.0])
def test_every_pair_of_special_values(backend, dtype, others):
    """+inf with -inf is NaN, NaN shows, +inf wins over all else: beside ordinary terms or alone."""
    values = [-INF, -800.0, 0.0, 800.0, INF, NAN]
    left, right = (v.ravel() for v in np.meshgrid(values, values))
    a = np.stack([left, right, np.full(left.shape, others)], axis=-1)
    check_logmatmulexp(backend, dtype, a, a.T)


@pytest.mark.parametrize("value", [INF, NAN])
def test_special_values_stay_where_they_took_part(backend, dtype, value):
    a, b = normal(9, 8, sd=30), normal(8, 7, sd=30, seed=1)
    a[2, 3], b[5, 6] = value, value
    b[4, 1] = -INF
    out = check_logmatmulexp(backend, dtype, a, b)
    expected = np.ones(out.shape, bool)
    expected[2], expected[:, 6] = False, False
    np.testing.assert_array_equal(np.isfinite(out), expected)


def test_special_values_among_many(np_backend, dtype):
    """Sprinkled over several tiles of a small workspace."""
    rng = np.random.default_rng(4)
    a, b = normal(80, 120, sd=50), normal(120, 75, sd=50, seed=1)
    for x in (a, b):
        for value in (-INF, INF, NAN):
            at = rng.integers(0, x.size, 12)
            x.ravel()[at] = value
    check_logmatmulexp(np_backend, dtype, a, b, workspace=1 << 20)


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((0, 4), (4, 3)),
        ((3, 4), (4, 0)),
        ((3, 0), (0, 2)),
        ((0, 0), (0, 0)),
        ((0,), (0,)),
        ((0,), (0, 3)),
        ((3, 0), (0,)),
        ((0, 3, 4), (4, 2)),
        ((5, 1, 3, 0), (2, 0, 2)),
        ((5, 1, 3, 4), (0, 4, 2)),
    ],
)
def test_zero_size_axes(backend, dtype, a_shape, b_shape):
    """An empty sum is -inf; an empty result has the shape of numpy.matmul's."""
    out = check_logmatmulexp(backend, dtype, np.zeros(a_shape), np.zeros(b_shape))
    assert out.shape == np.matmul(np.zeros(a_shape), np.zeros(b_shape)).shape
    assert np.all(out == -INF)


@pytest.mark.chains
@pytest.mark.parametrize("given_in_logs", [False, True])
@pytest.mark.parametrize("value", [INF, NAN, -INF])
def test_chain_potentials(backend, dtype, value, given_in_logs):
    """A special potential shows from its step on, in its own row of the batch only."""
    rng = np.random.default_rng(5)
    x, transitions = normal(3, 6, 4), rng.random((5, 4, 4)) + 0.01
    x[1, 2, 3] = value
    if given_in_logs:
        options = {"log_transitions": np.log(transitions)}
    else:
        options = {"transitions": transitions}
    partition, messages = check_chain(backend, dtype, x, **options)
    clean = np.isfinite(messages)
    assert np.all(clean[[0, 2]])
    assert np.all(clean[1, :2])
    assert np.isfinite(partition[1]) == (value == -INF)


@pytest.mark.chains
@pytest.mark.parametrize("value", [INF, NAN])
def test_chain_transitions(backend, dtype, value):
    rng = np.random.default_rng(6)
    transitions = rng.random((5, 3, 3)) + 0.01
    transitions[2, 0, 1] = value
    _, messages = check_chain(backend, dtype, normal(2, 6, 3), transitions=transitions)
    assert np.all(np.isfinite(messages[:, :3]))
    assert not np.any(np.isfinite(messages[:, 3, 1]))
    with np.errstate(divide="ignore"):
        logs = np.log(transitions)
    check_chain(backend, dtype, normal(2, 6, 3), log_transitions=logs)


@pytest.mark.chains
def test_chain_without_any_path(backend, dtype):
    """Where nothing can be reached, everything after is exactly -inf."""
    x = normal(2, 5, 3)
    x[0, 2] = -INF
    transitions = np.ones((4, 3, 3))
    transitions[3] = 0
    partition, messages = check_chain(backend, dtype, x, transitions=transitions)
    assert np.all(partition == -INF)
    assert np.all(messages[0, 2:] == -INF)
    assert np.all(np.isfinite(messages[1, :4]))


@pytest.mark.chains
def test_chain_that_starts_nowhere(backend, dtype):
    partition, messages = check_chain(
        backend, dtype, normal(4, 3), transitions=np.ones((3, 3, 3)), initial=np.zeros(3)
    )
    assert partition == -INF
    assert np.all(messages == -INF)
