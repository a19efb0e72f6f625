"""Launches of kernels as plain data, and kernels compiled from their source text."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from arraylogchain._core import precision as precision_module
from arraylogchain._core.context import Array, Context
from arraylogchain._core.precision import Precision
from arraylogchain._core.progress import compiling

FOLDER = Path(__file__).parent
OPTIONS = ("-std=c++17",)
MAX_GRID = 2**31 - 1  # blocks along the first axis; the two others end at 65535
C_TYPES = {
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
}

_INCLUDE = re.compile(r'\s*#include "([^"]+)"')


def _of(name: str, *arguments: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}<{', '.join(x)}>" for x in itertools.product(*arguments))


_ANY, _WIDE, _BOOL = tuple(C_TYPES.values()), ("float", "double"), ("true", "false")
_LAYOUTS = ("true, 1", "false, 1", "false, 4")  # see chain.cuh: InWarp, R
# All kernels that there are, by the file that has them.
INSTANTIATIONS = {
    "logmatmulexp.cu": _of("logmatmulexp", _ANY),
    "settle.cu": _of("settle", _ANY),
    "maxplus_matmul.cu": _of("maxplus_matmul", _ANY),
    "chain_steps.cu": _of("chain_steps", _WIDE, _BOOL, _LAYOUTS, _BOOL),
    "chain_trace.cu": _of("chain_trace", _WIDE),
}


class Kernel(NamedTuple):
    """A kernel: the file that has it, and its name with its template arguments."""

    source: str
    name: str


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of one kernel.

    Attributes
    ----------
    kernel : Kernel
    grid, block : int
        Blocks, and threads in a block, along one axis.
    arguments : tuple
        What the kernel is called with. NumPy scalars, of exactly the parameter's type, and
        structured NumPy arrays of one entry are passed by value, None as a null pointer.
        Arrays of the device's library are passed as pointers to their first entry.
    shared_memory : int
        Bytes of dynamic shared memory for each block.
    """

    kernel: Kernel
    grid: int
    block: int
    arguments: tuple[Any, ...]
    shared_memory: int = 0


def struct(*fields: tuple[Any, str]) -> np.dtype:
    """Return a struct of the kernels: types, and names of fields; with the padding of C++."""
    return np.dtype([(name, kind) for kind, names in fields for name in names.split()], align=True)


def pack(kind: np.dtype, **fields: Any) -> np.ndarray:
    """Return a struct as kernels take it; fields that are not given are 0."""
    packed = np.zeros((), kind)
    for name, value in fields.items():
        packed[name] = value
    return packed


def threshold(precision: Precision, terms: int) -> np.generic:
    """Return from where on sums of so many terms are proved: see is_proved in numbers.cuh."""
    kind = np.float32 if precision.name == "float32" else np.float64
    return kind(precision_module.threshold(precision, terms))


def contiguous(ctx: Context, x: Array) -> Array:
    """Return an array whose entries lie one behind the other: a copy only where they do not."""
    shape, step = tuple(int(n) for n in x.shape), 1
    for n, stride in zip(reversed(shape), reversed(ctx.kernels.strides(x)), strict=True):
        if n > 1 and stride != step:
            copy = ctx.empty(shape, x.dtype)
            copy[...] = x
            return copy
        step *= n
    return x


@cache
def source_text(source: str, folder: Path = FOLDER) -> str:
    """Return a source file with the project's own headers put in where they are included.

    CuPy's cache of compiled kernels does not look into headers: kept apart, a change to one would
    leave yesterday's kernels in use. Line directives make compilers speak of the files as they are.
    Headers are looked for beside the file, then in this package.
    """
    seen: set[str] = set()

    def expand(name: str) -> list[str]:
        seen.add(name)
        path = folder / name if (folder / name).exists() else FOLDER / name
        text = [f'#line 1 "{name}"']
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            include = _INCLUDE.match(line)
            if include is None:
                text.append("" if line.strip() == "#pragma once" else line)
            elif include[1] not in seen:
                text += [*expand(include[1]), f'#line {number + 1} "{name}"']
        return text

    return "\n".join(expand(source)) + "\n"


@cache
def compiled(kernel: Kernel, device_id: int, shared_memory: int) -> Any:
    """Return a kernel of CuPy's, compiled for the current device when it is first asked for.

    Each instantiation is a module of its own, so that a call waits for what it needs only. A block
    may have `shared_memory` bytes on this device, static shared memory included.
    """
    import cupy

    text = source_text(kernel.source)
    module = cupy.RawModule(code=text, options=OPTIONS, name_expressions=(kernel.name,))
    with compiling(kernel.name, "a CUDA kernel, which CuPy compiles or finds in its cache"):
        function = module.get_function(kernel.name)
    # What a block may use beyond 48 KiB has to be asked for. This does not reserve anything.
    function.max_dynamic_shared_size_bytes = shared_memory - function.shared_size_bytes
    return function
