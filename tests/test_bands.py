"""Matrices that are mostly zeros: bands, left-to-right, block diagonal and triangular ones.

Blocks that hold their weights are multiplied alone. All results are what they are anyhow.
"""

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain._arrays import enter
from arraylogchain._chain.forms import matrices
from tests.checks import check_chain
from tests.gradient_checks import check_posterior, check_vjp_chain
from tests.path_checks import Case
from tests.ragged_checks import Ragged
from tests.test_chain import FORMS, given_as, normal

pytestmark = pytest.mark.chains

INF, NAN = np.inf, np.nan


def band(K, below, above):
    rows, columns = np.indices((K, K))
    return (columns >= rows - below) & (columns <= rows + above)


def block_diagonal(K, count):
    part = np.arange(K) * count // K
    return part[:, None] == part


def with_empty_parts(K):
    """Return a band without some of its rows and columns."""
    mask = band(K, 3, 3)
    mask[20:40] = False
    mask[-9:] = False
    mask[:, :35] = False
    return mask


def islands(K):
    """Return weights in some far corners; most rows and columns have none."""
    mask = np.zeros((K, K), bool)
    mask[2, 60], mask[K - 3, 5:9], mask[40:44, K - 1] = True, True, True
    return mask


def permuted(mask):
    order = np.random.default_rng(3).permutation(len(mask))
    return mask[order][:, order]


# Masks of K x K matrices, and whether they are worth looking at block by block.
STRUCTURES = {
    "band": (band(77, 4, 4), True),
    "left-to-right": (band(96, 0, 1), True),
    "right-to-left": (band(70, 1, 0), True),
    "antidiagonal": (band(73, 2, 2)[::-1], True),
    "block diagonal": (block_diagonal(101, 4), True),
    "wide band": (band(130, 50, 0), True),
    "triangular": (band(99, 99, 0), False),
    "permuted": (permuted(band(77, 4, 4)), False),
    "empty rows and columns": (with_empty_parts(84), True),
    "islands": (islands(90), True),
    "nothing": (np.zeros((70, 70), bool), True),
    "one full column": (band(100, 0, 1) | (np.arange(100) == 50), True),
    "one full row": (band(100, 0, 1) | (np.arange(100) == 50)[:, None], True),
    "small": (band(40, 0, 1), False),
}


def masked(mask, *batch, seed=0):
    """Return weights where a mask, or a stack of masks, is true."""
    mask = np.asarray(mask)
    shape = np.broadcast_shapes((*batch, 1, 1), mask.shape)
    return np.random.default_rng(seed).uniform(0.1, 1.0, shape) * mask


@pytest.fixture
def searches(monkeypatch):
    """Look for blocks in every matrix, however small its products; return what was found."""
    found = []

    def find_blocks(*args):
        found.append(search(*args))
        return found[-1]

    search = matrices.find_blocks
    monkeypatch.setattr(matrices, "find_blocks", find_blocks)
    monkeypatch.setattr(matrices, "TERMS_OF_SEARCH", 0)
    monkeypatch.setattr(matrices, "FEWEST_TERMS", 0)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(np_backend, dtype, searches, form, name):
    check_structure(np_backend, dtype, searches, form, name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["left-to-right", "islands", "one full row"])
def test_libraries(backend, dtype, searches, form, name):
    check_structure(backend, dtype, searches, form, name)


def check_structure(backend, dtype, searches, form, name):
    mask, has_blocks = STRUCTURES[name]
    K = len(mask)
    options = given_as(form, masked(mask, 1), np.linspace(0, 1, K))
    check_chain(backend, dtype, normal(4, K), **options)
    check_posterior(backend, dtype, normal(3, K), **options)
    assert any(searches) == has_blocks


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(3, 1), (3, 3)], ids=str)
def test_groups_and_steps(backend, dtype, searches, form, shape):
    """Groups share their blocks, which hold the weights of all; every step has its own."""
    K = 83
    masks = [band(K, 2, 2), band(K, 6, 0), block_diagonal(K, 5)]
    masks = np.stack([masks, np.roll(masks, 1, axis=0), masks])
    transitions = masked(masks[: shape[0], : shape[1]])
    options = given_as(form, transitions)
    check_chain(backend, dtype, normal(3, 4, K), **options)
    check_posterior(backend, dtype, normal(3, 4, K), **options)
    assert any(searches)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [30, 1000])
