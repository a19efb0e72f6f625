"""The public face of the package."""

import importlib.resources
import pickle
import sys
import types

import numpy as np
import pytest

import arraylogchain as alc
from tests.checks import run_python

CLASSES = {"ChainPath", "ChainPosterior", "FilteredChain", "LogChain", "MaxPlusProduct", "Plan"}
FUNCTIONS = {"logchainexp", "logeinsumexp", "logmatmulexp", "matmul"}
# Limits of the number of calls, of files, and of the depth of calls.
MOST_CALLS, MOST_FILES, MOST_DEEP = 43, 14, 15
PUBLIC = {*CLASSES, *FUNCTIONS, "maxplus_einsum", "maxplus_matmul", "vjp", "__version__"}


def test_public_names():
    """All of them are listed, once, and documented; others are modules of the package."""
    assert set(alc.__all__) == PUBLIC
    assert len(alc.__all__) == len(PUBLIC)
    names = {x for x, value in vars(alc).items() if not isinstance(value, types.ModuleType)}
    assert {x for x in names if not x.startswith("_")} == PUBLIC - {"__version__", "vjp"}
    assert all(getattr(alc, name).__doc__ for name in PUBLIC - {"__version__"})


def test_version_is_a_release_number():
    assert all(part.isdigit() for part in alc.__version__.split(".")[:2])


def test_import_brings_in_no_optional_library():
    """Nor does solving something with NumPy arrays, but for Numba, which brings SciPy in."""
    code = """
import sys
import numpy as np
import arraylogchain as alc
print(sorted({"numba", "torch", "cupy", "scipy", "array_api_strict"} & set(sys.modules)))
x = np.zeros((2, 3, 3))
alc.logmatmulexp(x, x), alc.matmul(x, x), alc.maxplus_matmul(x, x), alc.logchainexp(x)
alc.LogChain(np.zeros((3, 3)), transitions=x).log_partition()
print(sorted({"torch", "cupy", "array_api_strict"} & set(sys.modules)))
"""
    assert run_python(code).split() == ["[]", "[]"]


def test_package_is_typed():
    assert importlib.resources.files("arraylogchain").joinpath("py.typed").is_file()


def test_a_chain_has_methods_and_no_other_public_attribute():
    chain = alc.LogChain(np.zeros((1, 2)))
    assert not [name for name in vars(chain) if not name.startswith("_")]
    assert all(getattr(chain, name).__doc__ for name in dir(chain) if not name.startswith("_"))


def test_small_calls_take_few_functions():
    """Marginals of 5 steps and 3 states take few calls, depths and files of the package."""
    pytest.importorskip("numba")
    chain = alc.LogChain(np.zeros((5, 3)), transitions=np.ones((3, 3)))
    chain.marginals()
    package = str(importlib.resources.files("arraylogchain"))
    files, depths, stack = set(), [], []

    def count(frame, event, _):
        if event == "call":
            stack.append(frame.f_code.co_filename.startswith(package))
            if stack[-1]:
                files.add(frame.f_code.co_filename)
                depths.append(sum(stack))
        elif event == "return" and stack:
            stack.pop()

    usual = sys.getprofile()
    sys.setprofile(count)
    try:
        chain.marginals()
    finally:
        sys.setprofile(usual)
    assert len(depths) <= MOST_CALLS, len(depths)
    assert len(files) <= MOST_FILES, len(files)
    assert max(depths) <= MOST_DEEP, max(depths)


class Emission(alc.LogChain):
    """A chain with arguments of its own."""

    def __init__(self, observed, *, scale, **options):
        super().__init__(scale * observed, **options)
        self.scale = scale


def test_subclasses_have_arguments_of_their_own():
    chain = Emission(np.ones((3, 2)), scale=2.0, transitions=np.ones((2, 2)))
    assert np.isclose(chain.log_partition(), 3 * 2.0 + 3 * np.log(2))
    again = pickle.loads(pickle.dumps(chain))
    assert again.scale == 2.0
    assert again.log_partition() == chain.log_partition()


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_numpy_results_without_axes_are_scalars(kind):
    chain = alc.LogChain(np.zeros((3, 2), kind), transitions=np.ones((2, 2), kind))
    value, pullback = alc.vjp.log_partition(chain)
    results = (value, chain.log_partition(), chain.entropy(), chain.log_weight([0, 1, 0]))
    results += (chain.viterbi().log_weight, chain.posterior().log_partition)
    assert {type(x) for x in results} == {kind}
    assert abs(round(value, 2) - 2.08) < 0.01
    gradients = pullback(value)
    assert gradients.log_potentials.shape == (3, 2)
