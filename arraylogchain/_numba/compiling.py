"""How loops are compiled: once, for arrays of one kind, and kept in Numba's cache.

Products and sums are contracted, nothing else of fastmath: it would change what is proved of
rounding, infinities and NaN. And not Numba's parallel runtime, which aborts when two threads enter
it or a process that uses it is forked. Loops make no arrays, but views only, so that no references
are counted, which would take half the time of a step of a few states.

Modules that take private names of Numba, `code_library` and `intrinsics`, are left out where they
cannot be imported.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from numba import njit
from numba.core import event
from numba.core.options import DefaultOptions

from arraylogchain._core.progress import compiling

Function = Callable[..., Any]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def _import(name: str) -> Any:
    """Return a module of this package, or None where Numba lacks something that it takes."""
    try:
        return importlib.import_module(f"arraylogchain._numba.{name}")
    except ImportError:
        return None


_code_library = _import("code_library")

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


class _Progress(event.Listener):  # type: ignore[misc]
    """Logs the compilation of functions that Python calls; loading them from the cache is none."""

    def __init__(self) -> None:
        self.functions: set[Function] = set()
        self._running: dict[Function, Any] = {}

    def on_start(self, compilation: Any) -> None:
        function = getattr(compilation.data["dispatcher"], "py_func", None)
        if function in self.functions:
            name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
            purpose = re.split("[;\n]", function.__doc__ or "")[0].rstrip(".")
            self._running[function] = compiling(name, purpose)
            self._running[function].__enter__()

    def on_end(self, compilation: Any) -> None:
        function = getattr(compilation.data["dispatcher"], "py_func", None)
        if function in self._running:
            self._running.pop(function).__exit__(None, None, None)


_progress = _Progress()
event.register("numba:compile", _progress)


def compiled(function: Function) -> Function:
    """Compile a function that Python calls, when it first does, letting go of the GIL."""
    _progress.functions.add(function)
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
    options = {**_options(no_cpython_wrapper=True), **more_options}
    if _code_library is not None:
        options["pipeline_class"] = _code_library.PartCompiler
    return cast(Function, njit(**options)(function))


def inlined(function: Function) -> Function:
    """Compile a function into those that call it: which costs no call."""
    return inner(function, forceinline=True)
