"""`workspace` bounds the memory that calls take from the pool, and all of it is returned."""

import gc
from functools import partial

import numpy as np
import pytest

import arraylogchain as alc
from tests.conftest import make_backend
from tests.gpu.calls import CALLS
from tests.gpu.memory import held, in_use, let_go, nbytes, peak
from tests.test_workspace import CHAINS, FUNCTIONS, METHODS, PARTS, PRODUCTS, SIZES

MIB = 2**20
DEFAULT = 256 * MIB

workspaces = pytest.mark.parametrize("workspace", [*SIZES, None])


def normal(backend, *shape, dtype="float32", seed=0, sd=1.0):
    return backend.asarray(np.random.default_rng(seed).normal(0, sd, shape), dtype)


def uniform(backend, *shape, dtype="float32", seed=0):
    return backend.asarray(np.random.default_rng(seed).random(shape), dtype)


def assert_kept(backend, workspace, call, scratch=0):
    """Fail if a call takes more than its results and its workspace.

    The first call allocates libraries' own memory, such as cuBLAS's workspace.
    """
    call()
    num_bytes, results = peak(backend, call)
    temporaries = num_bytes - nbytes(*(results if isinstance(results, tuple) else (results,)))
    assert temporaries <= (workspace or DEFAULT) + scratch


def on_device(backend, x):
    return backend.asarray(x, str(x.dtype))


