"""Dask arrays: the same results as in memory, lazily, in any chunks."""

import os
import pickle

import numpy as np
import pytest

import arraylogchain as alc
from tests import error_model, reference
from tests.checks import (
    CHAIN_SHAPES,
    check_chain,
    check_logmatmulexp,
    check_matmul,
    check_maxplus,
    mentions,
)
from tests.conftest import Backend, import_or_skip
from tests.error_model import assert_within
from tests.gradient_checks import check_posterior, check_vjp_chain
from tests.test_einsum import check_einsum

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

pytestmark = pytest.mark.filterwarnings("ignore:Increasing number of chunks")


class DaskBackend(Backend):
    """Dask arrays of NumPy blocks of at most so many entries along their last axes."""

    def __init__(self, *chunks, scheduler="sync"):
        super().__init__("dask", np, None, ("float32", "float64"))
        object.__setattr__(self, "chunks", chunks)
        object.__setattr__(self, "scheduler", scheduler)

    def asarray(self, x, dtype=None):
        host = np.array(x, dtype)
        missing = host.ndim - len(self.chunks)
        sizes = (2,) * max(missing, 0) + self.chunks[max(-missing, 0) :]
        return da.from_array(
            host, chunks=tuple(min(n, m) for n, m in zip(sizes, host.shape, strict=True))
        )

    def to_numpy(self, x):
        return x.compute(scheduler=self.scheduler)

    def read(self, x, dtype):
        assert isinstance(x, da.Array)
        assert x.dtype == dtype
        out = np.asarray(self.to_numpy(x))
        assert out.dtype == dtype
        assert out.shape == x.shape
        return out


def thinned(cases, chunks):
    """Return each case in each way of chunks; only one way of each is no exhaustive test."""
    return [
        pytest.param(case, way, marks=[] if i % len(chunks) == j else [pytest.mark.exhaustive])
        for i, case in enumerate(cases)
        for j, way in enumerate(chunks)
    ]


PRODUCT_CHUNKS = [(9, 9, 9), (1, 2, 9), (2, 9, 3), (1, 1, 1)]
PRODUCT_SHAPES = [
    ((6, 5), (5, 7)),
    ((3, 6, 5), (5, 7)),
    ((3, 1, 6, 5), (4, 5, 7)),
    ((5,), (2, 5, 3)),
    ((2, 4, 5), (5,)),
    ((5,), (5,)),
    ((2, 3, 0), (0, 4)),
]


@pytest.mark.parametrize(("shapes", "chunks"), thinned(PRODUCT_SHAPES, PRODUCT_CHUNKS))
@pytest.mark.parametrize("sd", [1, 1000])
def test_products(shapes, chunks, sd):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(0, sd, shape) for shape in shapes)
    a[rng.random(a.shape) < 0.2] = -np.inf
    backend = DaskBackend(*chunks)
    check_logmatmulexp(backend, "float32", a, b)
    check_maxplus(backend, "float32", a, b)
    check_matmul(backend, "float64", np.nan_to_num(a, neginf=0), b)


def test_maxplus_takes_the_first_of_equal_terms_and_the_first_nan():
    a = np.zeros((2, 7))
    a[1, 5] = a[1, 3] = np.nan
    values, indices = alc.maxplus_matmul(da.from_array(a, chunks=(2, 2)), np.zeros((7, 1)))
    np.testing.assert_array_equal(indices, [[0], [3]])
    np.testing.assert_array_equal(values, [[0], [np.nan]])


def test_partial_results_are_not_rounded_to_half_precision():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 60)), rng.normal(size=(60, 4))
    check_logmatmulexp(DaskBackend(3, 4), "float16", a, b)


@pytest.mark.parametrize("chunks", [(9, 9, 9), (2, 9, 9), (1, 2, 1)])
def test_logchainexp(chunks):
    matrices = np.random.default_rng(0).normal(0, 30, (3, 7, 4, 4))
    exact = reference.logchainexp(list(np.moveaxis(matrices, 1, 0)))
    bound = error_model.product_chain_bound(list(np.moveaxis(matrices, 1, 0)), exact, "float64")
    backend = DaskBackend(*chunks)
    lazy = backend.asarray(matrices)
    for given in (lazy, [lazy[:, i] for i in range(7)]):
        assert_within(backend.read(alc.logchainexp(given), "float64"), exact, bound)
    nothing = alc.logchainexp(lazy[:, :0])
    np.testing.assert_array_equal(nothing, alc.logchainexp(matrices[:, :0]))


