"""Launches as plain data: index spaces packed for kernels, and source text with its headers."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from arraylogchain._cuda import modules
from arraylogchain._cuda.launch import AXES, MAX_AXES, Launch, is_struct, pack_axes

KERNELS = Path(__file__).parent / "kernels"


def unpack(axes: np.ndarray) -> tuple[list[int], list[list[int]]]:
    count = int(axes["count"])
    return axes["extent"][:count].tolist(), axes["stride"][:, :count].tolist()


def offsets(axes: np.ndarray, operand: int) -> list[int]:
    """Return the offset of every index in order, as a kernel works it out."""
    extents, strides = unpack(axes)
    indices = itertools.product(*(range(n) for n in extents))
    return [sum(i * s for i, s in zip(index, strides[operand], strict=True)) for index in indices]


def test_the_struct_is_laid_out_as_in_c() -> None:
    fields = {name: offset for name, (_, offset) in AXES.fields.items()}
    assert fields == {"count": 0, "extent": 8, "stride": 8 + 8 * MAX_AXES}
    assert AXES.itemsize == 8 + 4 * 8 * MAX_AXES
    axes = pack_axes((2,), (1,))
    assert is_struct(axes)
    # CuPy passes arrays of one entry by value, whatever their shape.
    assert axes.size == 1
    assert not is_struct(np.zeros(1))


@pytest.mark.parametrize(
    ("extents", "strides", "merged"),
    [
        ((), [()], ([], [[]])),
        ((4, 5), [(5, 1)], ([20], [[1]])),
        ((4, 5), [(1, 4)], ([4, 5], [[1, 4]])),
        ((4, 1, 5), [(5, 77, 1)], ([20], [[1]])),
        ((2, 3, 4), [(12, 4, 1), (12, 4, 1)], ([24], [[1], [1]])),
        ((2, 3, 4), [(12, 4, 1), (4, 0, 1)], ([2, 3, 4], [[12, 4, 1], [4, 0, 1]])),
        ((2, 3, 4), [(24, 8, 2), (0, 0, 0)], ([24], [[2], [0]])),
        ((3, 4), [(-4, -1)], ([12], [[-1]])),
        ((3, 4), [(0, 1)], ([3, 4], [[0, 1]])),
        ((3, 0, 4), [(0, 4, 1)], ([0], [[1]])),
    ],
)
def test_axes_are_merged_where_every_operand_allows(extents, strides, merged) -> None:
    extent, stride = unpack(pack_axes(extents, *strides))
    assert (extent, stride[: len(strides)]) == merged


def test_packed_axes_reach_every_entry_in_order() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        extents = tuple(int(n) for n in rng.integers(1, 4, 6))
        x = np.arange(np.prod(extents)).reshape(extents)
        # Views with permuted, reversed and broadcast axes; their memory begins at `first`.
        y = np.broadcast_to(x[:, :1, ::-1], extents).transpose(rng.permutation(6))
        x = np.broadcast_to(np.arange(np.prod(y.shape)).reshape(y.shape), y.shape)
        axes = pack_axes(y.shape, *([s // v.itemsize for s in v.strides] for v in (x, y)))
        first = int(y[(0,) * 6])
        assert [first + o for o in offsets(axes, 1)] == y.ravel().tolist()
        assert offsets(axes, 0) == x.ravel().tolist()


def test_too_many_axes_are_an_error() -> None:
    pack_axes((2,) * MAX_AXES, (1,) * MAX_AXES)
    with pytest.raises(ValueError, match="9 axes that cannot be merged; kernels take 8"):
        pack_axes((2,) * 9, (1,) * 9)


def test_a_launch_is_compared_by_what_it_says() -> None:
    first, second = (Launch("a.cu", "f<1>", 1, 32, (np.int32(1),)) for _ in range(2))
    assert first == second


def test_headers_are_put_in_once_where_they_are_included() -> None:
    text = modules.source_text("features.cu", KERNELS)
    assert '#include "' not in text
    assert "#include <cuda_fp16.h>" in text
    assert text.count("constexpr unsigned kAllLanes") == text.count("struct Pair") == 1
    # A header may include one that includes it.
    assert text.index("struct Pair") < text.index("kAllLanes =") < text.index("round_trip")


def test_line_directives_lead_back_to_the_files() -> None:
    where: dict[str, list[str]] = {}
    name, number = "", 0
    for line in modules.source_text("features.cu", KERNELS).splitlines():
        if line.startswith("#line"):
            _, digits, quoted = line.split()
            name, number = quoted.strip('"'), int(digits)
            continue
        original = (KERNELS / name).read_text().splitlines()[number - 1]
        assert line in ("", original)
        where.setdefault(name, []).append(line)
        number += 1
    assert set(where) == {"features.cu", "included.cuh", "included_too.cuh"}


def test_headers_of_the_package_are_found_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "own.cu").write_text('  #  include "numbers.cuh"\n')
    package = tmp_path / "package"
    package.mkdir()
    (package / "numbers.cuh").write_text("constexpr int kOne = 1;\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules, "FOLDER", package)
        assert "constexpr int kOne = 1;" in modules.source_text("own.cu", tmp_path)
