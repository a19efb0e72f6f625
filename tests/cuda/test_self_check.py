"""Kernels that check themselves where they run: the CPU is the device, and some are spoilt."""

import shutil
import warnings

import numpy as np
import pytest

import arraylogchain as alc
from arraylogchain import _dispatch
from arraylogchain._context import quiet
from arraylogchain._cuda import modules, records, self_check
from arraylogchain._cuda.dtypes import C_TYPES
from arraylogchain._cuda.first_use import Probe
from arraylogchain._cuda.launch import Kernel
from tests.cuda.cpu_device import CpuDevice
from tests.cuda.instantiations import INSTANTIATIONS
from tests.cuda.product_checks import context, normal
from tests.test_chain import uniform

pytestmark = pytest.mark.usefixtures("compiler")

TABLES = (_dispatch.PRODUCTS, _dispatch.CHAINS)
OPERATIONS = [
    pytest.param(name, backend, id=f"{name}-{backend}")
    for table in TABLES
    for name, backends in table.items()
    for backend in backends
    if backend.startswith("cuda")
]
ALL = {Kernel(source, name) for source, names in INSTANTIATIONS.items() for name in names}

# What is changed in a source, and an operation and a dtype that have it.
SPOILT = {
    "products/exact.cu": ("sum.value()", "sum.value() + T(1)", "logmatmulexp"),
    "products/exact_posterior.cu": ("/= sum.sum", "/= 2 * sum.sum", "logmatmulexp_gradients"),
    "products/exact_posterior_sums.cu": (
        "sums[i] += sum;",
        "sums[i] = sum;",
        "logmatmulexp_gradients",
    ),
    "products/factors.cu": ("shifts[line]) :", "shifts[line] + T(1)) :", "logmatmulexp"),
    "products/logmatmulexp.cu": ("resumed ? kept +", "resumed ?", "logmatmulexp"),
    "products/maxima.cu": ("rint(top)", "rint(top) - T(200)", "logmatmulexp"),
    "products/maxplus.cu": ("first_term + number", "number", "maxplus_matmul"),
    "products/maxplus_gradients.cu": ("+ k * left_view.step", "", "maxplus_gradients"),
    "products/posterior_sums.cu": ("+ line0 + line]", "+ line]", "logmatmulexp_gradients"),
    "products/posterior_weights.cu": (
        "cotangent / sum",
        "cotangent / (sum + sum)",
        "logmatmulexp_gradients",
    ),
    "products/rounded.cu": ("x[i]);", "x[i] + x[i]);", "logmatmulexp_gradients"),
    "products/settle.cu": ("panel), value);", "panel), value + T(1));", "logmatmulexp"),
    "products/small.cu": ("= provable_from<T>(terms)", "= T(0)", "logmatmulexp"),
    "products/small_gradients.cu": (
        "x.at[e] *= of_left",
        "x.at[e] = of_left",
        "logmatmulexp_gradients",
    ),
    "products/thin.cu": ("int w = 1; writes", "int w = 2; writes", "logmatmulexp"),
    "chains/chain.cu": ("= max(longest, own_rows[r].length)", "= own_rows[r].length", "marginals"),
    "chains/entropy.cu": ("sum += w;", "sum += 1.5 * w;", "entropy"),
    "chains/factors.cu": ("t + 1 < lengths[q]", "t < lengths[q]", "expected_transitions"),
    "chains/filtered.cu": ("scale.nats - before.nats", "scale.nats", "filtered"),
    "chains/lengths.cu": ("numbers.at[i]", "numbers.at[0]", "log_partition"),
    "chains/log_weight.cu": ("t == length - 1", "t == c.count - 1", "log_weight"),
    "chains/pairs.cu": (
        "right[v / V][v % V], sums",
        "right[v / V][v % V], 0 * sums",
        "expected_transitions",
    ),
    "chains/prepare.cu": (": unit * (", ": T(0) * (", "forward_messages"),
    "chains/sample.cu": ("below += before", "below = before", "sample"),
    "chains/small.cu": ("return even + odd;", "return even;", "backward_messages"),
    "chains/trace.cu": ("column_at(c, t, state)", "column_at(c, t, 0)", "viterbi"),
    "chains/viterbi.cu": ("int part = 1; part < parts", "int part = 2; part < parts", "viterbi"),
}


