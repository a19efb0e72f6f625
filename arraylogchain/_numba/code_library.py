"""The code of functions that only compiled ones call, without machine code of its own.

Numba optimizes each compiled function by itself, with all that it calls, and makes machine code of
it. Of a function that only others call, whose code is linked into theirs, nobody runs that:

    Numba:  for each function: link what it calls, optimize, write machine code
    here:   for each function that Python calls: the same
            for each other one: link what it calls

On two cores of an AMD EPYC, with Numba 0.68, CPU time of the first log Z is 7.5 s instead of 10.6,
of compiling everything 10.7 s instead of 14.3. What is optimized once only is also faster: log Z of
1,000 steps and 32 states takes 0.18 ms instead of 0.35, of 300 chains of 100 steps and 5 states
0.53 ms instead of 0.90; best paths take as long.

The names of Numba that this takes are not public. Where one is missing, functions are compiled as
Numba does it, within the same bounds: `compiling` leaves this module out if it cannot be imported,
and `PartCompiler` makes a library of Numba's own if a method or an attribute is gone.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

_USED = ("_final_module", "_get_module_for_linking", "_linking_libraries")


class Part(JITCodeLibrary):  # type: ignore[misc]
    """The code of a function that only compiled ones call, to be linked into theirs."""

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    @property
    def codegen(self) -> Part:
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Leave out what only functions need that Python calls."""


class PartCompiler(Compiler):  # type: ignore[misc]
    """Numba's compiler, which puts code into a `Part`."""

    def __init__(self, typing: Any, target: Any, library: Any, *options: Any) -> None:
        part = Part(target.codegen(), "part")
        # Numba makes a library of its own for None.
        library = part if all(hasattr(part, name) for name in _USED) else library
        super().__init__(typing, target, library, *options)
