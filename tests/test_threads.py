"""The pool of threads: every block once, whatever is called from where, and nothing left behind."""

import gc
import os
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain._core import threads as _threads
from arraylogchain._core.context import Context
from arraylogchain._core.threads import num_workers
from tests.checks import run_python


@pytest.fixture(autouse=True)
def _fresh_pool():
    yield
    _threads._after_fork()


def run_blocks(work, count, block, workers=None):
    with _threads.using(workers):
        _threads.run_blocks(work, count, block)


def blocks_of(count, block, workers=None):
    """Return the blocks that are run, in order, and the threads that ran them."""
    result, threads = [], set()

    def work(start, stop):
        time.sleep(0.001)
        result.append((start, stop))
        threads.add(threading.get_ident())

    run_blocks(work, count, block, workers)
    return sorted(result), threads


@pytest.mark.parametrize("workers", [None, 1, 2, 3, 8])
@pytest.mark.parametrize(("count", "block"), [(0, 4), (1, 4), (4, 4), (5, 4), (23, 4), (23, 1)])
def test_every_block_once(count, block, workers):
    result, threads = blocks_of(count, block, workers)
    assert result == [(i, min(i + block, count)) for i in range(0, count, block)]
    assert len(threads) <= max(1, workers or num_workers())


def test_all_workers_take_part():
    barrier = threading.Barrier(3, timeout=10)
    run_blocks(lambda start, stop: barrier.wait(), 3, 1, workers=3)


def test_pools_serve_calls_of_all_sizes():
    for count in range(2, 30):
        for workers in (2, 3, 4, num_workers() + 4):
            run_blocks(lambda start, stop: None, count, 1, workers)
    assert _threads._pool.cache_info().misses <= 4


@pytest.mark.parametrize(("count", "workers"), [(4, 8), (100, 1)])
def test_small_work_touches_no_pool(count, workers):
    run_blocks(lambda start, stop: None, count, 4, workers)
    assert not _threads._pool.cache_info().currsize


def test_error_states_reach_all_threads():
    out = np.empty(400)
    with warnings.catch_warnings(), np.errstate(divide="ignore"):
        warnings.simplefilter("error")
        barrier = threading.Barrier(2, timeout=10)

        def work(start, stop):
            barrier.wait()
            np.log(np.zeros(stop - start), out=out[start:stop])

        run_blocks(work, 400, 200, workers=2)
    assert np.all(out == -np.inf)


@pytest.mark.parametrize("error", [ValueError, IndexError, KeyboardInterrupt])
@pytest.mark.parametrize("raised_by", ["caller", "helper"])
def test_exceptions_propagate_and_leave_nothing_behind(error, raised_by):
    here, running, done = threading.get_ident(), set(), []
    barrier = threading.Barrier(2, timeout=10)

    def work(start, stop):
        running.add(start)
        if start < 2:
            barrier.wait()
            if (threading.get_ident() == here) == (raised_by == "caller"):
                raise error("from a block")
            time.sleep(0.05)
        else:
            time.sleep(0.01)
        done.append(start)
        running.discard(start)

    with pytest.raises(error, match="from a block"):
        run_blocks(work, 1000, 1, workers=2)
    assert len(running) == 1  # the block that raised
    assert len(done) < 500
    assert blocks_of(6, 2)[0] == [(0, 2), (2, 4), (4, 6)]


def test_calls_from_many_threads_and_from_within():
    total = np.zeros((8, 64), np.int64)

    def call(i):
        def outer(start, stop):
            def inner(first, last):
                total[i, start * 8 + first : start * 8 + last] += 1

            run_blocks(inner, 8, 1, workers=4)

        for _ in range(20):
            run_blocks(outer, 8, 1, workers=4)

    callers = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=30)
        assert not caller.is_alive()
    assert np.all(total == 20)


def test_helpers_that_never_begin_keep_nothing_alive(monkeypatch):
    """They stay in the queue of a pool that is busy; a workspace would not be kept."""
    pool = ThreadPoolExecutor(1, "arraylogchain")
    monkeypatch.setattr(_threads, "ThreadPoolExecutor", lambda size, name: pool)
    begun, done = threading.Event(), threading.Event()

    def long_work(start, stop):
        if threading.current_thread().name.startswith("arraylogchain"):
            begun.set()
        else:
            begun.wait(10)
        done.wait(10)

    other = threading.Thread(target=run_blocks, args=(long_work, 2, 1, 2))
    other.start()
    begun.wait(10)
    array = np.zeros(3)
    reference = weakref.ref(array)
    run_blocks(lambda start, stop, array=array: None, 4, 1, workers=2)
    del array
    gc.collect()
    alive = reference() is not None
    done.set()
    other.join(10)
    assert not alive


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_fork():
    code = """
import os, sys, threading, warnings
from arraylogchain._core.threads import run_blocks, using
warnings.simplefilter("ignore")  # of Python 3.12 and newer: there are threads
def both():
    barrier = threading.Barrier(2, timeout=10)
    with using(2):
        run_blocks(lambda i, j: barrier.wait(), 2, 1)
both()
child = os.fork()
both()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    run_python(code)


def test_at_exit_of_the_interpreter():
    code = """
