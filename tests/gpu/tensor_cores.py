"""Public functions with products over tensor cores, whatever the device does faster."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from arraylogchain._cuda import tuning

EVERY = range(tuning.FIRST_WITH_TENSOR_CORES, 1000)


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Let log products that are large enough for tiles take tensor cores."""
    with patch.object(tuning, "product_backend", lambda *_: "cuda.tensor_cores"):
        yield
