"""Kernels compiled from their source text, and their arguments as bytes."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from arraylogchain._core import precision as precision_module
from arraylogchain._core.context import Array, Context, library_name
from arraylogchain._core.precision import Precision
from arraylogchain._core.progress import compiling

FOLDER = Path(__file__).parent
MAX_GRID = 2**31 - 1  # blocks along the first axis; the two others end at 65535
_ANY = ("__half", "__nv_bfloat16", "float", "double")
C_TYPES = dict(zip(("float16", "bfloat16", "float32", "float64"), _ANY, strict=True))


def _names(name: str, *arguments: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}<{', '.join(x)}>" for x in itertools.product(*arguments))


_WIDE, _BOOL = ("float", "double"), ("true", "false")
_PAIRS = tuple(f"{'double' if x == 'double' else 'float'}, {x}" for x in _ANY)
_LAYOUTS = ("true, 1", "false, 1", "false, 4")  # see chain.cuh: InWarp, R
# All kernels by source file.
INSTANTIATIONS = {
    "logmatmulexp.cu": (*_names("logmatmulexp", _ANY), *_names("prepare_factors", _ANY)),
    "log_epilogue.cu": _names("log_epilogue", _ANY),
    "log_gradients.cu": (*_names("gradient_weights", _ANY), *_names("finish_gradients", _ANY)),
    "maxplus_matmul.cu": _names("maxplus_matmul", _ANY),
    "prepare_matrices.cu": _names("prepare_matrices", _PAIRS),
    "chain_steps.cu": _names("chain_steps", _WIDE, _BOOL, _LAYOUTS, _BOOL),
    "log_partition.cu": _names("log_partition", _WIDE),
    "marginals.cu": (
        *_names("marginals", _ANY),
        *_names("pair_marginals", _PAIRS),
        *_names("boundary_gradients", _WIDE),
    ),
    "filtered.cu": _names("filtered", _ANY),
    "entropies.cu": _names("entropies", _WIDE),
    "sample_paths.cu": _names("sample_paths", _WIDE),
    "chain_trace.cu": (*_names("chain_trace", _WIDE), *_names("best_last_states", _WIDE)),
}


class Kernel(NamedTuple):
    """A kernel: the file that has it, and its name with its template arguments."""

    source: str
    name: str

    @property
    def arguments(self) -> list[str]:
        """The template arguments."""
        return self.name.rstrip(">").partition("<")[2].split(", ")

    @property
    def module(self) -> tuple[str, tuple[str, ...]]:
        """The file, and the names of its kernels that are compiled together.

        They have the same template arguments: a call compiles few kernels beyond its own.
        """
        _, _, arguments = self.name.partition("<")
        names = [x for x in INSTANTIATIONS.get(self.source, ()) if x.partition("<")[2] == arguments]
        return self.source, tuple(names) or (self.name,)


_SOURCES = {x.partition("<")[0]: source for source, names in INSTANTIATIONS.items() for x in names}


@cache
def kernel_named(name: str, *arguments: str) -> Kernel:
    """Return a kernel by its name and its template arguments, some of them names of dtypes."""
    return Kernel(_SOURCES[name], f"{name}<{', '.join(C_TYPES.get(x, x) for x in arguments)}>")


_CODES = {np.dtype(np.int64): "q", np.dtype(np.int32): "i"}


class Struct:
    """A struct of the kernels: types, and names of fields; with the padding of C++.

    >>> Struct((np.int64, "data"), (np.int32, "rows")).pack(8, rows=3).hex("-", 8)
    '0800000000000000-0300000000000000'
    """

    def __init__(self, *fields: tuple[Any, str]) -> None:
        pairs = [(name, np.dtype(kind)) for kind, names in fields for name in names.split()]
        self._zeros = dict.fromkeys(dict(pairs), 0)
        codes = [_CODES.get(kind, kind.char) for _, kind in pairs]
        # No entry of the widest type pads the struct to a multiple of its size.
        widest = max(codes, key=struct.calcsize)
        self._packer = struct.Struct(f"@{''.join(codes)}0{widest}")

    def pack(self, *first: Any, **fields: Any) -> bytes:
        """Return a struct as kernels take it: its first fields, and others by name; else 0."""
        if not fields and len(first) == len(self._zeros):
            return self._packer.pack(*first)
        values = (self._zeros | dict(zip(self._zeros, first)) | fields).values()  # noqa: B905
        return self._packer.pack(*values)


def parameters(values: Sequence[bytes]) -> ctypes.Array[ctypes.c_char]:
    """Return memory with the addresses of a kernel's parameters, and then these."""
    padded = [value.ljust(-(-len(value) // 8) * 8, b"\0") for value in values]
    *offsets, size = itertools.accumulate(map(len, padded), initial=8 * len(values))
    memory = ctypes.create_string_buffer(size)
    start = ctypes.addressof(memory)
    addresses = struct.pack(f"@{len(values)}q", *(start + offset for offset in offsets))
    memory.raw = b"".join((addresses, *padded))
    return memory


def threshold(precision: Precision, terms: int) -> np.generic:
    """Return the least certified sum of some terms: see is_certified in numbers.cuh."""
    kind = np.float32 if precision.name == "float32" else np.float64
    return kind(precision_module.threshold(precision, terms))


def contiguous(ctx: Context, x: Array) -> Array:
    """Return an array whose entries lie one behind the other: a copy only where they do not."""
    if library_name(ctx.xp) == "torch":
        return x.contiguous()
    return ctx.xp.ascontiguousarray(x)


@cache
def options() -> tuple[str, ...]:
    """Return the compiler's options for all kernels.

    CuPy's cache of compiled kernels does not look into files that are included, but it does at
    options: a hash of all files is one.
    """
    texts = [path.read_bytes() for path in sorted(FOLDER.glob("*.cu*"))]
    digest = hashlib.sha256(b"".join(texts)).hexdigest()[:32]
    return "-std=c++17", f"-I{FOLDER}", f"-DARRAYLOGCHAIN_SOURCES={digest}"


@cache
def compiled(kernel: Kernel, device_id: int, shared_memory: int) -> Any:
    """Return a function of CuPy's, compiled for the current device at its first use.

    A block may have `shared_memory` bytes on this device, static shared memory included.
    """
    import cupy

    source, names = kernel.module
    with compiling(kernel.name, "a CUDA kernel, which CuPy compiles or finds in its cache"):
        # Modules with the same arguments are one: CuPy keeps them.
        code = f'#include "{source}"\n'
        module = cupy.RawModule(code=code, options=options(), name_expressions=names)
        function = module.get_function(kernel.name)
    # More than 48 KiB for a block have to be requested. This does not reserve anything.
    function.max_dynamic_shared_size_bytes = shared_memory - function.shared_size_bytes
    return function.kernel