# Products that are large enough for cuBLAS, and for all multiprocessors of a device.
LARGE = {
    "cube": ((1500, 1500), (1500, 1500)),
    "matrix and vector": ((5000, 3000), (3000,)),
    "small matrices": ((30_000, 16, 16), (30_000, 16, 16)),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("case", [*PRODUCTS, *LARGE])
def test_products(backend, case, function):
    if case in LARGE:
        a, b = (normal(backend, *shape, seed=i) for i, shape in enumerate(LARGE[case]))
    else:
        a, b = (on_device(backend, x) for x in PRODUCTS[case]())
    for workspace in (*SIZES, None):
        call = partial(getattr(alc, function), a, b, workspace=workspace)
        # torch takes megabytes for the largest of columns, however few there are.
        scratch = 32 * MIB * (case in LARGE and backend.library == "torch")
        assert_kept(backend, workspace, call, scratch)


@workspaces
@pytest.mark.parametrize("sd", [1, 100])
@pytest.mark.parametrize("function", ["logmatmulexp", "maxplus_matmul"])
def test_gradients_of_products(backend, function, sd, workspace):
    """They also keep a copy of the value, or of the indices."""
    a, b = normal(backend, 700, 600, sd=sd), normal(backend, 600, 800, sd=sd, seed=1)
    saved = 700 * 800 * (4 if function == "logmatmulexp" else 8)

    def gradients():
        value, pullback = getattr(alc.vjp, function)(a, b, workspace=workspace)
        parts = tuple(value) if isinstance(value, tuple) else (value,)
        return *parts, *pullback(parts[0])

    assert_kept(backend, workspace, gradients, saved)


@pytest.mark.parametrize("method", [*METHODS, *PARTS])
@pytest.mark.parametrize("case", list(CHAINS))
def test_chains(backend, case, method):
    x, options = CHAINS[case]()
    x, options = on_device(backend, x), {k: on_device(backend, v) for k, v in options.items()}
    for workspace in (*SIZES, None):
        chain = alc.LogChain(x, **options, workspace=workspace)
        assert_kept(backend, workspace, getattr(chain, method))


@workspaces
def test_gradients_of_a_chain(backend, workspace):
    """With an explicit workspace, they also keep about one message in sqrt(T).

    They keep all where the smallest workspace has room for the matrices of one step.
    """
    x, initial = normal(backend, 300, 60, 100), uniform(backend, 100)
    weights = uniform(backend, 59, 100, 100)
    saved = nbytes(x) // 4 if workspace == SIZES[1] else 2 * nbytes(x)

    def gradients():
        chain = alc.LogChain(x, transitions=weights, initial=initial, workspace=workspace)
        value, pullback = alc.vjp.log_partition(chain)
        return value, *pullback(value)

    assert_kept(backend, workspace, gradients, saved)


def test_forum_case(torch):
    """Value and gradients by autograd take at most a workspace and the messages that are kept."""
    backend = make_backend("torch-cuda")
    x, P = normal(backend, 500, 1, 40, 200), uniform(backend, 1, 39, 200, 200)
    p0 = uniform(backend, 1, 200)
    for leaf in (x, P, p0):
        leaf.requires_grad_()
    limit = 4 * nbytes(x) + 16 * 500 * 40  # with the messages' scales

    def value_and_gradients():
        chain = alc.LogChain(x, transitions=P, initial=p0, workspace=3 * nbytes(x))
        value = chain.log_partition()
        return value.detach(), *torch.autograd.grad(value.sum(), (x, P, p0))

    value_and_gradients()
    before = in_use(backend)
    num_bytes, results = peak(backend, value_and_gradients)
    assert num_bytes - nbytes(*results) <= limit
    # torch's count includes the unused remainders of blocks.
    assert torch.cuda.max_memory_allocated() - before <= num_bytes + 16 * MIB


def test_memory_comes_from_the_pool_of_the_arrays_library(backend):
    """Calls on tensors take nothing from CuPy's pool, though CuPy compiles and starts kernels."""
    other = make_backend("torch-cuda" if backend.name == "cupy" else "cupy")
    for call in CALLS.values():
        arguments = call.arguments(backend)
        call.run(*arguments)
        num_bytes, _ = peak(other, lambda call=call, arguments=arguments: call.run(*arguments))
        assert num_bytes == 0


@pytest.mark.parametrize("name", list(CALLS))
def test_all_memory_is_returned(backend, name):
    """After a call, and repeated calls take no more from the device than another block of torch."""
    call = CALLS[name]
    arguments = call.arguments(backend)
    for count in (3, 20):
        before = in_use(backend), held(backend)
        for _ in range(count):
            out = call.run(*arguments)
        assert in_use(backend) > before[0]
        del out
    assert in_use(backend) == before[0]
    assert held(backend) <= before[1] + 2 * MIB * (backend.library == "torch")


class Scarcity:
    """Context in which a pool may grow by a number of bytes."""

    def __init__(self, backend, growth):
        self.backend, self.limit = backend, held(backend) + growth

    def __enter__(self):
        xp = self.backend.xp
        if self.backend.library == "cupy":
            xp.get_default_memory_pool().set_limit(size=self.limit)
            return xp.cuda.memory.OutOfMemoryError
        total = xp.cuda.get_device_properties(0).total_memory
        xp.cuda.set_per_process_memory_fraction(self.limit / total)
        return xp.cuda.OutOfMemoryError

    def __exit__(self, *_):
        if self.backend.library == "cupy":
            self.backend.xp.get_default_memory_pool().set_limit(size=0)
        else:
            self.backend.xp.cuda.set_per_process_memory_fraction(1.0)


def product_that_needs_memory(backend):
    a = normal(backend, 2000, 2000)
    return lambda: alc.logmatmulexp(a, a), nbytes(a)


def chain_that_needs_memory(backend):
    x, P = normal(backend, 400, 100, 128), uniform(backend, 99, 128, 128)

    def gradients():
        value, pullback = alc.vjp.log_partition(alc.LogChain(x, transitions=P))
        return pullback(value)

    return gradients, nbytes(x)


@pytest.mark.parametrize("make", [product_that_needs_memory, chain_that_needs_memory])
def test_memory_is_returned_when_there_is_not_enough(backend, make):
    """A call that fails midway leaves nothing behind, and works when it is repeated."""
    call, size = make(backend)
    small = CALLS["logmatmulexp"]
    small.run(*small.arguments(backend))
    call()
    let_go(backend)
    before = in_use(backend)
    with Scarcity(backend, size + 2 * MIB) as error, pytest.raises(error):
        call()
    gc.collect()
    assert in_use(backend) == before
    assert peak(backend, call)[0] > size + 2 * MIB
    assert in_use(backend) == before