import atexit
from arraylogchain._core.threads import run_blocks, using
found = []
with using(2):
    run_blocks(lambda i, j: None, 8, 1)
def last():
    with using(2):
        run_blocks(lambda i, j: found.append(i), 8, 1)
    assert sorted(found) == list(range(8))
    print("done")
atexit.register(last)
"""
    assert run_python(code) == "done"


@pytest.mark.parametrize(("value", "most"), [("1", 1), ("1,4", 1), ("x", None), ("", None)])
def test_size_follows_the_environment(monkeypatch, value, most):
    num_workers.cache_clear()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    free = num_workers()
    num_workers.cache_clear()
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert num_workers() == (most or free)


@pytest.mark.parametrize(
    ("text", "expected"), [("150000 100000\n", 1.5), ("max 100000\n", np.inf), (None, np.inf)]
)
def test_quotas_of_control_groups(monkeypatch, text, expected):
    def read_text(path):
        if text is None:
            raise FileNotFoundError(path)
        return text

    monkeypatch.setattr(_threads.Path, "read_text", read_text)
    assert _threads._quota() == expected


CHAIN = {
    "log_potentials": np.random.default_rng(0).normal(size=(3000, 40, 4)),
    "transitions": np.random.default_rng(1).random((39, 4, 4)),
}
A, B = np.random.default_rng(2).normal(size=(2, 40, 40))


def gradients(value_and_pullback):
    value, pullback = value_and_pullback
    value = value if isinstance(value, np.ndarray) else value.values
    return pullback(np.ones_like(value))


def tensor_gradient(workers):
    import torch

    arguments = {name: torch.asarray(x).requires_grad_() for name, x in CHAIN.items()}
    z = alc.LogChain(arguments.pop("log_potentials"), **arguments, workers=workers).log_partition()
    return torch.autograd.grad(z.sum(), list(arguments.values()))[0].numpy()


OPERANDS = dict.fromkeys(("matmul", "logmatmulexp", "maxplus_matmul"), (A, B))
OPERANDS |= {"logchainexp": ([A, B, A],), "logeinsumexp": ("ij,jk->ik", A, B)}
PATHS = np.zeros((3000, 40), int)
METHODS = dict.fromkeys(("log_partition", "entropy", "viterbi", "posterior", "filtered"), ())
METHODS |= {"best_paths": (3,), "log_weight": (PATHS,), "log_probability": (PATHS,)}


def chain(workers):
    return alc.LogChain(**CHAIN, workers=workers)


CALLS = {
    **{x: lambda n, x=x: getattr(alc, x)(*OPERANDS[x], workers=n) for x in OPERANDS},
    "logmatmulexp, wide": lambda n: alc.logmatmulexp(900 * A, 900 * B, workers=n),
    "maxplus_einsum": lambda n: alc.maxplus_einsum("ij,jk->ik", A, B, workers=n),
    **{
        f"vjp.{x}": lambda n, x=x: gradients(getattr(alc.vjp, x)(*OPERANDS[x], workers=n))
        for x in OPERANDS
    },
    "vjp.log_partition": lambda n: gradients(alc.vjp.log_partition(chain(n)))[:2],
    "tensor": tensor_gradient,
    **{x: lambda n, x=x: getattr(chain(n), x)(*METHODS[x]) for x in METHODS},
    "sample": lambda n: chain(n).sample(2, rng=np.random.default_rng(0)),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_as_many_workers_as_are_asked_for(monkeypatch, name):
    """Whoever shares out work sees the number, pullbacks and autograd included; bits are kept."""
    if name == "tensor":
        pytest.importorskip("torch")
    seen, leave = [], Context.to_caller

    def to_caller(self, result):
        seen.append(_threads.requested.get())
        return leave(self, result)

    monkeypatch.setattr(Context, "to_caller", to_caller)
    result = [CALLS[name](n) for n in (1, 3)]
    assert set(seen) == {1, 3}
    for parts in zip(*(x if isinstance(x, tuple) else (x,) for x in result), strict=True):
        np.testing.assert_array_equal(*parts)
    assert _threads.requested.get() is None


def test_no_more_workers_than_are_asked_for():
    with _threads.using(1):
        blocks_of(100, 1)
        assert not _threads._pool.cache_info().currsize
    with _threads.using(3):
        barrier = threading.Barrier(3, timeout=30)
        run_blocks(lambda start, stop: barrier.wait(), 3, 1)


@pytest.mark.parametrize("workers", [0, -2, True, 1.5, "2"])
def test_workers_that_cannot_be(workers):
    kind = ValueError if isinstance(workers, int) and workers is not True else TypeError
    for call in (
        lambda: alc.LogChain(np.zeros((1, 2)), workers=workers),
        lambda: alc.logmatmulexp(A, B, workers=workers),
        lambda: alc.logeinsumexp("ij,jk->ik", A, B, workers=workers),
        lambda: alc.vjp.logchainexp([A, B], workers=workers),
    ):
        with pytest.raises(kind, match="workers"):
            call()