def test_wide_ranges(np_backend, dtype, searches, form, sd):
    x, K = normal(2, 4, 90, sd=sd), 90
    options = given_as(form, masked(band(K, 3, 3), 1))
    check_chain(np_backend, dtype, x, **options)
    check_posterior(np_backend, dtype, x, **options)
    assert any(searches)


def test_wide_weights(backend, dtype, searches):
    """Weights far from one are scaled, and the smallest underflow."""
    x, mask = normal(3, 90), band(90, 3, 3)
    decades = np.random.default_rng(5).uniform(-37, 37, (1, 90, 90))
    check_chain(backend, dtype, x, transitions=10.0**decades * mask)
    logs = np.where(mask, normal(2, 90, 90, sd=500), -INF)
    check_chain(backend, dtype, x, log_transitions=logs)
    check_posterior(backend, dtype, x, log_transitions=logs)
    assert any(searches)


def test_left_to_right_from_its_first_state(backend, dtype, searches):
    """Messages are -inf exactly where no path has led yet."""
    K, T = 70, 6
    options = {"transitions": masked(band(K, 0, 2), 1), "initial": np.eye(K)[0]}
    _, messages = check_chain(backend, dtype, normal(3, T, K), **options)
    steps, states = np.indices((T, K))
    reached = np.broadcast_to(states <= 2 * steps, messages.shape)
    np.testing.assert_array_equal(np.isfinite(messages), reached)
    check_posterior(backend, dtype, normal(3, T, K), **options)
    assert any(searches)


@pytest.mark.parametrize("form", FORMS)
def test_gradients(backend, dtype, searches, form):
    """Derivatives by linear weights are not zero where the weights are."""
    mask = band(80, 4, 0)
    for shape in ((1,), (2, 2)):
        options = given_as(form, masked(mask, *shape))
        _, gradients = alc.vjp.log_partition(_chain(backend, dtype, normal(2, 3, 80), options))
        by_weights = backend.read(gradients(backend.asarray(np.ones(2), dtype))[1], dtype)
        assert np.any(by_weights[..., ~mask]) == (form == "linear")
        check_vjp_chain(backend, dtype, normal(2, 3, 80), **options)
    assert any(searches)


def _chain(backend, dtype, x, options):
    options = {k: backend.asarray(v, dtype) for k, v in options.items() if v is not None}
    return alc.LogChain(backend.asarray(x, dtype), **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["band", "wide band", "empty rows and columns"])
def test_entropy(backend, dtype, searches, form, name):
    mask, _ = STRUCTURES[name]
    options = given_as(form, masked(mask, 3))
    Case(backend, dtype, normal(2, 4, len(mask)), **options).check_entropy()
    assert any(searches)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [(1,), (3, 4)])
def test_lengths(backend, dtype, searches, form, batch):
    options = given_as(form, masked(band(75, 3, 1), *batch))
    case = Ragged(backend, dtype, normal(3, 5, 75), [2, 5, 4], **options)
    case.check_sums()
    assert any(searches)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("name", ["band", "empty rows and columns", "islands"])