@pytest.mark.parametrize("chunks", [(9, 9), (2, 3), (1, 1)])
@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk,kl->il", [(3, 4), (4, 5), (5, 2)]),
        ("abik,bkj->ja", [(2, 3, 4, 5), (3, 5, 2)]),
        ("iij,j", [(3, 3, 2), (2,)]),
        ("ij,ij->ij", [(3, 4), (3, 4)]),
        ("...i,...i", [(3, 1, 4), (5, 4)]),
    ],
)
def test_einsum(equation, shapes, chunks):
    rng = np.random.default_rng(0)
    operands = [rng.normal(0, 100, shape) for shape in shapes]
    check_einsum(DaskBackend(*chunks), "float64", equation, operands)


CHAIN_CHUNKS = [(1, 9, 9), (2, 9, 2), (2, 3, 9), (9, 1, 9), (1, 5, 1)]


@pytest.mark.parametrize(("shapes", "chunks"), thinned(CHAIN_SHAPES, CHAIN_CHUNKS))
def test_chains(shapes, chunks):
    """Batches and time in chunks: values, messages, posteriors and gradients."""
    rng = np.random.default_rng(0)
    x, transitions, initial = (None if s is None else rng.random(s) + 0.01 for s in shapes)
    backend = DaskBackend(*chunks)
    check_chain(backend, "float64", 9 * x, transitions=transitions, initial=initial)
    options = {
        "log_transitions": np.log(transitions),
        "log_initial": None if initial is None else np.log(initial),
    }
    check_posterior(backend, "float32", 9 * x, **options)
    check_vjp_chain(backend, "float64", 9 * x, transitions=transitions, initial=initial)


@pytest.mark.parametrize("sd", [pytest.param(1, marks=pytest.mark.exhaustive), 50])
@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("chunk", [pytest.param(200, marks=pytest.mark.exhaustive), 70])
def test_long_chains(sd, per_step, chunk):
    rng = np.random.default_rng(0)
    x = rng.normal(0, sd, (2, 1000, 3))
    transitions = rng.dirichlet(np.ones(3), (999 if per_step else 1, 3))
    backend = DaskBackend(1, chunk, 3)
    check_chain(backend, "float64", x, transitions=transitions)
    check_posterior(backend, "float32", x, transitions=transitions)


def test_chains_that_never_forget():
    """No guess holds: what is computed again is right."""
    x = np.random.default_rng(0).normal(0, 1, (300, 3))
    stay = np.array([[[1, 0, 0], [0, 0.5, 0.5], [0, 0.5, 0.5]]])
    check_chain(DaskBackend(100, 3), "float64", x, transitions=stay)
    check_posterior(DaskBackend(100, 3), "float64", x, transitions=stay)


@pytest.mark.parametrize("chunks", [(2, 10, 2), (6, 3, 2)])
def test_gradients_beyond_all_numbers(dtype, chunks):
    """Where a block's derivative is the largest number already, so is the sum."""
    x = np.zeros((6, 10, 2), dtype)
    x[..., 1] = 900
    chain = {"transitions": np.eye(2, dtype=dtype), "initial": np.array([1, 0], dtype)}
    _, pullback = alc.vjp.log_partition(alc.LogChain(da.from_array(x, chunks=chunks), **chain))
    _, known = alc.vjp.log_partition(alc.LogChain(x, **chain))
    found = pullback(np.ones(6, dtype), ["transitions"]).transitions.compute(scheduler="sync")
    assert found[0, 1] == np.finfo(dtype).max
    np.testing.assert_array_equal(found, known(np.ones(6, dtype), ["transitions"]).transitions)


def lazy_and_not(shape=(5, 4, 6, 3), chunks=(2, 3, 6, 3), lengths=None):
    rng = np.random.default_rng(0)
    x, transitions, initial = rng.normal(size=shape), rng.random((4, 1, 3, 3)), rng.random(3)
    options = {"transitions": transitions, "initial": initial, "lengths": lengths}
    lazy = alc.LogChain(da.from_array(x, chunks=chunks), **options)
    return lazy, alc.LogChain(x, **{k: np.asarray(v) for k, v in options.items() if v is not None})


LENGTHS = np.random.default_rng(1).integers(1, 7, (5, 4))


