"""Compilation of loops: once for arrays of one kind, with Numba's disk cache.

Of fastmath, only contraction of products and sums is enabled: other flags would invalidate error
bounds and the handling of infinities and NaN. Numba's parallel runtime is not used: it aborts if
two threads enter it or a process that uses it is forked. Loops make views, but no arrays, so that
reference counting is disabled, which would take half the time of a step of a few states.

Names of Numba that are not public are used in two modules only: `disk_cache` and `code_library`.
Each of them is omitted if it cannot be imported.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
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
    """Return a module of this package, or None if Numba lacks a name that it uses."""
    try:
        return importlib.import_module(f"arraylogchain._numba.{name}")
    except ImportError:
        return None


_disk_cache, _code_library = _import("disk_cache"), _import("code_library")


def _options(**more_options: Any) -> dict[str, Any]:
    # These change no result, and not every release of Numba has all of them.
    more_options.update({"_nrt": False, "no_cfunc_wrapper": True})
    known_versions = {
        name: value for name, value in more_options.items() if hasattr(DefaultOptions, name)
    }
    return {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}, **known_versions}


class _Progress(event.Listener):  # type: ignore[misc]
    """Logs the compilation of functions that Python calls, but not their loading from the cache."""

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
    """Compile a function that Python calls, at its first call; it releases the GIL."""
    _progress.functions.add(function)
    dispatcher: Any = njit(**_options())(function)
    try:
        if _disk_cache is None:
            dispatcher.enable_caching()
        else:
            dispatcher._cache = _disk_cache.SafeCache(function)
    except RuntimeError:  # there is no folder for the cache
        pass
    return cast(Function, dispatcher)


def inner(function: Function, **more_options: Any) -> Function:
    """Compile a function that only compiled functions call."""
    options = {**_options(no_cpython_wrapper=True), **more_options}
    if _code_library is not None:
        options["pipeline_class"] = _code_library.PartCompiler
    return cast(Function, njit(**options)(function))


def inlined(function: Function) -> Function:
    """Compile a function into its callers, without the cost of a call."""
    return inner(function, forceinline=True)
