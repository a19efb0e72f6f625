"""The pool of threads that share blocks of work.

Blocks do not depend on the number of threads, so that results have the same bits for any number.
The calling thread takes blocks like the others and never waits for one that has not started, so
that calls from many threads, or from within a block, cannot deadlock.
"""

from __future__ import annotations

import contextvars
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, lru_cache
from pathlib import Path

# Threads that the caller asked for; None for as many as the process may use.
requested: ContextVar[int | None] = ContextVar("workers", default=None)

# Name of the pool's threads, whose blocks are not divided again.
_NAME = "arraylogchain"


def run_blocks(work: Callable[[int, int], object], count: int, block: int) -> None:
    """Run ``work(start, stop)`` on blocks of `block` of range(count), the last one shorter.

    Parameters
    ----------
    work : callable
        Runs in parallel as far as it releases the GIL.
    count, block : int
        A single block runs without the pool.

    Raises
    ------
    BaseException
        The first exception of `work`; blocks that have not started by then are skipped, and the
        others have ended.
    """
    if 0 < count <= block:
        work(0, count)
        return
    limit = requested.get() or num_workers()
    helpers = min(limit, -(-count // block)) - 1
    starts = deque(range(0, count, block))
    # Emptied at the end: helpers that never started keep it in the pool's queue.
    held = [work]

    def take_blocks() -> None:
        try:
            while True:
                try:
                    start = starts.popleft()
                except IndexError:
                    return
                held[0](start, min(start + block, count))
        except BaseException:
            starts.clear()
            raise

    futures = _submit(take_blocks, helpers, limit)
    try:
        take_blocks()
    finally:
        running = [future for future in futures if not future.cancel()]
        wait(running)
        held.clear()
    for future in running:
        future.result()


def using(workers: int | None) -> AbstractContextManager[None]:
    """Limit the number of threads inside the context, the calling thread included."""
    return nullcontext() if workers is None else _using(workers)


@contextmanager
def _using(workers: int) -> Iterator[None]:
    token = requested.set(workers)
    try:
        yield
    finally:
        requested.reset(token)


@cache
def num_workers() -> int:
    """Return the number of threads that the process may keep busy."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limits = [float(available or 1), _quota()]
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if setting.isdecimal():
        limits.append(float(setting))
    return max(1, math.ceil(min(limits)))


def _quota() -> float:
    """Return the number of CPUs that the control group (v2) of a container grants."""
    try:
        time, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(time) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return math.inf


@lru_cache(maxsize=8)  # for the usual number of threads, and for others that callers ask for
def _pool(size: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(size, _NAME)


def _submit(task: Callable[[], None], helpers: int, limit: int) -> list[Future[None]]:
    """Run a task on threads of the pool for a limit; on none if none can be started."""
    if helpers < 1 or threading.current_thread().name.startswith(_NAME):
        return []
    pool = _pool(max(limit, num_workers()) - 1)
    try:
        # The context has NumPy's error state; each thread needs a copy of its own.
        return [pool.submit(contextvars.copy_context().run, task) for _ in range(helpers)]
    except RuntimeError:  # the interpreter is about to exit, or no thread can be started
        return []


def _after_fork() -> None:
    """Reset the pool: a forked process has none of its threads."""
    _pool.cache_clear()
    num_workers.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