@pytest.mark.parametrize(
    "lengths",
    [None, LENGTHS, LENGTHS[0], da.from_array(LENGTHS, chunks=(3, 2))],
    ids=["none", "memory", "shared", "lazy"],
)
def test_paths_entropies_and_lengths(lengths):
    """The rows of a block are a chain as any other: the same to rounding."""
    lazy, chain = lazy_and_not(lengths=lengths)
    states, weight = lazy.viterbi()
    best = chain.viterbi()
    np.testing.assert_array_equal(states, best.states)
    samples = lazy.sample(3, np.random.default_rng(5))
    for found, known in (
        (weight, best.log_weight),
        (lazy.log_weight(states), best.log_weight),
        (lazy.log_weight(samples), chain.log_weight(samples.compute())),
        *((getattr(lazy, name)(), getattr(chain, name)()) for name in ("entropy", "marginals")),
    ):
        assert found.dtype == known.dtype
        assert found.shape == known.shape
        scale = 2 * np.abs(known) + 6 * error_model.roundings(3)
        assert_within(found.compute(), known, 4 * error_model.EPS["float64"] * scale)


def test_samples_depend_on_generator_and_chunks_only():
    lazy, _ = lazy_and_not()
    first, again = (lazy.sample(4, np.random.default_rng(3)) for _ in range(2))
    other = lazy.sample(4, np.random.default_rng(4))
    assert first.shape == (4, 5, 4, 6)
    np.testing.assert_array_equal(
        first.compute(scheduler="sync"), again.compute(scheduler="threads")
    )
    assert np.any(first.compute() != other.compute())
    blocks = first.compute()
    assert np.any(blocks[:, :2, :3] != blocks[:, 2:4, :3])


@pytest.mark.parametrize("chunks", [(2, 3, 6, 3), (5, 4, 2, 3)])
def test_schedulers_give_the_same_bits(chunks):
    lazy, _ = lazy_and_not(chunks=chunks)
    gradients = alc.vjp.log_partition(lazy)[1](da.ones((5, 4)))
    results = [lazy.log_partition(), lazy.marginals(), lazy.expected_transitions(), *gradients]
    results += [lazy.viterbi().states, lazy.sample(3, np.random.default_rng(0)), lazy.entropy()]
    for x, y in zip(
        dask.compute(*results, scheduler="sync"),
        dask.compute(*results, scheduler="threads"),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("has_graphs", [True, False])
def test_blocks_are_made_twice_or_held(monkeypatch, has_graphs):
    """What one direction reads is made anew for the other, if Dask's graphs are as we know them."""
    made = []
    x = da.from_array(np.random.default_rng(0).normal(size=(40, 3)), chunks=(10, 3))
    y = x.map_blocks(lambda b: made.append(1) or b, dtype=float, meta=np.zeros((0, 0)))
    if not has_graphs:
        monkeypatch.delattr("dask._task_spec.convert_legacy_graph")
    found = alc.LogChain(y, transitions=np.ones((3, 3))).marginals()
    monkeypatch.undo()
    known = alc.LogChain(x.compute(), transitions=np.ones((3, 3))).marginals()
    np.testing.assert_allclose(found.compute(scheduler="sync"), known, rtol=1e-11)
    assert (len(made) > 4) == has_graphs


def test_nothing_is_computed_when_a_graph_is_built():
    def fail(block):
        raise AssertionError("a block was computed")

    x = da.zeros((4, 8, 3), chunks=(2, 4, 3)).map_blocks(
        fail, dtype=float, meta=np.zeros((0, 0, 0))
    )
    for y in (x, x.rechunk({1: -1})):
        chain = alc.LogChain(y, transitions=np.ones((1, 3, 3)))
        assert chain.log_partition().shape == (4,)
        assert chain.marginals().shape == (4, 8, 3)
        assert chain.expected_transitions().shape == (1, 3, 3)
        assert alc.vjp.log_partition(chain)[1](np.ones(4)).log_potentials.shape == (4, 8, 3)
        assert "2 rows" in str(chain.plan())
        assert "Dask" in repr(chain)
        assert chain.viterbi().states.shape == (4, 8)
        assert chain.sample(3, np.random.default_rng(0)).shape == (3, 4, 8)
    assert alc.logmatmulexp(x, x.transpose(0, 2, 1)).shape == (4, 8, 8)
    assert alc.logeinsumexp("bij,bkj->ik", x, x).shape == (8, 8)


def test_a_large_graph_is_built_quickly():
    """Layers, not tasks, are what building takes time for: 1,000 blocks have as many as one."""
    x = da.zeros((1000, 5, 3), chunks=(1, 5, 3))
    chain = alc.LogChain(x, transitions=np.ones((1, 3, 3)))
    assert len(chain.marginals().dask.layers) < 10
    assert len(chain.expected_transitions().dask.layers) < 20


def test_graphs_can_be_sent():
    lazy, _ = lazy_and_not()
    sent = pickle.loads(pickle.dumps(lazy.marginals()))
    np.testing.assert_array_equal(sent, lazy.marginals())


def cut_chain(rng, T=300, sd=1.0, per_step=False, **options):
    """Return a chain of three rows in chunks of rows and of time, and the same in memory."""
    x = rng.normal(0, sd, (3, T, 4))
    given = {"transitions": rng.random((T - 1 if per_step else 1, 4, 4)), **options}
    lazy = alc.LogChain(da.from_array(x, chunks=(2, 90, 4)), **given)
    return lazy, alc.LogChain(x, **given)


def assert_same(lazy, chain):
    """Check what chunks of time make of paths, entropies and normalised messages."""
    best, samples = lazy.viterbi(), lazy.sample(5, np.random.default_rng(1))
    np.testing.assert_array_equal(best.states, chain.viterbi().states)
    past = np.asarray(chain.viterbi().states < 0)
    np.testing.assert_array_equal(samples < 0, np.broadcast_to(past, samples.shape))
    for found, known in (
        (best.log_weight, chain.viterbi().log_weight),
        (lazy.log_weight(samples), chain.log_weight(samples.compute())),
        *((getattr(lazy, name)(), getattr(chain, name)()) for name in METHODS),
        *zip(lazy.filtered(), chain.filtered(), strict=True),
        *zip(lazy.posterior(), chain.posterior(), strict=True),
    ):
        assert (found.shape, found.dtype) == (known.shape, known.dtype)
        scale = 2 * np.abs(known) + known.size * error_model.roundings(4)
        assert_within(found.compute(), known, 4 * error_model.EPS["float64"] * scale)


METHODS = ("log_partition", "forward_messages", "backward_messages", "marginals", "entropy")
FINAL = np.array([0.0, 0.3, 0.0, 2.0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"per_step": True, "final": FINAL},
        {"lengths": [300, 90, 1], "final": FINAL, "initial": FINAL},
        {"lengths": [91, 1, 250]},
        {"transitions": np.eye(4) + np.triu(np.ones((4, 4)), 1), "final": FINAL},  # never forgets
        {"initial": np.zeros(4)},  # no path at all
    ],
    ids=["plain", "per step", "lengths", "short", "left to right", "impossible"],
)
def test_chunks_of_time(options):
    assert_same(*cut_chain(np.random.default_rng(0), **options))


