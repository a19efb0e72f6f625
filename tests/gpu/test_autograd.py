"""Derivatives of tensors on a GPU: the tests of autograd, transforms and compilation, there."""

import functools
import importlib
import types

import pytest

from tests.conftest import Backend, make_backend
from tests.gpu.elsewhere import borrowed

pytestmark = [
    # torch warns of its own code.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]

MODULES = [
    "test_broadcast",
    "test_entropy",
    "test_log_weight",
    "test_pad_states",
    "test_sampling",
    "test_torch_chain",
    "test_torch_compile",
    "test_torch_products",
    "test_vjp_products",
]
# These hand tensors to NumPy, or name the CPU.
OF_THE_CPU = {
    "test_errors",
    "test_model_with_a_chain",
    "test_tangent_of_wide_entries_far_from_zero",
    "test_tensors_that_do_not_fit",
    "test_torch_generator_is_for_tensors",
    "test_views",
}
MAKERS = ("arange", "empty", "eye", "full", "ones", "rand", "randn", "tensor", "zeros")


class TorchOnDevice(types.ModuleType):
    """torch, with functions that make tensors on a GPU unless they are told where."""

    def __init__(self, backend: Backend) -> None:
        super().__init__("torch")
        self._torch, self._device = backend.xp, backend.device

    def __getattr__(self, name):
        found = getattr(self._torch, name)
        return functools.partial(found, device=self._device) if name in MAKERS else found

    def from_numpy(self, x):
        return self._torch.from_numpy(x).to(self._device)


@pytest.fixture
def torch_backend() -> Backend:
    backend = make_backend("torch-cuda")
    return Backend(backend.name, TorchOnDevice(backend), backend.device, backend.dtypes)


@pytest.fixture
def torch(torch_backend: Backend) -> types.ModuleType:
    torch_backend.xp._dynamo.reset()
    # Operators are not there before something is compiled.
    importlib.import_module("arraylogchain._torch.compiled")
    return torch_backend.xp


globals().update(borrowed(MODULES, {"torch", "torch_backend"}, OF_THE_CPU))
