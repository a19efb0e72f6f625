"""Every kernel compiles for every architecture; those that matter for speed have no stack."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from arraylogchain._cuda import modules
from tests.cuda import nvrtc
from tests.cuda.instantiations import HOT, INSTANTIATIONS

KERNELS = Path(__file__).parent / "kernels"

needs_nvrtc = pytest.mark.usefixtures("nvrtc_library")


@needs_nvrtc
@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("source", sorted(INSTANTIATIONS))
def test_every_kernel_compiles_and_hot_ones_need_no_stack(source: str, architecture: int) -> None:
    # The record will do as long as sources and compiler are those that it is of: to compile
    # everything takes a quarter of an hour of one core.
    usage = nvrtc.recorded(source, architecture)
    if usage is None:
        usage = nvrtc.compile_source(source, INSTANTIATIONS[source], architecture)
    # A stack costs more than time: the driver reserves it for every thread that the device can
    # have at once, outside all pools of memory, 270 KB for each byte on an H200.
    on_stack = {
        kernel: u for kernel, u in usage.items() if nvrtc.is_hot(kernel) and (u.spills or u.stack)
    }
    assert not on_stack


@needs_nvrtc
def test_the_table_is_of_the_present_sources() -> None:
    stale = [
        (source, architecture)
        for source in INSTANTIATIONS
        for architecture in nvrtc.ARCHITECTURES
        if nvrtc.recorded(source, architecture) is None
    ]
    assert not stale, "run python -m tests.cuda.nvrtc"


def _name(path: Path) -> str:
    return path.relative_to(modules.FOLDER).as_posix()


def test_every_source_file_is_launched() -> None:
    assert set(map(_name, modules.FOLDER.rglob("*.cu"))) == set(INSTANTIATIONS)


@pytest.mark.parametrize("path", sorted(modules.FOLDER.rglob("*.cu")), ids=_name)
def test_every_kernel_bounds_its_blocks(path: Path) -> None:
    # Without the bounds, registers may run out when a kernel is launched. The shim holds launches
    # to them.
    unbounded = re.findall(r"__global__(?!\s+void\s+__launch_bounds__)[^(]*", path.read_text())
    assert unbounded == []


def test_hot_kernels_exist() -> None:
    known = {k.partition("<")[0] for kernels in INSTANTIATIONS.values() for k in kernels}
    assert known >= HOT


@needs_nvrtc
def test_spills_and_shared_memory_are_seen() -> None:
    usage = nvrtc.compile_source("spills.cu", ("spilling", "frugal"), 90, KERNELS)
    assert usage["spilling"].spills > 0
    assert usage["frugal"] == nvrtc.Usage(usage["frugal"].registers, 256, 0, 0)
    assert 0 < usage["frugal"].registers < usage["spilling"].registers


@needs_nvrtc
def test_an_error_names_file_and_line() -> None:
    from cupy.cuda.compiler import CompileException

    with pytest.raises(CompileException, match=r"faults\.cu\(10\): error: .*NEIGHBOUR"):
        nvrtc.compile_source("faults.cu", ("trapped",), 90, KERNELS)


@needs_nvrtc
@pytest.mark.parametrize(
    ("source", "kernels"),
    [
        (
            "features.cu",
            ("block_sums<double>", "round_trip<float, __half>", "collectives", "parameters"),
        ),
        ("tensor_cores.cu", ("matrix_product<float>", "matrix_product<double>")),
    ],
)
def test_the_sources_that_the_tests_run_on_the_cpu_are_cuda(
    source: str, kernels: tuple[str, ...]
) -> None:
    assert set(nvrtc.compile_source(source, kernels, 90, KERNELS)) == set(kernels)


def test_records_do_not_change_with_comments() -> None:
    plain = "int x;\nint y;  \n"
    commented = '#line 1 "a.cu"\n// What x is.\nint x;  // here\n\n    // more\nint y;  \n'
    assert nvrtc.code_of(commented) == nvrtc.code_of(plain)
    assert nvrtc.code_of(plain) != nvrtc.code_of(plain.replace("y", "z"))
