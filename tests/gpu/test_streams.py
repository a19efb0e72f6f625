"""Work runs on the current stream of the library that the arrays are from, and on no other.

A stream is kept busy, then its input is written, then the library is called: on any other stream it
would read the earlier values. Values of before and after differ by far.
"""

import numpy as np
import pytest

import arraylogchain as alc
from tests.conftest import make_backend
from tests.gpu.calls import CALLS, WITHOUT_WAITING
from tests.gpu.streams import streams_of

# Far longer than it takes to queue a call, or to run one.
BUSY_MS = 100
LONG_MS = 500

calls = pytest.mark.parametrize("name", list(CALLS))


def to_numpy(backend, outs):
    return [backend.to_numpy(x) for x in outs]


def assert_same(result, expected):
    for ours, theirs in zip(result, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-5)


def some_calls_are_made(backend, streams, call, stream):
    """Compile and load kernels, and let the stream allocate its own memory."""
    with streams.current(stream):
        for seed in (1, 2):
            arguments = call.arguments(backend, seed=seed)
            for x in call.run(*arguments):
                x + x
            for x in arguments:
                x[...] = 0
            streams.spin(1)
    streams.wait()


@calls
def test_input_that_is_written_late(backend, streams, name):
    """Input from the same stream is waited for, and results are there for later work on it.

    The stream that is current in the other library, CuPy or torch, does not matter.
    """
    call = CALLS[name]
    other = streams_of(make_backend("torch-cuda" if backend.name == "cupy" else "cupy"))
    fresh = call.arguments(backend)
    expected = [2 * x for x in to_numpy(backend, call.run(*fresh))]
    late = call.arguments(backend, seed=5)
    stream, busy = streams.new(), other.new()
    some_calls_are_made(backend, streams, call, stream)
    other.spin(1)  # compiles
    streams.wait()
    with other.current(busy), streams.current(stream):
        other.spin(LONG_MS)
        streams.spin(BUSY_MS)
        for array, values in zip(late, fresh, strict=True):
            array[...] = values
        doubled = [x + x for x in call.run(*late)]
        for array in late:
            array[...] = 0  # a later read by the call gives zeros
        stream.synchronize()
        assert not other.is_done(busy)
    streams.wait()
    assert_same(to_numpy(backend, doubled), expected)


@calls
def test_another_stream_is_not_waited_for(backend, streams, name):
    call = CALLS[name]
    arguments = call.arguments(backend)
    expected = to_numpy(backend, call.run(*arguments))
    stream = streams.new()
    some_calls_are_made(backend, streams, call, stream)
    with streams.current(streams.default):
        streams.spin(LONG_MS)
    with streams.current(stream):
        out = call.run(*arguments)
    stream.synchronize()
    assert not streams.is_done(streams.default)
    streams.wait()
    assert_same(to_numpy(backend, out), expected)


@pytest.mark.parametrize("name", WITHOUT_WAITING)
def test_calls_do_not_wait(backend, streams, name):
    call = CALLS[name]
    arguments = call.arguments(backend)
    stream = streams.new()
    some_calls_are_made(backend, streams, call, stream)
    with streams.current(stream):
        streams.spin(LONG_MS)
        out = call.run(*arguments)
        assert not streams.is_done(stream)
    streams.wait()
    assert_same(to_numpy(backend, out), to_numpy(backend, call.run(*arguments)))


@pytest.mark.parametrize("name", ["logmatmulexp", "log_partition"])
def test_backward_of_autograd(torch, name):
    """torch runs the way back on the streams of the way forward, from a thread of its own."""
    backend = make_backend("torch-cuda")
    streams, call = streams_of(backend), CALLS[name]

    def gradients(arrays):
        leaves = [x.requires_grad_() for x in arrays]
        return torch.autograd.grad(call.run(*leaves)[0].sin().sum(), leaves)

    fresh = call.arguments(backend)
    expected = gradients([x.clone() for x in fresh])
    late = call.arguments(backend, seed=5)
    stream = streams.new()
    with streams.current(stream):
        gradients(call.arguments(backend, seed=1))
        streams.spin(BUSY_MS)
        for array, values in zip(late, fresh, strict=True):
            array.copy_(values)
        result = [x + x for x in gradients(late)]
    streams.wait()
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, 2 * theirs, rtol=2e-4, atol=1e-5)


def test_pullback_on_another_stream(torch):
    """Its inputs were made on the value's stream, which must not reuse their memory."""
    backend = make_backend("torch-cuda")
    streams, call = streams_of(backend), CALLS["gradients of log_partition"]
    x, transitions, initial = call.arguments(backend)
    _, *expected = call.run(x, transitions, initial)
    first, second = streams.new(), streams.new()

    def gradients(busy_ms):
        with streams.current(first):
            chain = alc.LogChain(x, transitions=transitions, initial=initial)
            value, pullback = alc.vjp.log_partition(chain)
        second.wait_stream(first)
        with streams.current(second):
            streams.spin(busy_ms)
            result = [x for x in pullback(value) if x is not None]
        del pullback
        with streams.current(first):
            # Were the memory of states free, these would get it, and change it at once.
            for size in (x.numel(), 2 * x.numel(), 6 * x.shape[0] * x.shape[1]):
                for _ in range(4):
                    torch.full((size,), torch.nan, device=x.device)
        streams.wait()
        return result

    for busy_ms in (1, BUSY_MS):
        result = gradients(busy_ms)
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-5)


def test_current_streams_and_devices_stay_as_they_are(backend, streams):
    a, b = CALLS["logmatmulexp"].arguments(backend)
    cupy, torch = make_backend("cupy").xp, make_backend("torch-cuda").xp

    def current():
        return (
            cupy.cuda.get_current_stream().ptr,
            torch.cuda.current_stream().cuda_stream,
            cupy.cuda.Device().id,
            torch.cuda.current_device(),
        )

    with streams.current(streams.new()):
        before = current()
        alc.logmatmulexp(a, b)
        assert current() == before


def test_results_do_not_depend_on_when_threads_run(backend, streams):
    """The same bits each time, also during the work of another stream."""
    for name in ("logmatmulexp", "logmatmulexp, unproved", "log_partition", "forward_messages"):
        call = CALLS[name]
        arguments = call.arguments(backend)
        expected = to_numpy(backend, call.run(*arguments))
        stream = streams.new()
        for _ in range(10):
            with streams.current(stream):
                noise = CALLS["matmul"].run(*CALLS["matmul"].arguments(backend))
            result = to_numpy(backend, call.run(*arguments))
            for ours, theirs in zip(result, expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)
            del noise