@pytest.mark.parametrize("sd", [0, 2])
def test_best_paths_of_equal_weight(sd):
    """Of paths of the same weight it is the one that is found in memory."""
    rng = np.random.default_rng(0)
    x, logs = np.round(rng.normal(0, sd, (3, 300, 4))), rng.integers(0, 2, (4, 4)) * 1.0
    lazy = alc.LogChain(da.from_array(x, chunks=(2, 70, 4)), log_transitions=logs)
    states = alc.LogChain(x, log_transitions=logs).viterbi().states
    np.testing.assert_array_equal(lazy.viterbi().states, states)


def test_samples_do_not_depend_on_guesses(monkeypatch):
    """Where guesses hold, samples are those that are drawn chunk after chunk."""
    from arraylogchain._dask import pieces

    lazy, _ = cut_chain(np.random.default_rng(0))
    samples, held = lazy.sample(20, np.random.default_rng(1)), []
    after = pieces.Paths.after
    monkeypatch.setattr(pieces.Paths, "after", lambda *args: held.append(after(*args)) or held[-1])
    found = samples.compute(scheduler="sync")
    assert any(paths is not None for paths in held)
    monkeypatch.setattr(pieces.Paths, "after", lambda *args: None)
    np.testing.assert_array_equal(samples.compute(scheduler="sync"), found)


def test_samples_of_cut_chains_have_the_marginals():
    lazy, chain = cut_chain(np.random.default_rng(0), sd=0.3)
    samples = lazy.sample(3000, np.random.default_rng(1)).compute()
    shares = np.stack([(samples == k).mean(0) for k in range(4)], axis=-1)
    assert np.max(np.abs(shares - chain.marginals())) < 5.5 * 0.5 / np.sqrt(3000)