def test_potentials_that_are_not_finite(np_backend, dtype, monkeypatch, form, bad, name):
    """What a zero is multiplied with may not be a number: rows that hold one are told apart."""
    mask, _ = STRUCTURES[name]
    K = len(mask)
    x = normal(5, 3, K)
    for row, state in enumerate((0, 25, K // 2, K - 1)):
        x[row, row % 3, state] = bad
    assert_same_as_whole(np_backend, dtype, monkeypatch, x, given_as(form, masked(mask, 1)))


@pytest.mark.parametrize(
    ("form", "bad"), [("linear", NAN), ("linear", -0.5), ("linear", INF), ("logs", NAN)]
)
@pytest.mark.parametrize("place", [(8, 9), (8, 60)])
def test_invalid_weights(np_backend, dtype, monkeypatch, form, bad, place):
    options = given_as(form, masked(band(77, 2, 2), 3, 1))
    (weights,) = (w for w in options.values() if w is not None)
    weights[(1, 0, *place)] = bad
    assert_same_as_whole(np_backend, dtype, monkeypatch, normal(3, 4, 77), options)


def assert_same_as_whole(backend, dtype, monkeypatch, x, options):
    """Compare with whole matrices: the same numbers but for rounding, and NaN in the same place."""
    names = ("forward_messages", "backward_messages", "marginals", "expected_transitions")
    results = []
    monkeypatch.setattr(matrices, "FEWEST_TERMS", 0)
    for terms in (0, 1 << 60):
        monkeypatch.setattr(matrices, "TERMS_OF_SEARCH", terms)
        chain = _chain(backend, dtype, x, options)
        results.append([getattr(chain, name)() for name in (*names, "log_partition", "entropy")])
    tolerance = 1e-4 if dtype == "float32" else 1e-12
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def prepared(weights, in_logs=False, dtype="float64", elements=1 << 20):
    given = weights.astype(dtype)
    ctx, _ = enter({"weights": given})
    return matrices.prepare(ctx, given, in_logs, ctx.precision, elements)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("elements", [1 << 20, 6000, 2000, 77])
@pytest.mark.parametrize("name", STRUCTURES)
def test_products(searches, form, turned, elements, name):
    """Both products are those of whole matrices, whatever the layout and the width of panels."""
    weights = masked(STRUCTURES[name][0], 2)
    weights = weights.swapaxes(-2, -1) if turned else weights
    with np.errstate(divide="ignore"):
        given = np.log(weights) if form == "logs" else weights
        matrix = prepared(given, form == "logs", elements=elements)
        if matrix.shift is not None:
            weights = weights / np.exp(matrix.shift)
        values = np.random.default_rng(1).random((2, 5, weights.shape[-1]))
        out = np.full_like(values, NAN)
        np.testing.assert_allclose(matrix.multiply(values), values @ weights, rtol=1e-13)
        np.testing.assert_allclose(
            matrix.multiply_transposed(values, out), values @ weights.swapaxes(-2, -1), rtol=1e-13
        )
        alive = values > 0.7
        np.testing.assert_array_equal(matrix.reached(alive), (values * alive) @ weights > 0)


@pytest.mark.parametrize("K", [77, 1000])
@pytest.mark.parametrize("turned", [False, True])
def test_cost_follows_the_weights(searches, K, turned):
    weights = masked(band(K, 4, 4), 1)
    weights = weights.swapaxes(-2, -1) if turned else weights
    matrix = prepared(weights)
    matrix.multiply(np.ones((1, 1, K)))
    area = sum((k.stop - k.start) * (j.stop - j.start) for k, j in matrix.blocks)
    # A panel of 32 columns meets 40 rows, and up to 7 more on either side.
    assert area <= (32 + 8 + 14) * K
    assert area < K * K


def test_no_search_without_zeros_or_for_few_terms(monkeypatch):
    searched = []
    monkeypatch.setattr(matrices, "find_blocks", lambda *args: searched.append(args) or [])
    prepared(masked(np.ones((1, 99, 99)))).multiply(np.ones((1, 1000, 99)))
    matrix = prepared(masked(band(99, 1, 1), 1))
    matrix.multiply(np.ones((1, 1, 99)))
    assert not searched
    for _ in range(3):
        matrix.multiply(np.ones((1, 1000, 99)))
    assert len(searched) == 1


def test_blocks_hold_all_weights():
    """Columns are in one block each, rows in one at least, and nonzero weights in blocks."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        K, count = int(rng.integers(64, 140)), int(rng.integers(0, 6))
        weights = np.zeros((2, K, K))
        for _ in range(count):
            k, j = rng.integers(0, K, 2)
            height, width = rng.integers(1, K // 2, 2)
            weights[rng.integers(2), k : k + height, j : j + width] = 1.0
        turned = weights.swapaxes(1, 2) if rng.random() < 0.5 else weights
        blocks = matrices.find_blocks(np, turned, 0.0, int(rng.integers(1, K + 1)))
        inside, times = np.zeros((K, K), bool), np.zeros(K, int)
        for k, j in blocks:
            inside[k, j], times[j] = True, times[j] + 1
        if blocks:
            assert not np.any(turned[:, ~inside])
            assert np.all(times == 1)
            assert np.all(inside.any(axis=1))
