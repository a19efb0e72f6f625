"""Matrices that are mostly zeros: bands, left-to-right, block diagonal and triangular ones.

Compiled loops take no more than their band. All results are what they are anyhow.
"""

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _dispatch
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


# Masks of K x K matrices.
STRUCTURES = {
    "band": band(77, 4, 4),
    "left-to-right": band(96, 0, 1),
    "right-to-left": band(70, 1, 0),
    "antidiagonal": band(73, 2, 2)[::-1],
    "block diagonal": block_diagonal(101, 4),
    "wide band": band(130, 50, 0),
    "triangular": band(99, 99, 0),
    "permuted": permuted(band(77, 4, 4)),
    "empty rows and columns": with_empty_parts(84),
    "islands": islands(90),
    "nothing": np.zeros((70, 70), bool),
    "one full column": band(100, 0, 1) | (np.arange(100) == 50),
    "one full row": band(100, 0, 1) | (np.arange(100) == 50)[:, None],
    "small": band(40, 0, 1),
}


def masked(mask, *batch, seed=0):
    """Return weights where a mask, or a stack of masks, is true."""
    mask = np.asarray(mask)
    shape = np.broadcast_shapes((*batch, 1, 1), mask.shape)
    return np.random.default_rng(seed).uniform(0.1, 1.0, shape) * mask


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(np_backend, dtype, form, name):
    check_structure(np_backend, dtype, form, name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["left-to-right", "islands", "one full row"])
def test_libraries(backend, dtype, form, name):
    check_structure(backend, dtype, form, name)


def check_structure(backend, dtype, form, name):
    mask = STRUCTURES[name]
    K = len(mask)
    options = given_as(form, masked(mask, 1), np.linspace(0, 1, K))
    check_chain(backend, dtype, normal(4, K), **options)
    check_posterior(backend, dtype, normal(3, K), **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(3, 1), (3, 3)], ids=str)
def test_groups_and_steps(backend, dtype, form, shape):
    """Groups share their blocks, which hold the weights of all; every step has its own."""
    K = 83
    masks = [band(K, 2, 2), band(K, 6, 0), block_diagonal(K, 5)]
    masks = np.stack([masks, np.roll(masks, 1, axis=0), masks])
    transitions = masked(masks[: shape[0], : shape[1]])
    options = given_as(form, transitions)
    check_chain(backend, dtype, normal(3, 4, K), **options)
    check_posterior(backend, dtype, normal(3, 4, K), **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sd", [30, 1000])
def test_wide_ranges(np_backend, dtype, form, sd):
    x, K = normal(2, 4, 90, sd=sd), 90
    options = given_as(form, masked(band(K, 3, 3), 1))
    check_chain(np_backend, dtype, x, **options)
    check_posterior(np_backend, dtype, x, **options)


def test_wide_weights(backend, dtype):
    """Weights far from one are scaled, and the smallest underflow."""
    x, mask = normal(3, 90), band(90, 3, 3)
    decades = np.random.default_rng(5).uniform(-37, 37, (1, 90, 90))
    check_chain(backend, dtype, x, transitions=10.0**decades * mask)
    logs = np.where(mask, normal(2, 90, 90, sd=500), -INF)
    check_chain(backend, dtype, x, log_transitions=logs)
    check_posterior(backend, dtype, x, log_transitions=logs)


def test_left_to_right_from_its_first_state(backend, dtype):
    """Messages are -inf exactly where no path has led yet."""
    K, T = 70, 6
    options = {"transitions": masked(band(K, 0, 2), 1), "initial": np.eye(K)[0]}
    _, messages = check_chain(backend, dtype, normal(3, T, K), **options)
    steps, states = np.indices((T, K))
    reached = np.broadcast_to(states <= 2 * steps, messages.shape)
    np.testing.assert_array_equal(np.isfinite(messages), reached)
    check_posterior(backend, dtype, normal(3, T, K), **options)


@pytest.mark.parametrize("form", FORMS)
def test_gradients(backend, dtype, form):
    """Derivatives by linear weights are not zero where the weights are."""
    mask = band(80, 4, 0)
    for shape in ((1,), (2, 2)):
        options = given_as(form, masked(mask, *shape))
        _, gradients = alc.vjp.log_partition(_chain(backend, dtype, normal(2, 3, 80), options))
        by_weights = backend.read(gradients(backend.asarray(np.ones(2), dtype))[1], dtype)
        assert np.any(by_weights[..., ~mask]) == (form == "linear")
        check_vjp_chain(backend, dtype, normal(2, 3, 80), **options)


def _chain(backend, dtype, x, options):
    options = {k: backend.asarray(v, dtype) for k, v in options.items() if v is not None}
    return alc.LogChain(backend.asarray(x, dtype), **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["band", "wide band", "empty rows and columns"])
def test_entropy(backend, dtype, form, name):
    mask = STRUCTURES[name]
    options = given_as(form, masked(mask, 3))
    Case(backend, dtype, normal(2, 4, len(mask)), **options).check_entropy()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [(1,), (3, 4)])
def test_lengths(backend, dtype, form, batch):
    options = given_as(form, masked(band(75, 3, 1), *batch))
    case = Ragged(backend, dtype, normal(3, 5, 75), [2, 5, 4], **options)
    case.check_sums()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("name", ["band", "empty rows and columns", "islands"])
def test_potentials_that_are_not_finite(np_backend, dtype, monkeypatch, form, bad, name):
    """What a zero is multiplied with may not be a number: rows that hold one are told apart."""
    mask = STRUCTURES[name]
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
    # Arrays may change once the chain is made.
    monkeypatch.setattr("arraylogchain.chain.check_weights", lambda *_: None)
    options = given_as(form, masked(band(77, 2, 2), 3, 1))
    (weights,) = (w for w in options.values() if w is not None)
    weights[(1, 0, *place)] = bad
    assert_same_as_whole(np_backend, dtype, monkeypatch, normal(3, 4, 77), options)


def assert_same_as_whole(backend, dtype, monkeypatch, x, options):
    """Compare loops over bands with whole matrices: the same numbers, and NaN in the same place."""
    names = ("forward_messages", "backward_messages", "marginals", "expected_transitions")
    results = []
    for compiled in (True, False):
        monkeypatch.setattr(_dispatch, "COMPILED", compiled)
        chain = _chain(backend, dtype, x, options)
        results.append([getattr(chain, name)() for name in (*names, "log_partition", "entropy")])
    tolerance = 1e-4 if dtype == "float32" else 1e-12
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