def test_errors():
    x = da.zeros((6, 4), chunks=3)
    unknown = x[da.arange(6, chunks=3) > 2]
    with pytest.raises(ValueError, match=mentions("a", "unknown", "compute_chunk_sizes")):
        alc.logmatmulexp(unknown, np.zeros((4, 2)))
    with pytest.raises(TypeError, match=mentions("b", "array_api_strict", "NumPy or CuPy")):
        alc.logmatmulexp(x, import_or_skip("array_api_strict").zeros((4, 2)))
    with pytest.raises(TypeError, match=mentions("a", "int64")):
        alc.matmul(x.astype(int), np.zeros((4, 2)))
    with pytest.raises(ValueError, match=mentions("(6, 4)", "(5, 2)")):
        alc.matmul(x, np.zeros((5, 2)))
    with pytest.raises(ValueError, match=mentions("lengths", "(7,)")):
        alc.LogChain(
            da.zeros((3, 6, 4)), transitions=np.ones((1, 4, 4)), lengths=da.ones(7, dtype=int)
        )
    too_long = alc.LogChain(x, transitions=np.ones((4, 4)), lengths=da.full((), 7))
    with pytest.raises(ValueError, match=mentions("lengths", "7", "between 1 and 6")):
        too_long.log_partition().compute(scheduler="sync")
    with pytest.raises(ValueError, match=mentions("log_potentials", "unknown")):
        alc.LogChain(unknown, transitions=np.ones((4, 4)))
    with pytest.raises(ValueError, match=mentions("log_potentials", "cut along", "workspace")):
        alc.LogChain(
            da.zeros((500, 400), chunks=(500, 100)),
            transitions=np.ones((1, 400, 400)),
            workspace=1 << 20,
        )
    with pytest.raises(TypeError, match=mentions("a", "Dask", "a.compute")):
        alc.vjp.matmul(x, x.T)


# ------------------------------------------------------------------------------- a real cluster


@pytest.fixture(scope="module")
def client():
    distributed = import_or_skip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def kill_once(block, flag):
    """Kill the worker that comes here first."""
    try:
        with open(flag, "x"):  # noqa: PTH123
            os._exit(1)
    except FileExistsError:
        return block


@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_loses_nothing(client, tmp_path):
    """A worker dies in the middle of everything; the bits are those without a cluster."""
    zarr = import_or_skip("zarr")
    rng = np.random.default_rng(0)
    x, transitions = rng.normal(size=(8, 600, 3)), rng.random((1, 3, 3))
    zarr.save_array(tmp_path / "x.zarr", x)
    stored = da.from_zarr(tmp_path / "x.zarr")
    for number, chunks in enumerate([(2, 600, 3), (4, 150, 3)]):
        lazy = stored.rechunk(chunks)
        chain = alc.LogChain(lazy, transitions=transitions)
        known = dask.compute(chain.log_partition(), chain.marginals(), scheduler="sync")
        flag = tmp_path / f"killed-{number}"
        unlucky = lazy.map_blocks(kill_once, flag=flag, dtype=x.dtype, meta=np.zeros((0, 0, 0)))
        chain = alc.LogChain(unlucky, transitions=transitions)
        found = dask.compute(chain.log_partition(), chain.marginals())
        assert flag.exists()
        for y, z in zip(found, known, strict=True):
            np.testing.assert_array_equal(y, z)


@pytest.mark.filterwarnings("ignore")
def test_results_go_to_zarr(client, tmp_path):
    lazy, _ = lazy_and_not(chunks=(2, 2, 6, 3))
    lazy.marginals().to_zarr(tmp_path / "out.zarr")
    found = da.from_zarr(tmp_path / "out.zarr").compute()
    np.testing.assert_array_equal(found, lazy.marginals().compute(scheduler="sync"))


@pytest.mark.parametrize("chunks", [(7, 30, 4), (20, 9, 4)])
def test_one_matrix_and_what_comes_together(chunks):
    rng = np.random.default_rng(0)
    x, transitions, final = rng.normal(size=(20, 30, 4)), rng.random((4, 4)), rng.random(4)
    options = {"transitions": transitions, "final": final}
    whole = alc.LogChain(x, **options)
    lazy = alc.LogChain(da.from_array(x, chunks=chunks), **options)
    for found, expected in zip(lazy.posterior(), whole.posterior(), strict=True):
        assert isinstance(found, da.Array)
        np.testing.assert_allclose(found.compute(scheduler="sync"), expected, rtol=1e-11)
    _, pullback = alc.vjp.log_partition(lazy)
    gradients = pullback(np.ones(20), ["transitions", "final"])
    expected = alc.vjp.log_partition(whole)[1](np.ones(20))
    assert gradients.transitions.shape == (4, 4)
    assert gradients.log_potentials is gradients.initial is None
    for found, other in zip(gradients[1:], expected[1:], strict=True):
        if found is not None:
            np.testing.assert_allclose(found.compute(scheduler="sync"), other, rtol=1e-11)
    rtol = 1e-11 if chunks[1] < 30 else 0
    for found, other in zip(lazy.filtered(), whole.filtered(), strict=True):
        np.testing.assert_allclose(found.compute(scheduler="sync"), other, rtol=rtol)
    assert ("20 rows" in str(lazy.plan("posterior"))) == (chunks[0] == 20)
