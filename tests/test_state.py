"""A call leaves nothing behind that another call, thread or copy can meet."""

from __future__ import annotations

import copy
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain.chain import PLANNED
from tests.chain_scenarios import make, normal, uniform
from tests.checks import mentions
from tests.test_gradient_memory import value_and_gradients

pytestmark = pytest.mark.chains
THREADS = 8


def parts_of(result: Any) -> list[np.ndarray]:
    """Return the arrays of a result, however they are nested."""
    if isinstance(result, (tuple, list)):
        return [x for part in result for x in parts_of(part)]
    if hasattr(result, "detach"):
        result = result.detach().numpy()
    return [] if result is None else [np.array(result)]


def assert_same_bits(result: Any, expected: Any) -> None:
    for ours, theirs in zip(parts_of(result), parts_of(expected), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def everything(chain: alc.LogChain) -> list[Any]:
    """Return what all methods of a chain give."""
    names = ("log_partition", "forward_messages", "backward_messages", "marginals", "entropy")
    names = (*names, "viterbi", "filtered", "posterior", "expected_transitions")
    result = [getattr(chain, name)() for name in names]
    samples = chain.sample(2, rng=np.random.default_rng(0))
    probabilities = chain.log_weight(samples), chain.log_probability(samples)
    return [*result, chain.best_paths(3), samples, *probabilities]


def chain_pullback(rows: int, T: int, K: int) -> tuple[Callable[..., Any], np.ndarray]:
    x = normal(rows, T, K, sd=3).astype("float32")
    P = uniform(K, K).astype("float32")
    _, pullback = alc.vjp.log_partition(alc.LogChain(x, transitions=P, final=P[0]))
    return pullback, np.ones(rows, "float32")


def einsum_pullback(equation: str, *shapes: tuple[int, ...]) -> tuple[Callable[..., Any], Any]:
    operands = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    value, pullback = alc.vjp.logeinsumexp(equation, *operands)
    return pullback, np.ones_like(value)


PULLBACKS: dict[str, Callable[[], tuple[Callable[..., Any], Any]]] = {
    "wide chain": lambda: chain_pullback(100, 10, 200),
    "narrow chain": lambda: chain_pullback(40, 50, 4),
    "long chain": lambda: chain_pullback(1, 5000, 3),
    "einsum": lambda: einsum_pullback("ij,jk,kl,lm->im", (40, 30), (30, 50), (50, 40), (40, 20)),
    "einsum of few": lambda: einsum_pullback("ij,jk,kl->il", (9, 8), (8, 7), (7, 6)),
    "einsum of two": lambda: einsum_pullback("ij,jk->ik", (30, 40), (40, 20)),
    "product": lambda: (alc.vjp.logmatmulexp(normal(90, 80), normal(80, 70))[1], np.ones((90, 70))),
    "stack": lambda: (alc.vjp.logchainexp(normal(9, 20, 20))[1], np.ones((20, 20))),
}


def assert_from_many_threads(calls: list[Callable[[], Any]], times: int) -> None:
    """Check that each of as many threads gets the bits that one thread alone gets."""
    expected, barrier = [call() for call in calls], threading.Barrier(len(calls))

    def repeat(call: Callable[[], Any]) -> list[Any]:
        barrier.wait(30)
        return [call() for _ in range(times)]

    with ThreadPoolExecutor(len(calls)) as pool:
        for result, alone in zip(pool.map(repeat, calls), expected, strict=True):
            for again in result:
                assert_same_bits(again, alone)


@pytest.mark.parametrize("name", PULLBACKS)
def test_one_pullback_from_many_threads(name):
    pullback, g = PULLBACKS[name]()
    calls = [partial(pullback, n * g) for n in range(1, THREADS + 1)]
    assert_from_many_threads(calls, 20 if "einsum" in name else 3)


def test_one_chain_from_many_threads():
    """Methods of one chain, and of others, at the same time."""
    chains = [alc.LogChain(normal(n, 30, 4), transitions=uniform(4, 4)) for n in (1, 20)]
    assert_from_many_threads([partial(everything, chain) for chain in chains] * (THREADS // 2), 1)


def test_calls_of_einsum_from_many_threads():
    call = partial(alc.logeinsumexp, "ij,jk,kl->il", normal(9, 8), normal(8, 7), normal(7, 6))
    assert_from_many_threads([call] * THREADS, 10)


# ------------------------------------------------------------------------------------- copies


def chains_to_copy() -> dict[str, Callable[[], alc.LogChain]]:
    options = {"transitions": uniform(4, 4), "initial": uniform(4), "final": uniform(4)}
    shards = make("shards and segments, ragged, sd = 1, linear")
    return {
        "numpy": lambda: alc.LogChain(normal(3, 9, 4), **options, lengths=[9, 2, 4]),
        "bounded": lambda: alc.LogChain(normal(9, 4), **options, workspace=1 << 21, workers=1),
        "shards": lambda: alc.LogChain(shards["x"], **{n: shards[n] for n in shards if n != "x"}),
    }


COPIES = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy}
COPIES["copy"] = copy.copy


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", chains_to_copy())
def test_chains_are_copied(name, way):
    chain = chains_to_copy()[name]()
    expected = everything(chain)
    again = COPIES[way](chain)
    assert repr(again) == repr(chain)
    assert str(again.plan()) == str(chain.plan())
    assert_same_bits(everything(again), expected)
    assert_same_bits(everything(chain), expected)


@pytest.mark.parametrize("way", COPIES)
def test_results_are_copied(way):
    chain = alc.LogChain(normal(3, 9, 4), transitions=uniform(4, 4))
    results = [*everything(chain), alc.maxplus_matmul(normal(3, 4), normal(4, 2))]
    results.append(alc.vjp.log_partition(chain)[1](np.ones(3)))
    for result in results:
        again = COPIES[way](result)
        assert type(again) is type(result)
        assert_same_bits(again, result)
    plan = chain.plan("marginals")
    assert str(COPIES[way](plan)) == str(plan)


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_modules_that_hold_a_chain_are_copied(torch_backend, way):
    torch = torch_backend.xp
    x, P = (torch.from_numpy(a).requires_grad_() for a in (normal(9, 4), uniform(4, 4)))
    module = torch.nn.Module()
    module.x, module.P = torch.nn.Parameter(x.detach()), torch.nn.Parameter(P.detach())
    module.chain = alc.LogChain(module.x, transitions=module.P)
    again = COPIES[way](module)
    z = again.chain.log_partition()
    torch.testing.assert_close(z, module.chain.log_partition(), rtol=0, atol=0)
    z.backward()
    # The copy's chain is of the copy's parameters.
    torch.testing.assert_close(again.x.grad.sum(), torch.tensor(9.0, dtype=x.dtype))
    assert module.x.grad is None


# ------------------------------------------------------------- arrays that change between calls


def test_arrays_are_read_at_each_call():
    x, P = normal(9, 4), uniform(4, 4)
    chain = alc.LogChain(x, transitions=P)
    everything(chain)
    x += normal(9, 4, seed=1)
    P *= uniform(4, 4, seed=2)
    expected = everything(alc.LogChain(x.copy(), transitions=P.copy()))
    assert_same_bits(everything(chain), expected)


def assert_every_method_raises(chain: alc.LogChain, *words: object) -> None:
    paths = [np.zeros(8, int)]
    for name in PLANNED:
        options = {"log_weight": paths, "log_probability": paths, "best_paths": [2]}.get(name, [])
        with pytest.raises(ValueError, match=mentions(*words)):
            getattr(chain, name)(*options)


def test_shapes_are_read_at_each_call():
    """A shape that is changed in place makes another chain, or one that says what is wrong."""
    x, P = normal(12, 4), uniform(4, 4)
    chain = alc.LogChain(x, transitions=P)
    x.shape = 3, 4, 4
    assert_same_bits(everything(chain), everything(alc.LogChain(x.copy(), transitions=P)))
    x.shape = 8, 6
    assert_every_method_raises(chain, "transitions", (4, 4), (8, 6), "[6, 6]")


@pytest.mark.parametrize("changed", ["x", "P"])
def test_pullbacks_are_of_the_shapes_that_the_value_had(changed):
    arguments = {"x": normal(12, 4), "P": uniform(4, 4)}
    chain = alc.LogChain(arguments["x"], transitions=arguments["P"])
    _, of_chain = alc.vjp.log_partition(chain)
    _, of_product = alc.vjp.logmatmulexp(arguments["x"], arguments["P"])
    expected = of_chain(1.0), of_product(np.ones((12, 4)))
    arguments[changed].shape = -1
    assert_same_bits((of_chain(1.0), of_product(np.ones((12, 4)))), expected)


MATRICES = normal(90, 80), normal(80, 70, seed=1)
# A function of `vjp`, and its arguments, in which arrays are made anew for each library.
DIFFERENTIATED: dict[str, tuple[str, Any]] = {
    "matmul": ("matmul", MATRICES),
    "logmatmulexp": ("logmatmulexp", MATRICES),
    "logmatmulexp, small": ("logmatmulexp", (MATRICES[0][:9], MATRICES[1][:, :9])),
    "logmatmulexp, vectors": ("logmatmulexp", (MATRICES[0][0], MATRICES[1][:, 0])),
    "maxplus_matmul": ("maxplus_matmul", MATRICES),
    "logchainexp, stack": ("logchainexp", (normal(3, 5, 5),)),
    "logchainexp, one matrix": ("logchainexp", (normal(1, 5, 5),)),
    "logchainexp, sequence": ("logchainexp", (MATRICES,)),
    "logeinsumexp, transposed": ("logeinsumexp", ("ij->ji", MATRICES[0])),
    "logeinsumexp, added": ("logeinsumexp", ("ij,jk->ijk", *MATRICES)),
    "logeinsumexp, product": ("logeinsumexp", ("ij,jk->ik", *MATRICES)),
    "logeinsumexp, number": ("logeinsumexp", ("ij,jk->", *MATRICES)),
    "log_partition": ("log_partition", (normal(30, 9, 4), uniform(4, 4))),
}


@pytest.mark.parametrize("replacement", [np.nan, -np.inf])
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_pullback_after_changes_of_what_was_returned_gives_the_same(backend, name, replacement):
    function, given = DIFFERENTIATED[name]

    def to_backend(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(to_backend, x))
        return backend.asarray(x, "float32") if isinstance(x, np.ndarray) else x

    def read(results: Any) -> list[np.ndarray]:
        flat = results[0] if isinstance(results[0], list) else results
        return [backend.to_numpy(x).copy() for x in flat if x is not None]

    arguments = to_backend(given)
    if function == "log_partition":
        arguments = (alc.LogChain(arguments[0], transitions=arguments[1]),)
    value, pullback = getattr(alc.vjp, function)(*arguments)
    values = value.values if function == "maxplus_matmul" else value
    g = to_backend(np.ones(values.shape))
    gradients = pullback(g)
    expected = read(gradients)
    returned = [*value] if isinstance(value, tuple) else [value]
    for x in [*returned, *(gradients[0] if isinstance(gradients[0], list) else gradients)]:
        if x is not None and x.ndim:  # NumPy's scalars cannot be changed
            x[...] = -1 if "int" in str(x.dtype) else replacement
    assert_same_bits(read(pullback(g)), expected)


def test_tensors_replaced_between_calls(torch_backend):
    torch = torch_backend.xp
    x, P = (torch.nn.Parameter(torch.from_numpy(a)) for a in (normal(9, 4), uniform(4, 4)))
    chain = alc.LogChain(x, transitions=P)
    with torch.no_grad():
        chain.log_partition()
    chain.log_partition()
    x.data, P.data = x.data + 1, 2 * P.data
    expected = alc.LogChain(x.detach().clone(), transitions=P.detach().clone())
    with torch.no_grad():
        assert_same_bits(chain.log_partition(), expected.log_partition())
    assert_same_bits(chain.log_partition().detach(), expected.log_partition())
    assert_same_bits(chain.viterbi(), expected.viterbi())
    x.data, P.data = x.data.float(), P.data.float()
    expected = alc.LogChain(x.detach(), transitions=P.detach())
    assert chain.log_partition().dtype == expected.log_partition().dtype == torch.float32
    assert_same_bits(chain.viterbi(), expected.viterbi())
    x.data = torch.zeros(12)
    assert_every_method_raises(chain, "log_potentials", (12,), "[..., T, K]")


def test_tensors_that_become_sparse_between_calls(torch_backend):
    torch = torch_backend.xp
    x = torch.from_numpy(normal(5, 3))
    chain = alc.LogChain(x, transitions=torch.ones(3, 3, dtype=x.dtype))
    torch.utils.swap_tensors(x, x.to_sparse())
    with pytest.raises(ValueError, match=mentions("log_potentials", "sparse_coo", "to_dense()")):
        chain.viterbi()


def test_tensors_changed_between_calls(torch_backend):
    """Values, shapes and memory of tensors, and of what is copied, are read at each call."""
    torch = torch_backend.xp
    x, P = torch.from_numpy(normal(4, 4)), torch.from_numpy(uniform(4, 4))
    counts, negative = torch.arange(1, 5), torch._neg_view(-torch.from_numpy(uniform(4)))
    chain = alc.LogChain(x, transitions=P, initial=counts, final=negative)
    plain = alc.LogChain(x, transitions=P)
    changes = (
        lambda: x.mul_(2),
        lambda: x.t_(),
        lambda: P.set_(uniform_tensor[:, 1:5]),
        lambda: counts.add_(1),
        lambda: negative.mul_(2),
        lambda: x.resize_(3, 4),
        lambda: setattr(P, "data", torch._neg_view(-P)),
    )
    uniform_tensor = torch.from_numpy(uniform(4, 9))
    for change in changes:
        change()
        now = x.clone(), P.clone()
        expected = alc.LogChain(now[0], transitions=now[1])
        assert_same_bits(plain.posterior(), expected.posterior())
        initial, final = counts.double(), negative.clone()
        expected = alc.LogChain(now[0], transitions=now[1], initial=initial, final=final)
        assert_same_bits(chain.posterior(), expected.posterior())


# ---------------------------------------------------------------------------------- interruption


def wide_chain() -> alc.LogChain:
    return alc.LogChain(normal(40, 60, 100), transitions=uniform(100, 100))


CALLS: dict[str, Callable[[], Any]] = {
    "long chain": lambda: alc.LogChain(normal(60_000, 4), transitions=uniform(4, 4)).marginals(),
    "many rows": lambda: value_and_gradients(
        alc.vjp.log_partition, alc.LogChain(normal(4000, 20, 4), transitions=uniform(4, 4))
    ),
    "wide chain": lambda: value_and_gradients(alc.vjp.log_partition, wide_chain()),
    "entropy": lambda: wide_chain().entropy(),
    "best path": lambda: wide_chain().viterbi(),
    "product": lambda: alc.logmatmulexp(normal(400, 300, sd=300), normal(300, 400, sd=300)),
}


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers of signals")
@pytest.mark.parametrize("name", CALLS)
def test_interrupted_calls_leave_nothing_behind(name):
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread only")
    call = CALLS[name]
    expected, interrupted = call(), 0

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    usual = signal.signal(signal.SIGALRM, interrupt)
    try:
        for delay in (0.0002, 0.001, 0.003, 0.006, 0.012, 0.03):
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                call()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
    assert interrupted
    assert_same_bits(call(), expected)


def test_an_interrupted_pullback_can_be_called_again():
    """What is kept of the value is as it was, wherever the interruption came."""
    pullback, g = chain_pullback(100, 10, 200)
    expected = pullback(g)
    for line in (50, 400, 1200, 2000):
        left = [line]

        def trace(frame: Any, event: str, arg: Any, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return trace

        usual = sys.gettrace()
        sys.settrace(trace)
        try:
            pullback(g)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(usual)
        assert_same_bits(pullback(g), expected)
