"""Properties that hold for all shapes, broadcasts, patterns of -inf and ranges."""

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import arraylogchain as alc
from tests import reference
from tests.chain_checks import check_chain
from tests.checks import check_logmatmulexp, check_maxplus
from tests.conftest import make_backend
from tests.error_model import assert_within, contraction_bound
from tests.gradient_checks import CHECKS, COTANGENTS

DTYPES = st.sampled_from(["float32", "float64"])
ELSEWHERE = st.sampled_from(["strict", "strict-no_float64", "torch"])
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


@given(
    operands=operands(),
    dtype=DTYPES,
    workspace=WORKSPACES,
    kind=st.sampled_from(COTANGENTS),
)
def test_products(operands, dtype, workspace, kind):
    """Values and gradients of all three."""
    for function, check in CHECKS.items():
        finite = [np.where(np.isfinite(x), x, 0) for x in operands]
        arguments = finite if function == "matmul" else operands
        check(make_backend("numpy"), dtype, *arguments, kind, workspace=workspace)


@given(operands=operands(), name=ELSEWHERE)
@settings(max_examples=40)
def test_products_elsewhere(operands, name):
    CHECKS["logmatmulexp"](make_backend(name), "float32", *operands)


@given(
    a=hnp.arrays(np.float64, (3, 4), elements=AWKWARD),
    b=hnp.arrays(np.float64, (4, 2), elements=AWKWARD),
    dtype=DTYPES,
)
def test_awkward_values(a, b, dtype):
    check_logmatmulexp(make_backend("numpy"), dtype, a, b)
    check_maxplus(make_backend("numpy"), dtype, a, b)


@st.composite
def chains(draw):
    """Draw the arguments of `check_chain`, with batch axes; weights as logs, or from 0 to large."""
    T, K = draw(st.integers(1, 8) | st.just(60)), draw(st.integers(1, 5))
    shapes = draw(hnp.mutually_broadcastable_shapes(num_shapes=5, max_dims=2, max_side=3))
    steps = draw(st.sampled_from([T - 1, 1]))
    x_batch, edge_batch, *end_batches, lengths_shape = shapes.input_shapes
    x = draw(entries((*x_batch, T, K)))
    weights = {"transitions": draw(entries((*edge_batch, steps, K, K)))}
    for name, own in zip(("initial", "final"), end_batches, strict=True):
        if draw(st.booleans()):
            weights[name] = draw(entries((*own, K)))
    sharpness = draw(st.sampled_from([None, 0.01, 0.1, 1.0]))
    options = {f"log_{name}": logs for name, logs in weights.items()}
    if sharpness is not None:  # linear weights, as far as float32 has them
        linear = {n: np.exp(np.clip(w * sharpness, -80, 80)) for n, w in weights.items()}
        options = {n: np.where(weights[n] == -np.inf, 0, w) for n, w in linear.items()}
    axes = {"transitions": 3, "initial": 1, "final": 1}
    batch = np.broadcast_shapes(x_batch, *(w.shape[: -axes[n]] for n, w in weights.items()))
    if draw(st.booleans()) and batch:
        # Lengths broadcast with the batch axes, and add none.
        shape = lengths_shape[max(0, len(lengths_shape) - len(batch)) :]
        own = batch[len(batch) - len(shape) :]
        shape = tuple(min(a, b) for a, b in zip(shape, own, strict=True))
        options["lengths"] = draw(hnp.arrays(np.int64, shape, elements=st.integers(1, T)))
    return {"x": x, **options}


@pytest.mark.chains
@given(chain=chains(), dtype=DTYPES, workspace=WORKSPACES)
@settings(max_examples=150)
def test_chain(chain, dtype, workspace):
    check_chain(make_backend("numpy"), dtype, **chain, workspace=workspace)


@pytest.mark.chains
@given(chain=chains(), name=ELSEWHERE)
@settings(max_examples=20)
def test_chain_elsewhere(chain, name):
    check_chain(make_backend(name), "float32", **chain)


@given(data=st.data(), n=st.integers(1, 6), K=st.integers(1, 4), dtype=DTYPES)
def test_logchainexp(data, n, K, dtype):
    stack = data.draw(entries((n, K, K))).astype(dtype)
    exact = reference.logchainexp(list(stack))
    bound = contraction_bound(list(stack), exact, dtype)
    assert_within(alc.logchainexp(stack), exact, bound)
    assert_within(alc.logchainexp(list(stack)), exact, bound)
