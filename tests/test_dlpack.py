"""Arrays of libraries that can only export through DLPack, and are on a CUDA device: a stand-in.

No device is needed to see that they are handed to CuPy and back; NumPy plays CuPy's part.
"""

import sys
import types

import array_api_compat.numpy
import numpy as np
import pytest

import arraylogchain as alc
from tests.checks import mentions

CUDA = 2


class Exported:
    """An array of an unknown library on a CUDA device."""

    def __init__(self, x, device=CUDA):
        self.x, self.device = x, device
        self.shape, self.dtype, self.ndim = x.shape, x.dtype, x.ndim

    def __dlpack__(self, **options):
        return self.x.__dlpack__()

    def __dlpack_device__(self):
        return self.device, 0


@pytest.fixture
def library(monkeypatch):
    """A library of such arrays."""
    module = types.ModuleType("exporting")
    module.from_dlpack = lambda x: Exported(np.asarray(x))
    monkeypatch.setitem(sys.modules, "exporting", module)
    monkeypatch.setattr(Exported, "__module__", "exporting")
    return module


class CurrentDevice(str):
    """NumPy's only device, which like those of CuPy can be made the current one."""

    entered = 0

    def __enter__(self):
        CurrentDevice.entered += 1

    def __exit__(self, *_):
        pass


@pytest.fixture
def cupy(monkeypatch):
    """NumPy under the name of CuPy, but for what arrays are read from, and for devices."""
    device = array_api_compat.device
    monkeypatch.setattr(CurrentDevice, "entered", 0)
    monkeypatch.setattr(
        array_api_compat,
        "device",
        lambda x: CurrentDevice("cpu") if type(x) is np.ndarray else device(x),
    )
    module = types.ModuleType("array_api_compat.cupy")
    vars(module).update({k: v for k, v in vars(array_api_compat.numpy).items() if k[:2] != "__"})
    module.__array_namespace_info__ = array_api_compat.numpy.__array_namespace_info__
    module.from_dlpack = lambda exported: exported.x
    monkeypatch.setitem(sys.modules, "array_api_compat.cupy", module)
    return module


@pytest.mark.usefixtures("library", "cupy")
def test_arrays_go_to_cupy_and_back():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 4)), rng.normal(size=(4, 5))
    out = alc.logmatmulexp(Exported(a), Exported(b))
    assert isinstance(out, Exported)
    np.testing.assert_allclose(out.x, alc.logmatmulexp(a, b))
    # CuPy computes on the device that is current, wherever the arrays are.
    assert CurrentDevice.entered == 1
    chain = alc.LogChain(Exported(a), transitions=Exported(np.exp(b[None, :4, :4])))
    np.testing.assert_allclose(
        chain.log_partition().x,
        alc.LogChain(a, transitions=np.exp(b[None, :4, :4])).log_partition(),
    )


@pytest.mark.usefixtures("library")
def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "array_api_compat.cupy", None)
    with pytest.raises(TypeError, match=mentions("a", "CUDA device", "cuda12")):
        alc.logmatmulexp(Exported(np.zeros((2, 2))), Exported(np.zeros((2, 2))))
