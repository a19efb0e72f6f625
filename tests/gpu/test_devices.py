"""Several devices: work is done where the arrays are, whichever device is current."""

import numpy as np
import pytest

import arraylogchain as alc
from tests.checks import mentions
from tests.conftest import Backend
from tests.gpu.calls import CALLS


@pytest.fixture
def second(backend):
    """Return the same library on the second device, while the first one stays current."""
    xp, is_cupy = backend.xp, backend.library == "cupy"
    if (xp.cuda.runtime.getDeviceCount() if is_cupy else xp.cuda.device_count()) < 2:
        pytest.skip("there is one CUDA device")
    device = xp.cuda.Device(1) if is_cupy else xp.device("cuda:1")
    return Backend(backend.name, xp, device, backend.dtypes)


def current_device(backend):
    cuda = backend.xp.cuda
    return cuda.Device().id if backend.library == "cupy" else cuda.current_device()


@pytest.mark.parametrize("name", list(CALLS))
def test_arrays_on_a_device_that_is_not_current(backend, second, name):
    call = CALLS[name]
    expected = [backend.to_numpy(x) for x in call.run(*call.arguments(backend))]
    outs = call.run(*call.arguments(second))
    assert current_device(backend) == 0
    for out, theirs in zip(outs, expected, strict=True):
        assert second.owns(out)
        np.testing.assert_allclose(second.to_numpy(out), theirs, rtol=2e-4, atol=1e-5)


def test_mixed_dtypes_on_a_device_that_is_not_current(backend, second):
    """Casts and array operations take place there as well."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(40, 50)), rng.normal(size=(50, 60))
    single, double = second.asarray(a, "float32"), second.asarray(b, "float64")
    out = alc.logmatmulexp(single, double)
    expected = alc.logmatmulexp(a.astype("float32"), b)
    np.testing.assert_allclose(second.to_numpy(out), expected, rtol=1e-12)
    value, pullback = alc.vjp.logmatmulexp(single, double)
    for ours, theirs in zip(pullback(value), (a, b), strict=True):
        assert second.owns(ours)
        assert ours.shape == theirs.shape
    chain = alc.LogChain(single, transitions=second.asarray(rng.random((1, 50, 50)), "float64"))
    assert second.owns(chain.viterbi().states)
    assert second.owns(chain.sample(3, rng=np.random.default_rng(0)))
    assert current_device(backend) == 0


def test_devices_side_by_side(backend, second):
    """Kernels, modules and tables are kept for each device, and never mixed up."""
    call = CALLS["logmatmulexp, unproved"]
    pairs = [(b, call.arguments(b)) for b in (backend, second) * 3]
    outs = [call.run(*arguments)[0] for _, arguments in pairs]
    first, *others = (b.to_numpy(out) for (b, _), out in zip(pairs, outs, strict=True))
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-5)


def test_arrays_on_different_devices(backend, second):
    a, b = backend.asarray(np.ones((3, 3))), second.asarray(np.ones((3, 3)))
    for pair in [(a, b), (b, a)]:
        with pytest.raises(ValueError, match=mentions("a", "b", "devices")):
            alc.logmatmulexp(*pair)
    with pytest.raises(ValueError, match=mentions("transitions", "devices")):
        alc.LogChain(a, transitions=b[None])
