"""Public functions with products over tensor cores, which have to be asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from arraylogchain._cuda.products import log_product

EVERY = range(log_product.FIRST_WITH_TENSOR_CORES, 1000)


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Let large log products take tensor cores in every dtype, where the device has them."""
    everywhere = dict.fromkeys(EVERY, frozenset(log_product.TENSOR_TILES))
    with patch.dict(log_product.TENSOR_CORES, everywhere):
        yield
