"""Messages about what is compiled, by the logger "arraylogchain" at level INFO."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("arraylogchain")


@contextmanager
def compiling(name: str, purpose: str) -> Iterator[None]:
    """Log which function is compiled and what it does, and afterwards how long that took."""
    LOGGER.info("compiling %s: %s", name, purpose)
    start = time.perf_counter()
    yield
    LOGGER.info("compiling %s took %.1f s", name, time.perf_counter() - start)
