"""Properties that hold for all shapes, broadcasts, patterns of -inf and ranges."""

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arraylogchain as alc
from tests import reference
from tests.checks import check_chain, check_logmatmulexp, check_matmul, check_maxplus
from tests.conftest import make_backend
from tests.error_model import assert_within, chain_bound, product_chain_bound

DTYPES = st.sampled_from(["float32", "float64"])
WORKSPACES = st.sampled_from([None, 1 << 20, 1 << 21])
PRODUCT_SHAPES = hnp.mutually_broadcastable_shapes(
    signature="(m?,k),(k,n?)->(m?,n?)", max_dims=3, min_side=0, max_side=4
)
# Values that meet in awkward ways: zeros of both signs, limits, near cancellations, infinities.
AWKWARD = st.sampled_from(
    [
        -np.inf,
        np.inf,
        np.nan,
        *(s * v for v in (0, 1e-38, 1, 87, 110, 745, 1e4, 1e30, 3e38) for s in (1.0, -1.0)),
    ]
)


@st.composite
def entries(draw, shape):
    """Draw an array by its seed, its spread, its offset and the share of -inf in it."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sd = draw(st.sampled_from([0.0, 1.0, 20.0, 100.0, 1000.0, 1e6]))
    offset = draw(st.sampled_from([0.0, 0.0, 300.0, -1e4]))
    share = draw(st.sampled_from([0.0, 0.0, 0.1, 0.6, 1.0]))
    x = rng.normal(0, sd, shape) + offset
    return np.where(rng.random(shape) < share, -np.inf, x)


@st.composite
def operands(draw):
    shapes = draw(PRODUCT_SHAPES).input_shapes
    return [draw(entries(shape)) for shape in shapes]


@given(operands=operands(), dtype=DTYPES, workspace=WORKSPACES)
def test_logmatmulexp(operands, dtype, workspace):
    check_logmatmulexp(make_backend("numpy"), dtype, *operands, workspace=workspace)


@given(operands=operands(), name=st.sampled_from(["strict", "strict-no_float64", "torch"]))
def test_logmatmulexp_elsewhere(operands, name):
    check_logmatmulexp(make_backend(name), "float32", *operands)


@given(operands=operands(), dtype=DTYPES, workspace=WORKSPACES)
def test_maxplus(operands, dtype, workspace):
    check_maxplus(make_backend("numpy"), dtype, *operands, workspace=workspace)


@given(operands=operands(), dtype=DTYPES, workspace=WORKSPACES)
def test_matmul(operands, dtype, workspace):
    finite = [np.where(np.isfinite(x), x, 0) for x in operands]
    check_matmul(make_backend("numpy"), dtype, *finite, workspace=workspace)


@given(
    a=hnp.arrays(np.float64, (3, 4), elements=AWKWARD),
    b=hnp.arrays(np.float64, (4, 2), elements=AWKWARD),
    dtype=DTYPES,
)
def test_awkward_values(a, b, dtype):
    check_logmatmulexp(make_backend("numpy"), dtype, a, b)
    check_maxplus(make_backend("numpy"), dtype, a, b)


@given(operands=operands())
def test_product_is_above_its_largest_term(operands):
    """max <= log of the sum <= max + log K, the two products being computed apart."""
    largest = alc.maxplus_matmul(*operands).values
    K = operands[0].shape[-1]
    out = alc.logmatmulexp(*operands)
    finite = np.isfinite(largest)
    slack = 1e-12 * (1 + np.abs(largest[finite]))
    np.testing.assert_array_equal(finite, np.isfinite(out))
    assert np.all(out[finite] >= largest[finite] - slack)
    assert np.all(out[finite] <= largest[finite] + np.log(max(K, 1)) + slack)


@st.composite
def chains(draw):
    """Draw potentials, transitions as logs, and initial weights as logs, with batch axes.

    Some chains are long enough to be cut into segments.
    """
    T, K = draw(st.integers(1, 8) | st.just(120)), draw(st.integers(1, 5))
    shapes = draw(hnp.mutually_broadcastable_shapes(num_shapes=3, max_dims=2, max_side=3))
    steps = draw(st.sampled_from([T - 1, 1]))
    x_batch, edge_batch, initial_batch = shapes.input_shapes
    x = draw(entries((*x_batch, T, K)))
    edges = draw(entries((*edge_batch, steps, K, K)))
    initial = draw(st.none() | entries((*initial_batch, K)))
    return x, edges, initial


@pytest.mark.chains
@given(chain=chains(), dtype=DTYPES, workspace=WORKSPACES)
def test_chain_with_logs(chain, dtype, workspace):
    x, edges, initial = chain
    check_chain(
        make_backend("numpy"),
        dtype,
        x,
        log_transitions=edges,
        log_initial=initial,
        workspace=workspace,
    )


@pytest.mark.chains
@given(chain=chains(), dtype=DTYPES, sharpness=st.sampled_from([0.01, 0.1, 1.0]))
def test_chain_with_linear_weights(chain, dtype, sharpness):
    """Weights from 0 over tiny to large ones, as far as the dtype has them."""
    x, edges, initial = chain
    weights = [None if w is None else np.exp(np.clip(w * sharpness, -80, 80)) for w in chain[1:]]
    for linear, logs in zip(weights, (edges, initial), strict=True):
        if linear is not None:
            linear[logs == -np.inf] = 0
    transitions, start = weights
    check_chain(make_backend("numpy"), dtype, x, transitions=transitions, initial=start)


@given(data=st.data(), n=st.integers(1, 6), K=st.integers(1, 4), dtype=DTYPES)
def test_logchainexp(data, n, K, dtype):
    stack = data.draw(entries((n, K, K))).astype(dtype)
    exact = reference.logchainexp(list(stack))
    bound = product_chain_bound(list(stack), exact, dtype)
    assert_within(alc.logchainexp(stack), exact, bound)
    assert_within(alc.logchainexp(list(stack)), exact, bound)


@pytest.mark.chains
@given(data=st.data(), T=st.integers(2, 7), K=st.integers(1, 4))
def test_chain_is_a_product_of_its_matrices(data, T, K):
    """log_partition by the recursion and by logchainexp, two ways through the library."""
    x = data.draw(entries((T, K)))
    edges = data.draw(entries((T - 1, K, K)))
    partition = alc.LogChain(x, log_transitions=edges).log_partition()
    with np.errstate(invalid="ignore"):
        steps = edges + x[1:, None, :]
    product = alc.logmatmulexp(x[0], alc.logchainexp(steps))
    total = alc.logmatmulexp(product, np.zeros(K))
    exact = reference.chain(x, edges, edges_in_logs=True)
    bound = chain_bound(exact.log_partition, exact.partition_gap, T, K, "float64")
    scale = np.max(np.abs(x[np.isfinite(x)]), initial=0) + np.max(
        np.abs(edges[np.isfinite(edges)]), initial=0
    )
    assert_within(total, partition.astype(np.longdouble), bound + 1e-14 * T * (1 + scale))
