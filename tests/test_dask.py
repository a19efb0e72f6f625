"""Dask arrays: the same results as in memory, lazily, in any chunks."""

import os
import pickle
import warnings

import numpy as np
import pytest

import arraylogchain as alc
from tests import chain_scenarios, error_model, reference
from tests.chain_checks import check_chain
from tests.chain_scenarios import FORMS, make
from tests.checks import check_logmatmulexp, mentions
from tests.conftest import Backend, import_or_skip
from tests.error_model import assert_within
from tests.gradient_reference import Gradient
from tests.test_einsum import check_einsum
from tests.test_product_table import PAIRS, VALUES, pairs_of_axes

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

pytestmark = pytest.mark.filterwarnings("ignore:Increasing number of chunks")


class DaskBackend(Backend):
    """Dask arrays of NumPy blocks; `chunks` limits their lengths along the last axes."""

    def __init__(self, *chunks, scheduler="sync"):
        super().__init__("dask", np, None, ("float32", "float64"))
        # Parts of a sum are rounded before they are joined.
        self.__dict__.update(chunks=chunks, scheduler=scheduler, roundings=1.5)

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


PRODUCT_CHUNKS = [(9, 9, 9), (1, 2, 9), (2, 9, 3), (1, 1, 1)]
# Equal terms, or NaN, in several chunks: the index is the first.
PRODUCTS = [*(name for name, _ in pairs_of_axes()), "ties", "nan in both, sd = 1"]


@pytest.mark.parametrize("chunks", PRODUCT_CHUNKS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, chunks):
    for product, check in VALUES.items():
        masks = (np.isfinite(x) | (product != "matmul") for x in PAIRS[name])
        operands = (np.where(mask, x, 0) for mask, x in zip(masks, PAIRS[name], strict=True))
        check(DaskBackend(*chunks), "float64", *operands)


def test_partial_results_are_not_rounded_to_half_precision():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 60)), rng.normal(size=(60, 4))
    check_logmatmulexp(DaskBackend(3, 4), "float16", a, b)


@pytest.mark.parametrize("chunks", [(9, 9, 9), (2, 9, 9), (1, 2, 1)])
def test_logchainexp(chunks):
    matrices = np.random.default_rng(0).normal(0, 30, (3, 7, 4, 4)).astype("f4").astype(float)
    exact = reference.logchainexp(list(np.moveaxis(matrices, 1, 0)))
    bound = error_model.contraction_bound(list(np.moveaxis(matrices, 1, 0)), exact, "float64")
    backend = DaskBackend(*chunks)
    lazy = backend.asarray(matrices)
    for arguments in (lazy, [*(lazy[:, i].astype("f4") for i in range(6)), lazy[:, 6]]):
        assert_within(backend.read(alc.logchainexp(arguments), "float64"), exact, bound)
    empty = alc.logchainexp(lazy[:, :0])
    np.testing.assert_array_equal(empty, alc.logchainexp(matrices[:, :0]))


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


# Every way of chunks along rows, time and states, for chains with batch axes of every kind; and
# chains that show errors at a chunk's border: rounding, lost terms, or steps past a row's end.
CHAIN_CHUNKS = [(1, 9, 9), (2, 9, 2), (2, 3, 9), (9, 1, 9), (1, 5, 1)]
SHAPES = [f"{name}, {FORMS[i // 2 % 2]}" for i, name in enumerate(chain_scenarios.SHAPES)]
BORDERS = [
    "potentials near 1e4",
    "potentials near 1e4 and -1e4",
    "log matrices near 1000 and -1000",
    "sd = 30, linear",
    "hole, underflow from both ends",
    "final weights, ragged, linear",
    "final weights, ragged, nine rows, logs",
    "rows without a path",
    "nan in transitions, logs",
    "ties",
    "no rows, logs",
    "ragged, batch axis of initial weights alone, logs",
    "rows that widen, sd = 40, linear",
    "drifting apart, matrix for each step",
    "band of 2, sd = 300, logs",
    "leaving the range",
]


