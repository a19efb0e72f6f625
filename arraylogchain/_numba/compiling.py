"""How loops are compiled: once, for arrays of one kind, and kept in Numba's cache.

Products and sums are contracted, nothing else of fastmath: it would change what is proved of
rounding, infinities and NaN. And not Numba's parallel runtime, which aborts when two threads enter
it or a process that uses it is forked. Loops make no arrays, but views only, so that no references
are counted, which would take half the time of a step of a few states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.options import DefaultOptions
from numba.extending import intrinsic

Function = Callable[..., Any]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# Loops have the functions that they call compiled into them, but Numba knows of changes to the file
# of a loop itself only. Where the package was packed into one file, there are no sources.
_LOOPS = ("_numba/*.py", "_backends/compiled/*.py", "_products/compiled.py")
_FILES = (path for names in _LOOPS for path in sorted(Path(__file__).parents[1].glob(names)))
_SOURCES = [path.read_bytes() for path in _FILES]
_STAMP = hashlib.sha256(b"".join(_SOURCES)).hexdigest()


def _options(**more_options: Any) -> dict[str, Any]:
    # These change no result, and not every release of Numba has all of them.
    more_options.update({"_nrt": False, "no_cfunc_wrapper": True})
    known_versions = {
        name: value for name, value in more_options.items() if hasattr(DefaultOptions, name)
    }
    return {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}, **known_versions}


class _Part(JITCodeLibrary):  # type: ignore[misc]
    """The code of a function that only compiled ones call, to be linked into theirs.

    Numba also optimises each such function by itself, with all that it calls, and makes machine
    code of it that nobody calls: a third of the time of a first call.
    """

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    @property
    def codegen(self) -> _Part:
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Leave out what only functions need that Python calls."""


class _PartCompiler(Compiler):  # type: ignore[misc]
    def __init__(self, typing: Any, target: Any, library: Any, *options: Any) -> None:
        part = _Part(target.codegen(), "part")
        # None of these is a public part of Numba, which makes a library of its own for None.
        used = ("_final_module", "_get_module_for_linking", "_linking_libraries")
        library = part if all(hasattr(part, name) for name in used) else library
        super().__init__(typing, target, library, *options)


def compiled(function: Function) -> Function:
    """Compile a function that Python calls, when it first does, letting go of the GIL."""
    try:
        dispatcher: Any = njit(cache=True, **_options())(function)
    except RuntimeError:  # there is no folder to keep it in
        return cast(Function, njit(**_options())(function))
    index: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(index, "_version"):
        # What another version has left is not even read: it may name classes that are gone.
        index._version = f"{index._version} {_STAMP}"
    return cast(Function, dispatcher)


def inner(function: Function, **more_options: Any) -> Function:
    """Compile a function that only compiled ones call."""
    return cast(
        Function,
        njit(pipeline_class=_PartCompiler, **{**_options(no_cpython_wrapper=True), **more_options})(
            function
        ),
    )


def inlined(function: Function) -> Function:
    """Compile a function into those that call it: which costs no call."""
    return inner(function, forceinline=True)


def _bitcast(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.bitcast(args[0], context.get_value_type(signature.return_type))


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(context: Any, x: Any) -> Any:
    return types.int64(types.float64), _bitcast


@intrinsic  # type: ignore[untyped-decorator]
def number_of(context: Any, bits: Any) -> Any:
    return types.float64(types.int64), _bitcast
