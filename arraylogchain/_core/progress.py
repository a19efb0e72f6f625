"""Messages about compilation, by the logger "arraylogchain" at level INFO."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("arraylogchain")


@contextmanager
def compiling(name: str, purpose: str) -> Iterator[None]:
    """Log the name and purpose of a compiled function, and afterwards the time it took."""
    LOGGER.info("compiling %s: %s", name, purpose)
    start = time.perf_counter()
    yield
    LOGGER.info("compiling %s took %.1f s", name, time.perf_counter() - start)
