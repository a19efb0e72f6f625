"""`workspace` bounds all temporaries, for any shape, and a small one suffices."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain._inputs.options import check_workspace
from tests.chain_scenarios import left_to_right

SMALLEST = 1 << 20
SIZES = [SMALLEST, 3_000_000]


def normal(*shape, sd=1.0, seed=0, dtype="float32"):
    return np.random.default_rng(seed).normal(0, sd, shape).astype(dtype)


def uniform(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).random(shape).astype(dtype)


def temporaries(call):
    """Return the peak memory that a call allocates beyond its results, in bytes.

    The call is made once before: compilation and allocations of a first call do not count.
    """
    call()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        result = call()
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    parts = result if isinstance(result, tuple) else (result,)
    return peak - sum(part.nbytes for part in parts if part is not None)


def test_the_meter_works():
    x = np.ones((256, 256))
    assert temporaries(lambda: x + 1) < 4096
    assert x.nbytes <= temporaries(lambda: (x + 1).sum()) < x.nbytes + 4096


def sprinkled():
    x = normal(130, 140, sd=30)
    for i, value in enumerate((-np.inf, np.inf, np.nan)):
        x.ravel()[np.random.default_rng(i).integers(0, x.size, 40)] = value
    return x


def banded(n):
    x = normal(n, n)
    rows, columns = np.indices((n, n))
    x[np.abs(rows - columns) > n // 20] = -np.inf
    return x


PRODUCTS = {
    "dense": lambda: (normal(150, 200), normal(200, 160)),
    "dense, float64": lambda: (normal(90, 110, dtype="float64"), normal(110, 80, dtype="float64")),
    "huge K": lambda: (normal(2, 200_000), normal(200_000, 3)),
    "huge K, flagged": lambda: (normal(2, 30_000, sd=1000), normal(30_000, 3, sd=1000)),
    "vectors": lambda: (normal(100_000), normal(100_000)),
    "tiny batches": lambda: (normal(3000, 4, 4), normal(3000, 4, 4)),
    "tiny batches, flagged": lambda: (normal(3000, 4, 4, sd=1000), normal(3000, 4, 4, sd=1000)),
    "many rows": lambda: (normal(20_000, 8), normal(8, 9)),
    "many columns": lambda: (normal(9, 8), normal(8, 20_000)),
    "outer product": lambda: (normal(700, 1), normal(1, 600)),
    "broadcast a": lambda: (normal(60, 1, 5, 16), normal(32, 16, 7)),
    "broadcast b": lambda: (normal(500, 4, 1, 32), normal(4, 32, 32)),
    "interleaved": lambda: (normal(5, 1, 6, 1, 8, 20), normal(7, 1, 9, 20, 3)),
    "flagged": lambda: (normal(120, 64, sd=1000), normal(64, 110, sd=1000)),
    "half flagged": lambda: (normal(120, 64, sd=40), normal(64, 110, sd=40)),
    "flagged, float64": lambda: (
        normal(90, 64, sd=1000, dtype="float64"),
        normal(64, 90, sd=1000, dtype="float64"),
    ),
    "banded": lambda: (banded(300), banded(300)),
    "special values": lambda: (sprinkled(), sprinkled().T.copy()),
    "all -inf": lambda: (np.full((200, 200), -np.inf, "float32"), normal(200, 200)),
    "float16": lambda: (normal(150, 200, dtype="float16"), normal(200, 150, dtype="float16")),
    "mixed": lambda: (normal(150, 200, dtype="float16"), normal(200, 150, dtype="float64")),
    "transposed": lambda: (normal(200, 150).T, normal(160, 200).T),
    "view with gaps": lambda: (normal(300, 400)[::2, ::2], normal(400, 300)[::2, ::2]),
    "batch axis last": lambda: (np.moveaxis(normal(30, 40, 50), -1, 0), normal(40, 30)),
    "expanded": lambda: (np.broadcast_to(normal(1, 200), (300, 200)), normal(200, 300)),
}
FUNCTIONS = ["logmatmulexp", "matmul", "maxplus_matmul"]


@pytest.mark.parametrize("workspace", SIZES)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("case", list(PRODUCTS))
def test_products(case, function, workspace):
    a, b = PRODUCTS[case]()
    used = temporaries(lambda: getattr(alc, function)(a, b, workspace=workspace))
    assert used <= workspace


METHODS = ["log_partition", "forward_messages", "backward_messages", "posterior", "filtered"]
METHODS += ["entropy", "viterbi"]
# A posterior, which computes both, takes at least as much memory.
PARTS = ["marginals", "expected_transitions"]
PARTS = [pytest.param(name, marks=pytest.mark.exhaustive) for name in PARTS]
CHAINS = {
    "many rows": lambda: (normal(5000, 5, 8), {"transitions": uniform(4, 8, 8)}),
    "many rows, sd 20": lambda: (normal(1500, 6, 8, sd=20), {"transitions": uniform(5, 8, 8)}),
    "many rows, sd 1000": lambda: (normal(800, 6, 8, sd=1000), {"transitions": uniform(5, 8, 8)}),
    "logs": lambda: (normal(500, 9, 16), {"log_transitions": normal(8, 16, 16)}),
    "logs, sd 1000": lambda: (normal(200, 6, 8), {"log_transitions": normal(5, 8, 8, sd=1000)}),
    "long": lambda: (normal(3000, 4), {"transitions": uniform(1, 4, 4)}),
    "long, logs per step": lambda: (normal(3000, 4), {"log_transitions": normal(2999, 4, 4)}),
    "large K": lambda: (normal(4, 3, 1000), {"transitions": uniform(1, 1000, 1000)}),
    "large K, logs": lambda: (normal(2, 3, 700), {"log_transitions": normal(2, 700, 700)}),
    "matrix larger than the workspace": lambda: (
        normal(3, 600, dtype="float64"),
        {"transitions": uniform(600, 600, dtype="float64")},
    ),
    "large K, sd 1000": lambda: (normal(3, 3, 300, sd=1000), {"transitions": uniform(2, 300, 300)}),
    "matrix per row": lambda: (normal(4, 80), {"transitions": uniform(300, 1, 80, 80)}),
    "matrices per row": lambda: (normal(9, 9, 99), {"log_transitions": normal(9, 8, 99, 99)}),
    "batch of initial only": lambda: (
        normal(4, 12),
        {"transitions": uniform(3, 12, 12), "initial": uniform(2000, 12)},
    ),
    "longer": lambda: (normal(8, 3000, 60), {"transitions": uniform(60, 60)}),
    "rows of few steps": lambda: (normal(3000, 30, 9), {"transitions": uniform(9, 9)}),
    "left to right": lambda: (
        normal(100, 40, 30, sd=5),
        {"transitions": left_to_right(30).astype("float32")},
    ),
    "float16": lambda: (
        normal(500, 5, 16, dtype="float16"),
        {"transitions": uniform(4, 16, 16, dtype="float16")},
    ),
    "float64": lambda: (
        normal(500, 5, 16, sd=500, dtype="float64"),
        {"transitions": uniform(4, 16, 16, dtype="float64")},
    ),
    "ragged groups": lambda: (
        normal(40, 5, 180),
        {"transitions": uniform(40, 1, 180, 180), "lengths": np.arange(40) % 5 + 1},
    ),
    "some steps in logs": lambda: (
        normal(2000, 50, 8, dtype="float64") * np.where(np.arange(50)[:, None] % 5, 1, 200),
        {"transitions": np.maximum(uniform(8, 8, dtype="float64") - 0.5, 0)},
    ),
    "time first": lambda: (np.moveaxis(normal(6, 700, 9), 0, 1), {"transitions": uniform(5, 9, 9)}),
}


@pytest.mark.chains
@pytest.mark.parametrize("method", [*METHODS, *PARTS])
@pytest.mark.parametrize("case", list(CHAINS))
def test_chains(case, method):
    x, options = CHAINS[case]()
    for workspace in SIZES if method == "log_partition" else SIZES[:1]:
        chain = alc.LogChain(x, **options, workspace=workspace)
        assert temporaries(getattr(chain, method)) <= workspace


@pytest.mark.chains
@pytest.mark.parametrize("num_paths", [3, 40])
@pytest.mark.parametrize("case", list(CHAINS))
def test_best_paths(case, num_paths):
    x, options = CHAINS[case]()
    chain = alc.LogChain(x, **options, workspace=SMALLEST)
    assert temporaries(lambda: chain.best_paths(num_paths)) <= SMALLEST


@pytest.mark.chains
@pytest.mark.parametrize("operation", ["log_partition", "marginals", "entropy", "viterbi"])
@pytest.mark.parametrize(
    ("T", "K"),
    [(700, 140), *(pytest.param(2000, K, marks=pytest.mark.exhaustive) for K in (110, 140, 180))],
)
def test_chains_where_loops_begin_not_to_fit(T, K, operation):
    chain = alc.LogChain(normal(T, K), log_transitions=normal(1, K, K), workspace=SMALLEST)
    assert temporaries(getattr(chain, operation)) <= SMALLEST


@pytest.mark.chains
@pytest.mark.parametrize("method", ["log_partition", "marginals"])
def test_ragged_rows_with_matrices_that_leave_no_workspace(method):
    """Sorting them by length copies them, and array operations compute in a part of the rest."""
    x, transitions = normal(3, 4, 200, sd=300), uniform(3, 1, 200, 200) ** 60
    arguments = {"transitions": transitions, "lengths": [4, 2, 3]}
    chain = alc.LogChain(x, **arguments, workspace=SMALLEST)
    expected = getattr(alc.LogChain(x, **arguments), method)()
    np.testing.assert_allclose(getattr(chain, method)(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.chains
@pytest.mark.parametrize("lengths", ["full", "ragged"])
@pytest.mark.parametrize(
    "states",
    [np.zeros((500, 1000), np.int64), np.zeros((500, 1000), np.int8), np.zeros(1000, np.int64)],
    ids=["int64", "int8", "one path for all rows"],
)
@pytest.mark.parametrize("method", ["log_weight", "log_probability"])
def test_weights_of_paths(states, lengths, method):
    row_lengths = np.arange(500) + 1 if lengths == "ragged" else None
    options = {"transitions": uniform(4, 4), "lengths": row_lengths, "workspace": SMALLEST}
    chain = alc.LogChain(normal(500, 1000, 4), **options)
    assert temporaries(lambda: getattr(chain, method)(states)) <= SMALLEST


@pytest.mark.chains
@pytest.mark.parametrize("lengths", ["full", "ragged"])
@pytest.mark.parametrize(("shape", "count"), [((40, 17, 2), 3000), ((3, 1, 2), 100_000)])
def test_samples_beyond_their_states(shape, count, lengths):
    row_lengths = np.arange(shape[0]) % shape[1] + 1 if lengths == "ragged" else None
    options = {"transitions": uniform(2, 2), "lengths": row_lengths, "workspace": SMALLEST}
    chain = alc.LogChain(normal(*shape), **options)
    assert temporaries(lambda: chain.sample(count, rng=0)) <= SMALLEST


MATRIX_CHAINS = {
    "stack": lambda: normal(50, 16, 16),
    "stack, odd": lambda: normal(37, 16, 16),
    "batch": lambda: normal(40, 9, 8, 8),
    "wide range": lambda: normal(20, 7, 8, 8, sd=1000),
    "long": lambda: normal(3000, 3, 3),
    "large": lambda: normal(4, 300, 300, dtype="float64"),
    "large, wide range": lambda: normal(2, 4, 200, 200, sd=100),
    "float16": lambda: normal(30, 12, 12, dtype="float16"),
    "rectangular": lambda: [normal(10, 30), normal(30, 5), normal(5, 40), normal(40, 8)],
    "broadcast": lambda: [normal(20, 1, 4, 6), normal(10, 6, 6), normal(6, 5)],
}


@pytest.mark.parametrize("workspace", SIZES)
@pytest.mark.parametrize("case", list(MATRIX_CHAINS))
def test_logchainexp(case, workspace):
    matrices = MATRIX_CHAINS[case]()
    assert temporaries(lambda: alc.logchainexp(matrices, workspace=workspace)) <= workspace


@pytest.mark.parametrize("function", FUNCTIONS)
def test_smallest_workspace_is_accepted_everywhere(backend, function):
    a = backend.asarray(normal(40, 50, sd=30))
    b = backend.asarray(normal(50, 30, sd=30))
    small = getattr(alc, function)(a, b, workspace=SMALLEST)
    plain = getattr(alc, function)(a, b)
    small, plain = (r if isinstance(r, tuple) else (r,) for r in (small, plain))
    for x, y in zip(small, plain, strict=True):
        np.testing.assert_allclose(backend.to_numpy(x), backend.to_numpy(y), rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("product", [alc.matmul, alc.logmatmulexp, alc.maxplus_matmul])
@pytest.mark.parametrize("shapes", [((8, 50_000), (4, 50_000, 10)), ((6, 1171), (1, 4, 1171, 40))])
def test_merged_axes_with_many_terms(product, shapes):
    """Axes that cannot be merged in place are copied, but not all terms of many columns at once."""
    a, b = (np.ones(shape) for shape in shapes)
    assert temporaries(lambda: product(a, b, workspace=SMALLEST)) <= SMALLEST


@pytest.mark.exhaustive
@pytest.mark.chains
def test_kept_states_of_one_tile_at_a_time():
    """Each of two tiles keeps all of its states for the backward pass."""
    x, transitions = normal(200, 100, 512, dtype="float64"), uniform(1, 512, 512, dtype="float64")
    chain = alc.LogChain(x, transitions=transitions)
    assert temporaries(chain.marginals) <= 64 << 20


@pytest.mark.parametrize("device", ["cuda:0", "<CUDA Device 1>"])
def test_the_default_is_larger_on_cuda_devices(device):
    x = SimpleNamespace(device=device)
    assert check_workspace(None, np.zeros(1), x) == 256 * 2**20
    assert check_workspace(None, np.zeros(1), SimpleNamespace(device="cpu"), [1]) == 64 * 2**20
    assert check_workspace(2**20, x) == 2**20
