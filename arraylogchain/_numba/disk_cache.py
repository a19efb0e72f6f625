"""Numba's cache on disk, with digests that detect damaged files.

Numba does not verify its files: a truncated file makes every call raise, and one with a hole of
zeros, as a crash of the system leaves, makes LLVM abort or compute wrong results. Here

    load:   read and compare the digest; on any error forget all entries of the function
    save:   write the machine code with its digest; a full disk is no error

and a function without an entry is compiled and saved.

Except for the two classes, this module uses names of Numba that are not public: if one is missing,
`compiling` omits this module, and Numba's own cache is used.
"""

from __future__ import annotations

import hashlib
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.serialize import dumps

from arraylogchain._core.progress import LOGGER

# Callees are compiled into loops, but Numba invalidates its cache only when the loop's own file
# changes. If the package was packed into one file, there are no sources.
# Constants of two further files are compiled into loops.
_CONSTANTS = "_core/precision.py", "_core/scaled.py"
_LOOPS = ("_numba/*.py", "_backends/compiled/*.py", "_products/compiled.py", *_CONSTANTS)
_FILES = (path for names in _LOOPS for path in sorted(Path(__file__).parents[1].glob(names)))
_SOURCES = [path.read_bytes() for path in _FILES]
STAMP = hashlib.sha256(b"".join(_SOURCES)).hexdigest()


def _digest(data: bytes) -> bytes:
    # Numba writes the index first, so that a new index may refer to code of older sources.
    return hashlib.sha256(STAMP.encode() + data).digest()


class _DigestImpl(CompileResultCacheImpl):  # type: ignore[misc]
    """Serialization of compiled functions as bytes, with their digest."""

    def reduce(self, result: Any) -> tuple[bytes, bytes]:
        data = dumps(super().reduce(result))
        return _digest(data), data

    def rebuild(self, context: Any, payload: tuple[bytes, bytes]) -> Any:
        digest, data = payload
        if digest != _digest(data):
            raise ValueError("the digest is another one")
        return super().rebuild(context, pickle.loads(data))


class SafeCache(FunctionCache):  # type: ignore[misc]
    """Cache of one function; raises RuntimeError if there is no folder for it."""

    _impl_class = _DigestImpl

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        if not hasattr(self._cache_file, "_version"):
            raise RuntimeError("this Numba has no version of a file")
        # Files of other versions are never read: they may name classes that no longer exist.
        self._cache_file._version += f" {STAMP}"

    def load_overload(self, signature: Any, context: Any) -> Any:
        try:
            return super().load_overload(signature, context)
        except Exception as error:  # damaged files may raise any
            LOGGER.info("a file in %s cannot be read: %s", self.cache_path, error)
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        with suppress(OSError):
            super().save_overload(signature, result)