def spoil(folder, source):
    """Return a device whose kernels of one file are wrong."""
    shutil.copytree(modules.FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    old, new, _ = SPOILT[source]
    text = (folder / source).read_text()
    assert old in text
    (folder / source).write_text(text.replace(old, new))
    return CpuDevice(seed=1, folder=folder)


def check(device, dtype, operation, kernels=None, backend="cuda"):
    with quiet():  # as all computing is done
        return self_check.check(context(device, dtype), operation, kernels, backend)


# For the others, which take as long again each, the test is exhaustive.
QUICK = ("products/factors.cu", "products/exact.cu", "chains/prepare.cu")


def test_all_sources_are_spoilt():
    assert set(SPOILT) == set(INSTANTIATIONS)


@pytest.mark.parametrize(
    "source",
    [pytest.param(s, marks=[] if s in QUICK else [pytest.mark.exhaustive]) for s in SPOILT],
)
def test_spoilt_kernels_are_caught(tmp_path, source):
    dtype = "float16" if source == "products/rounded.cu" else "float32"
    own = {kernel for kernel in ALL if kernel.source == source}
    found = check(spoil(tmp_path / "kernels", source), dtype, SPOILT[source][2], own)
    assert found.error > 1
    assert "err by" in found.problem
    assert any(kernel.name in found.problem for kernel in own)


@pytest.mark.exhaustive  # those of a product pass below as well
@pytest.mark.parametrize("precision", ["float32", "float64", "float16"])
@pytest.mark.parametrize(("operation", "backend"), OPERATIONS)
def test_kernels_pass(precision, operation, backend):
    device = CpuDevice(seed=3, flush_to_zero=precision != "float64")
    found = check(device, precision, operation, backend=backend)
    assert found.problem is None
    is_exact = operation.startswith(("maxplus", "sample"))
    assert (found.error == 0) is is_exact or operation == "viterbi"  # which is, or nearly
    assert device.launches


def test_every_kernel_is_in_a_case():
    seen = set()
    for dtype in C_TYPES:
        for operation, backend in (param.values for param in OPERATIONS):
            probe = Probe(CpuDevice(), multiprocessors=2)
            ctx = context(probe, dtype)
            function = _dispatch.implementation(operation, backend)
            with quiet():
                for case, _ in self_check._cases(ctx, operation):
                    case(function, ctx)
            seen |= probe.remembered.launched
    assert seen == ALL


# ------------------------------------------------------------------------- what a user sees of it


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Let kernels be checked, and have what has passed remembered in a file."""
    monkeypatch.setenv("ARRAYLOGCHAIN_SELF_CHECK", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_failed", set())
    return tmp_path / "arraylogchain" / "devices.jsonl"


A, B = normal(5, 7).astype("float32"), normal(7, 4, seed=1).astype("float32")
EXPECTED = np.log(np.exp(A.astype(float)) @ np.exp(B.astype(float)))


def product():
    np.testing.assert_allclose(alc.logmatmulexp(A, B), EXPECTED, rtol=1e-5)


POTENTIALS = normal(3, 6, 4).astype("float32")
TRANSITIONS = uniform(5, 4, 4).astype("float32")


def chain():
    return alc.LogChain(POTENTIALS, transitions=TRANSITIONS)


def test_what_has_passed_is_remembered(cache, use):
    first = use(CpuDevice())
    product()
    assert len(first.launches) > 1
    assert len(list(records.of_device(first.identity))) == 1
    product()
    before = len(first.launches)
    product()
    assert len(first.launches) == before + 1
    later = use(CpuDevice())  # another process
    product()
    assert len(later.launches) == 1
    # Another driver, say, or model.
    other = CpuDevice()
    other.identity = "another CPU"
    use(other)
    product()
    assert len(other.launches) > 1
    assert len(list(records.of_device(other.identity))) == 1


def test_other_sources_are_checked_again(cache, use, monkeypatch):
    use(CpuDevice())
    product()
    monkeypatch.setattr(records, "source_text", lambda source: f"another {source}")
    device = use(CpuDevice())
    product()
    assert len(device.launches) > 1


def test_a_folder_that_cannot_be_made_is_no_error(cache, use):
    cache.parent.write_text("a file where a folder would be")
    for _ in range(2):
        device = use(CpuDevice())
        product()
        product()
        assert len(device.launches) > 2


@pytest.mark.parametrize("captures", [False, True])
def test_nothing_is_checked_where_it_must_not_be(cache, use, monkeypatch, captures):
    device = use(CpuDevice())
    device.captures = captures
    if not captures:
        monkeypatch.setenv("ARRAYLOGCHAIN_SELF_CHECK", "0")
    # As if the call before had loaded them.
    device.load = lambda *_: None
    product()
    assert len(device.launches) == 1
    assert not cache.exists()


def test_array_operations_take_over(cache, use, tmp_path):
    device = use(spoil(tmp_path / "kernels", "products/small.cu"))
    device.identity = "Some Device, driver 1, CuPy 2"
    with pytest.warns(RuntimeWarning, match="logmatmulexp failed") as warned:
        product()
    (message,) = (str(w.message) for w in warned)
    assert "on Some Device, driver 1, CuPy 2: small<float, 8, 4> err by" in message
    assert "Please report" in message
    assert not cache.exists()
    before = len(device.launches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        product()
    assert len(device.launches) == before


@pytest.mark.exhaustive  # it compiles
def test_random_numbers_are_not_lost(cache, use, tmp_path):
    """They lie where samples go, until kernels are trusted."""
    use(spoil(tmp_path / "kernels", "chains/sample.cu"))
    with pytest.warns(RuntimeWarning, match="sample failed"):
        found = chain().sample(5, np.random.default_rng(0))
    use(None)
    np.testing.assert_array_equal(found, chain().sample(5, np.random.default_rng(0)))


@pytest.mark.exhaustive  # it compiles
def test_chains_take_other_routes(cache, use, tmp_path):
    device = use(spoil(tmp_path / "kernels", "chains/small.cu"))
    assert chain().plan().route == "kernel"
    with pytest.warns(RuntimeWarning, match="log_partition failed"):
        found = chain().log_partition()
    assert chain().plan().route != "kernel"
    assert chain().plan("marginals").route == "kernel"
    with pytest.warns(RuntimeWarning, match="value_and_pullback failed"):
        value, _ = alc.vjp.log_partition(chain())
    use(None)
    np.testing.assert_allclose(found, chain().log_partition(), rtol=1e-5)
    np.testing.assert_allclose(value, found, rtol=1e-5)
    assert device.launches
