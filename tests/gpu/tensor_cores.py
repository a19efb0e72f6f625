"""Public functions with products over tensor cores, which have to be asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from arraylogchain._cuda.products import logmatmulexp

EVERY = range(logmatmulexp.FIRST_WITH_TENSOR_CORES, 1000)


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Let large log products take tensor cores in every dtype, where the device has them."""
    everywhere = dict.fromkeys(EVERY, frozenset(logmatmulexp.TENSOR_TILES))
    with patch.dict(logmatmulexp.TENSOR_CORES, everywhere):
        yield
