"""The suite's own backends: what is required is never skipped silently."""

import numpy as np
import pytest

from arraylogchain import _select
from arraylogchain._inputs.arrays import prepare_inputs
from tests import conftest


@pytest.fixture
def _missing(monkeypatch):
    """Make every library fail to import."""
    monkeypatch.setattr(conftest, "_import", lambda library: ImportError(f"no {library}"))


@pytest.mark.usefixtures("_missing")
@pytest.mark.parametrize("value", ["", "array_api_strict"])
def test_missing_library_is_skipped_with_a_reason(monkeypatch, value):
    monkeypatch.setenv("ALC_REQUIRE_BACKENDS", value)
    with pytest.raises(pytest.skip.Exception, match="torch cannot be imported: no torch"):
        conftest.make_backend("torch")


@pytest.mark.usefixtures("_missing")
@pytest.mark.parametrize("value", ["torch", "array_api_strict,torch", "array_api_strict torch"])
def test_missing_library_fails_where_it_is_required(monkeypatch, value):
    monkeypatch.setenv("ALC_REQUIRE_BACKENDS", value)
    with pytest.raises(pytest.fail.Exception, match="torch cannot be imported: no torch"):
        conftest.make_backend("torch")


def test_arrays_go_there_and_back(backend, dtype):
    x = np.array([[1.5, -np.inf], [np.nan, 3.0]])
    array = backend.asarray(x, dtype)
    assert backend.owns(array)
    np.testing.assert_array_equal(backend.read(array, dtype), x.astype(dtype))


def test_other_libraries_and_devices_are_told_apart(backend):
    others = {"numpy", "strict", "strict-no_float64"} - {backend.name}
    assert not any(
        backend.owns(conftest.make_backend(o).asarray(np.zeros(2, "f4"))) for o in others
    )
    with pytest.raises(AssertionError):
        backend.read(backend.asarray(np.zeros(2), "float32"), "float64")


class Whole(np.ndarray):
    """An array that is not to be read entry by entry."""

    def __iter__(self):
        raise AssertionError("read entry by entry")

    tolist = __iter__


def test_integers_of_the_host_are_handed_over_whole(backend):
    ctx, _ = prepare_inputs({"x": backend.asarray(np.zeros(2), "float32")})
    x = np.arange(-3, 4).view(Whole)
    result = ctx.integers(x)
    assert np.array_equal(result if ctx.is_numpy else backend.to_numpy(result), np.arange(-3, 4))


@pytest.mark.chains
def test_chains_run_on_the_array_implementation_too(backend, request):
    assert _select.COMPILED is ("numpy-array" not in request.node.name)
    assert _select.FUSED is ("numpy-segments" not in request.node.name)


@pytest.mark.chains
def test_chains_on_numpy_alone_run_three_times(request):
    assert _select.COMPILED is ("[array]" not in request.node.name)
    assert _select.FUSED is ("[segments]" not in request.node.name)


def test_compiled_loops_are_on_elsewhere():
    assert _select.COMPILED
    assert _select.FUSED


@pytest.mark.parametrize(("size", "error"), [((2, 3), ValueError("text"))])
def test_id_of_a_parameter_names_its_argument(request, size, error):
    assert request.node.name.endswith("[size=(2, 3)-error=ValueError('text')]")
