"""What is tested on NumPy alone elsewhere, on a GPU: long chains, small workspaces, hard cases."""

import pytest

from tests.conftest import Backend
from tests.gpu.elsewhere import borrowed

MODULES = [
    "test_broadcast",
    "test_chain",
    "test_chain_long",
    "test_dtypes",
    "test_entropy",
    "test_lengths",
    "test_log_weight",
    "test_logchainexp",
    "test_logmatmulexp",
    "test_matmul",
    "test_maxplus",
    "test_pad_states",
    "test_posterior",
    "test_sampling",
    "test_semantics",
    "test_viterbi",
    "test_vjp_chain",
    "test_vjp_products",
]
# These count NumPy's allocations, or are about NumPy's generators.
OF_NUMPY = {
    "test_many_samples_of_one_chain_keep_to_the_workspace",
    "test_torch_generator_is_for_tensors",
}


@pytest.fixture
def np_backend(backend: Backend) -> Backend:
    return backend


globals().update(borrowed(MODULES, {"np_backend"}, OF_NUMPY))
