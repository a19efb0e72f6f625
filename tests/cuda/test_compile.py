"""Every kernel compiles for every architecture; those that matter for speed have no stack."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from arraylogchain._cuda import kernels
from arraylogchain._cuda.kernels import INSTANTIATIONS
from tests.conftest import import_or_skip, skip_or_fail
from tests.cuda import nvrtc

# The others are tested where the page of the documentation is made, and where time allows.
ARCHITECTURES = [
    pytest.param(a, marks=() if a == 90 else pytest.mark.exhaustive) for a in nvrtc.ARCHITECTURES
]
# A thousand threads have 64 registers each, which is few for numbers of two; and so are 128.
SPILLING = {
    name for name in INSTANTIATIONS["chain_steps.cu"] if re.search("double, .*, false, ", name)
} | {"entropies<double>"}
KERNELS = Path(__file__).parent / "kernels"


def compiler(which: str = "CuPy's") -> nvrtc.Nvrtc:
    import_or_skip("cupy")
    try:
        result = nvrtc.library(is_other=which != "CuPy's")
    except RuntimeError as error:  # the finder's own, if there is none
        skip_or_fail("cupy", f"NVRTC cannot be loaded: {error}")
    if result is None:
        pytest.skip(f"{nvrtc.OTHER} names no folder with another NVRTC")
    return result


@pytest.mark.parametrize("which", ["CuPy's", pytest.param("other", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", sorted(INSTANTIATIONS))
def test_every_kernel_compiles_and_none_but_of_double_spills(source, architecture, which):
    _, usage = compiler(which).compile(source, INSTANTIATIONS[source], architecture)
    # A stack costs more than time: the driver reserves it for every thread that the device can
    # have at once, outside all pools of memory, 270 KB for each byte on an H200.
    assert {name for name, u in usage.items() if u.spills or u.stack} <= SPILLING


def test_there_are_few():
    assert sum(map(len, INSTANTIATIONS.values())) <= 80


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("logmatmulexp.cu", "logmatmulexp<float>"),
        ("chain_steps.cu", INSTANTIATIONS["chain_steps.cu"][0]),
    ],
)
def test_a_first_call_compiles_in_a_moment(source, name):
    result, start = compiler(), time.process_time()
    result.compile(source, (name,), 90)
    assert time.process_time() - start < 3


def test_the_page_is_of_the_present_sources():
    assert f"of sources {nvrtc.digest()}." in nvrtc.PAGE.read_text(), "python -m tests.cuda.nvrtc"


def _name(path: Path) -> str:
    return path.relative_to(kernels.FOLDER).as_posix()


def test_every_source_file_is_launched():
    assert set(map(_name, kernels.FOLDER.rglob("*.cu"))) == set(INSTANTIATIONS)


@pytest.mark.parametrize("path", sorted(kernels.FOLDER.rglob("*.cu*")), ids=_name)
def test_every_kernel_bounds_its_blocks(path):
    # Without the bounds, registers may run out when a kernel is launched. The shim holds launches
    # to them.
    unbounded = re.findall(r"__global__(?!\s+void\s+__launch_bounds__)[^(]*", path.read_text())
    assert unbounded == []


def test_spills_and_shared_memory_are_seen():
    _, usage = compiler().compile("spills.cu", ("spilling", "frugal"), 90, KERNELS)
    assert usage["spilling"].spills > 0
    assert usage["frugal"] == nvrtc.Usage(usage["frugal"].registers, 256, 0, 0)
    assert 0 < usage["frugal"].registers < usage["spilling"].registers


def test_an_error_names_file_and_line():
    with pytest.raises(RuntimeError, match=r"faults\.cu\(10\): error: .*NEIGHBOUR"):
        compiler().compile("faults.cu", ("trapped",), 90, KERNELS)


def test_the_sources_that_the_tests_run_on_the_cpu_are_cuda():
    names = ("block_sums<double>", "round_trip<float, __half>", "neighbours", "parameters")
    _, usage = compiler().compile("features.cu", names, 90, KERNELS)
    assert set(usage) == set(names)