@pytest.mark.parametrize("chunks", [(2, 1), (1, 2)], ids=str)
def test_partial_products_beyond_all_numbers_give_the_total(chunks):
    operands = [np.full((2, 2), x * np.finfo(float).max) for x in (-0.6, -0.6, 0.9)]
    check_einsum(DaskBackend(*chunks), "float64", "ij,jk,kl->il", operands)
    lazy = [da.from_array(x, chunks=1) for x in operands]
    for matrices in (lazy, da.stack(lazy), da.stack(lazy).rechunk(2)):
        np.testing.assert_allclose(alc.logchainexp(matrices), -0.3 * np.finfo(float).max)


@pytest.mark.parametrize("chunks", CHAIN_CHUNKS)
@pytest.mark.parametrize("name", SHAPES)
def test_chains(name, chunks):
    check_chain(DaskBackend(*chunks), "float64", **make(name))


# Sums that cancel, and results that are narrower than messages.
MORE_DTYPES = {
    "potentials near 1e4 and -1e4": "float32",
    "final weights, ragged, linear": "float16",
}


@pytest.mark.parametrize("name", BORDERS)
def test_what_chunks_of_time_hand_over(name):
    options = make(name)
    *_, rows, T, _ = 1, *np.shape(options["x"])
    chunks = DaskBackend(max(2, rows // 2 + 1), max(3, T // 3), 9)
    for kind in {"float64", MORE_DTYPES.get(name, "float64")}:
        check_chain(chunks, kind, **options)


@pytest.mark.parametrize("chunks", [(2, 10, 2), (6, 3, 2)])
def test_gradients_beyond_all_numbers(dtype, chunks):
    """A sum with a block whose derivative is the largest number is the largest number too."""
    x = np.zeros((6, 10, 2), dtype)
    x[..., 1] = 900
    chain = {"transitions": np.eye(2, dtype=dtype), "initial": np.array([1, 0], dtype)}
    _, pullback = alc.vjp.log_partition(alc.LogChain(da.from_array(x, chunks=chunks), **chain))
    gradients = pullback(np.ones(6, dtype), ["transitions"])
    assert gradients.log_potentials is gradients.initial is None
    result = gradients.transitions.compute(scheduler="sync")
    assert result[0, 1] == np.finfo(dtype).max
    # Each row has one path of positive weight: in the first state, 900 below the other state.
    exact = np.array([6 * 9, 0, 0])
    gradient = Gradient(exact, exact, exact * 10 * 900, 0 * exact, terms=6 * 9)
    bound = error_model.posterior_bound(gradient, 10, 2, dtype)
    assert_within(result[[0, 1, 1], [0, 0, 1]], exact, bound)


def lazy_and_not(chunks=(2, 3, 6, 3), lengths=None):
    rng = np.random.default_rng(0)
    x, transitions, initial = rng.normal(size=(5, 4, 6, 3)), rng.random((4, 1, 3, 3)), rng.random(3)
    options = {"transitions": transitions, "initial": initial, "lengths": lengths}
    lazy = alc.LogChain(da.from_array(x, chunks=chunks), **options)
    return lazy, alc.LogChain(x, **{k: np.asarray(v) for k, v in options.items() if v is not None})


def test_lengths_may_be_lazy():
    lengths = np.random.default_rng(1).integers(1, 7, (5, 4))
    unsigned = da.from_array(lengths.astype("uint8"), chunks=(5, 2))
    lazy_lengths = da.from_array(lengths.copy(), chunks=((0, 3, 2), (2, 2)))
    for arguments in (unsigned, lazy_lengths, lengths):
        lazy, chain = lazy_and_not(lengths=arguments)
        np.subtract(7, lengths, out=lengths)  # both chains have read the lengths
        np.testing.assert_array_equal(lazy.viterbi().states, chain.viterbi().states)
        np.testing.assert_allclose(lazy.entropy().compute(scheduler="sync"), chain.entropy())


def test_empty_chunks():
    empty, rows = da.full((1, 1), -np.inf, chunks=((1,), (0, 1))), da.zeros((2, 1), chunks=1)
    assert not alc.maxplus_matmul(empty, np.zeros((1, 2))).indices.compute().any()
    assert alc.logmatmulexp(rows, empty).compute().tolist() == [[-np.inf]] * 2


def test_samples_depend_on_generator_and_chunks_only():
    lazy, _ = lazy_and_not()
    first, again = (lazy.sample(4, rng=np.random.default_rng(3)) for _ in range(2))
    other = lazy.sample(4, rng=np.random.default_rng(4))
    assert first.shape == (4, 5, 4, 6)
    np.testing.assert_array_equal(first.compute(scheduler="sync"), again.compute())
    assert np.any(first.compute() != other.compute())
    blocks = first.compute()
    assert np.any(blocks[:, :2, :3] != blocks[:, 2:4, :3])


@pytest.mark.parametrize("chunks", [(2, 3, 6, 3), (5, 4, 2, 3), (5, 2, 1, 3)])
def test_probabilities_of_paths_are_those_in_memory(chunks):
    """Also of paths with axes of their own, whose states past the lengths are never read."""
    lengths = np.random.default_rng(1).integers(1, 7, (5, 4))
    lazy, chain = lazy_and_not(chunks=chunks, lengths=lengths)
    states = np.maximum(chain.sample(3, rng=0), 0)
    states[np.broadcast_to(np.arange(6) >= lengths[..., None], states.shape)] = 99
    states[0, 0, 0, 0] = (states[0, 0, 0, 0] + 1) % 3
    result = lazy.log_probability(states).compute(scheduler="sync")
    np.testing.assert_allclose(result, chain.log_probability(states), rtol=1e-12)
    with pytest.raises(NotImplementedError, match="log_probability"):
        alc.vjp.log_probability(lazy, states)


@pytest.mark.parametrize("chunks", [(2, 3, 6, 3), (5, 4, 2, 3)])
def test_schedulers_give_the_same_bits_of_graphs_that_are_sent(chunks):
    lazy, _ = lazy_and_not(chunks=chunks)
    gradients = alc.vjp.log_partition(lazy)[1](da.ones((5, 4)))
    results = [lazy.log_partition(), lazy.marginals(), lazy.expected_transitions(), *gradients]
    results += [lazy.viterbi().states, lazy.sample(3, rng=np.random.default_rng(0)), lazy.entropy()]
    sent = pickle.loads(pickle.dumps(results))
    one, other = dask.compute(*results, scheduler="sync"), dask.compute(*sent, scheduler="threads")
    for x, y in zip(one, other, strict=True):
        np.testing.assert_array_equal(x, y)


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
        with pytest.raises(ValueError, match="block"):
            chain.plan()
        assert chain.viterbi().states.shape == (4, 8)
        assert chain.sample(3, rng=np.random.default_rng(0)).shape == (3, 4, 8)
    assert alc.logmatmulexp(x, x.transpose(0, 2, 1)).shape == (4, 8, 8)
    assert alc.logeinsumexp("bij,bkj->ik", x, x).shape == (8, 8)


def test_a_large_graph_is_built_quickly():
    """Building takes time for each layer, not each task: 1,000 blocks have as many as one."""
    x = da.zeros((1000, 5, 3), chunks=(1, 5, 3))
    chain = alc.LogChain(x, transitions=np.ones((1, 3, 3)))
    assert len(chain.marginals().dask.layers) < 10
    assert len(chain.expected_transitions().dask.layers) < 20


@pytest.mark.parametrize("sd", [0, 2])
def test_best_paths_of_equal_weight(sd):
    """Of paths of the same weight, the result is the same as in memory."""
    rng = np.random.default_rng(0)
    x, logs = np.round(rng.normal(0, sd, (3, 300, 4))), rng.integers(0, 2, (4, 4)) * 1.0
    lazy = alc.LogChain(da.from_array(x, chunks=(2, 70, 4)), log_transitions=logs)
    states = alc.LogChain(x, log_transitions=logs).viterbi().states
    np.testing.assert_array_equal(lazy.viterbi().states, states)


def test_n_best_paths_need_one_time_chunk():
    x, P = np.random.default_rng(0).normal(size=(5, 2, 6, 3)), np.ones((2, 1, 3, 3))
    chain = {"transitions": P, "lengths": [[6, 3]]}
    expected = alc.LogChain(x, **chain).best_paths(4)
    y = da.from_array(x, chunks=(5, 2, 3, 3))
    with pytest.raises(ValueError, match=r"log_potentials must have one chunk along time .* got 2"):
        alc.LogChain(y, **chain).best_paths(4)
    joined = alc.LogChain(y.rechunk({-2: -1}), **chain).best_paths(4)
    np.testing.assert_array_equal(joined.states, expected.states)


def below_all_numbers(dtype):
    """Return potentials whose only paths, in state 1, weigh less than the dtype's smallest log."""
    lowest = np.finfo(dtype).min
    x = np.zeros((3, 8, 2), dtype)
    x[0, [0, 4]] = lowest
    x[0, 6, 0] = -np.inf
    x[1:] = lowest / 4
    x[1, 7, 0] = -np.inf
    return x


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
@pytest.mark.parametrize("chunks", [(1, 8, 2), (3, 3, 2), (2, 1, 2)])
def test_paths_of_log_weights_beyond_the_dtype_are_those_in_memory(kind, chunks):
    x, lengths = below_all_numbers(kind), [8, 8, 3]
    weights = {"transitions": np.eye(2, dtype=kind), "log_final": np.array([-1, 0], kind)}
    lazy = alc.LogChain(da.from_array(x, chunks=chunks), **weights, lengths=lengths)
    states, log_weight = dask.compute(*lazy.viterbi(), scheduler="sync")
    assert log_weight[0] == log_weight[1] == -np.inf
    assert np.all(states == np.where(np.arange(8) < np.array([[8], [8], [3]]), 1, -1))
    in_memory = alc.LogChain(x, **weights, lengths=lengths)
    np.testing.assert_array_equal(states, in_memory.viterbi().states)
    samples = lazy.sample(3, rng=0).compute(scheduler="sync")
    assert np.all(samples[:, :2] == 1)
    np.testing.assert_array_equal(samples[:, :2], in_memory.sample(3, rng=0)[:, :2])


def test_messages_beyond_the_dtype_are_not_taken_for_impossible():
    """State 1 loses twice the lowest number in one block; in the next, state 0 ends."""
    x, weights = np.zeros((6, 2), "float32"), {"transitions": np.eye(2, dtype="float32")}
    x[:2, 1], x[5, 0] = np.finfo("float32").min, -np.inf
    lazy = alc.LogChain(da.from_array(x, chunks=(3, 2)), **weights)
    in_memory = alc.LogChain(x, **weights)
    np.testing.assert_array_equal(lazy.viterbi().states, in_memory.viterbi().states)
    np.testing.assert_array_equal(lazy.sample(2, rng=0), in_memory.sample(2, rng=0))


@pytest.mark.parametrize("chunks", [(2, 5, 3), (4, 2, 3), (1, 1, 3)])
@pytest.mark.parametrize("step", [0, 2, 3])
def test_rows_with_nan_or_infinite_weights_are_those_in_memory(chunks, step):
    x, weights = np.random.default_rng(0).normal(size=(4, 5, 3)), {"transitions": np.ones((3, 3))}
    x[1, step, 1], x[2, 3, 2] = np.nan, np.inf
    chain, lengths = alc.LogChain(x, **weights, lengths=[5, 4, 5, 2]), [5, 4, 5, 2]
    lazy = alc.LogChain(da.from_array(x, chunks=chunks), **weights, lengths=lengths)
    path = lazy.viterbi()
    assert np.all(path.states[1].compute() == -1)
    np.testing.assert_array_equal(path.states[[0, 1, 3]], chain.viterbi().states[[0, 1, 3]])
    np.testing.assert_allclose(path.log_weight, chain.viterbi().log_weight)
    samples = lazy.sample(2, rng=0).compute(scheduler="sync")
    assert np.all(samples[:, 1] == -1)
    np.testing.assert_array_equal(samples < 0, chain.sample(2, rng=0) < 0)


def test_sums_over_blocks_are_rounded_to_half_precision_once():
    """Gradients of many blocks cancel, and equal the gradients in memory."""
    rng = np.random.default_rng(0)
    x, transitions = rng.normal(0, 0.1, (40, 6, 3)), rng.random((3, 3))
    x, transitions = x.astype("float16"), transitions.astype("float16")
    g = np.repeat(np.array([100, -100], "float16"), 20)
    lazy = alc.LogChain(da.from_array(x, chunks=(1, 2, 3)), transitions=transitions)
    chain = alc.LogChain(x, transitions=transitions)
    rounding = 2.0**-10  # twice the half unit of a rounded result
    counts = lazy.expected_transitions().compute(scheduler="sync")
    np.testing.assert_allclose(counts, chain.expected_transitions(), rtol=rounding)
    result = alc.vjp.log_partition(lazy)[1](g).transitions
    expected = alc.vjp.log_partition(chain)[1](g).transitions
    assert result.dtype == expected.dtype == "float16"
    np.testing.assert_allclose(result.compute(scheduler="sync"), expected, rtol=rounding)


def test_nothing_warns_of_results_beyond_the_dtype():
    x = np.full((2, 6, 2), -3e4, "float16")
    lazy = alc.LogChain(da.from_array(x, chunks=(1, 2, 2)), transitions=np.eye(2, dtype="float16"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = lazy.log_partition(), lazy.viterbi().log_weight, lazy.entropy()
        log_z, weight, _ = dask.compute(*results, scheduler="sync")
    assert np.all(log_z == -np.inf)
    assert np.all(weight == -np.inf)


def test_negative_transitions_that_no_block_reads_are_accepted():
    transitions = -np.ones((2, 1, 3, 3))
    for steps, lengths in ((1, None), (2, 1), (2, [1, 1])):
        x = da.zeros((2, steps, 3), chunks=(1, 1, 3))
        lazy = alc.LogChain(x, transitions=transitions, lengths=lengths)
        np.testing.assert_allclose(lazy.log_partition(), np.log(3))
    lazy = alc.LogChain(da.zeros((2, 2, 3), chunks=(1, 1, 3)), transitions=transitions)
    with pytest.raises(ValueError, match=mentions("transitions", "log_transitions")):
        lazy.log_partition().compute(scheduler="sync")


def test_chains_are_shown_with_the_shapes_that_were_given():
    chain = alc.LogChain(da.zeros((6, 5, 4), chunks=(2, 5, 4)), transitions=np.ones((4, 4)))
    assert "transitions=[4, 4]" in repr(chain)
    assert "dask" in repr(chain)


def test_samples_of_cut_chains_have_the_marginals():
    lazy, chain = lazy_and_not(chunks=(3, 4, 2, 3))
    samples = lazy.sample(3000, rng=np.random.default_rng(1)).compute()
    marginals = np.stack([(samples == k).mean(0) for k in range(3)], axis=-1)
    assert np.max(np.abs(marginals - chain.marginals())) < 5.5 * 0.5 / np.sqrt(3000)
    # Final weights apply to the last time chunk only.
    x, P = np.array([[0, 0], [-np.inf, 0], [0, 0]]), np.eye(2)[::-1]
    lazy = alc.LogChain(da.from_array(x, chunks=(2, 2)), transitions=P, final=P[1])
    assert lazy.sample(2, rng=0).compute().tolist() == [[0, 1, 0]] * 2


def test_errors():
    x = da.zeros((6, 4), chunks=3)
    unknown = x[da.arange(6, chunks=3) > 2]
    with pytest.raises(ValueError, match=mentions("a", "unknown", "compute_chunk_sizes")):
        alc.logmatmulexp(unknown, np.zeros((4, 2)))
    with pytest.raises(ValueError, match=mentions("matrices[0]", "unknown", "compute_chunk_sizes")):
        alc.logchainexp([unknown, np.zeros((4, 2))])
    for call in (alc.logeinsumexp, alc.maxplus_einsum, alc.vjp.logeinsumexp):
        words = "operands[1]", "unknown", "compute_chunk_sizes"
        with pytest.raises(ValueError, match=mentions(*words)):
            call("jk,ij->ik", np.zeros((4, 2)), unknown)
    with pytest.raises(TypeError, match=mentions("b", "array_api_strict", "library")):
        alc.logmatmulexp(x, import_or_skip("array_api_strict").zeros((4, 2)))
    with pytest.raises(TypeError, match=mentions("a", "int64")):
        alc.matmul(x.astype(int), np.zeros((4, 2)))
    with pytest.raises(ValueError, match=mentions("(6, 4)", "(5, 2)")):
        alc.matmul(x, np.zeros((5, 2)))
    with pytest.raises(ValueError, match=mentions("lengths", "(7,)")):
        alc.LogChain(da.zeros((3, 6, 4)), transitions=np.eye(4), lengths=da.ones(7, dtype=int))
    with pytest.raises(TypeError, match=mentions("lengths", "float64")):
        alc.LogChain(da.zeros((3, 6, 4)), transitions=np.eye(4), lengths=da.ones(3))
    too_long = alc.LogChain(x, transitions=np.ones((4, 4)), lengths=da.full((), 7))
    with pytest.raises(ValueError, match=mentions("lengths", "7", "from 1 to T = 6")):
        too_long.log_partition().compute(scheduler="sync")
    with pytest.raises(ValueError, match=mentions("states", "(5, 6)", "(2, 6)")):
        alc.LogChain(da.stack([x, x]), transitions=np.eye(4)).log_weight(np.zeros((5, 6), int))
    with pytest.raises(TypeError, match=mentions("cotangent", "complex")):
        alc.vjp.log_partition(alc.LogChain(x, transitions=np.eye(4)))[1](1j)
    with pytest.raises(ValueError, match=mentions("log_potentials", "unknown")):
        alc.LogChain(unknown, transitions=np.ones((4, 4)))
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
    """Kill the first worker that calls this."""
    try:
        with open(flag, "x"):  # noqa: PTH123
            os._exit(1)
    except FileExistsError:
        return block


@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_loses_nothing(client, tmp_path):
    """A worker dies during the computation; results have the same bits as without one."""
    zarr = import_or_skip("zarr")
    rng = np.random.default_rng(0)
    x, transitions = rng.normal(size=(8, 600, 3)), rng.random((1, 3, 3))
    zarr.save_array(tmp_path / "x.zarr", x)
    stored = da.from_zarr(tmp_path / "x.zarr")
    for number, chunks in enumerate([(2, 600, 3), (4, 150, 3)]):
        lazy = stored.rechunk(chunks)
        chain = alc.LogChain(lazy, transitions=transitions)
        expected = dask.compute(chain.log_partition(), chain.marginals(), scheduler="sync")
        flag = tmp_path / f"killed-{number}"
        unlucky = lazy.map_blocks(kill_once, flag=flag, dtype=x.dtype, meta=np.zeros((0, 0, 0)))
        chain = alc.LogChain(unlucky, transitions=transitions)
        result = dask.compute(chain.log_partition(), chain.marginals())
        assert flag.exists()
        for y, z in zip(result, expected, strict=True):
            np.testing.assert_array_equal(y, z)
    chain.marginals().to_zarr(tmp_path / "out.zarr")
    np.testing.assert_array_equal(da.from_zarr(tmp_path / "out.zarr").compute(), expected[1])
