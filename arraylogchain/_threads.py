"""The one pool of threads: blocks of work shared out over what the process may use.

Blocks do not depend on the number of threads, so that what is computed in them has the same bits
for any number. The calling thread takes blocks like the others: it waits for nobody who has not
begun, and calls from many threads, or from within a block, cannot block one another.
"""

from __future__ import annotations

import contextvars
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from pathlib import Path, PurePosixPath

Work = Callable[[int, int], object]

# How many threads the caller wants.
_wanted: ContextVar[int | None] = ContextVar("workers", default=None)
_AS_IT_IS: AbstractContextManager[None] = nullcontext()

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_thread = threading.local()


def share(work: Work, count: int, block: int, workers: int | None = None) -> None:
    """Run ``work(start, stop)`` on blocks of `block` of range(count), the last one shorter.

    Parameters
    ----------
    work : callable
        Where it is to run beside Python code, it has to let go of the GIL.
    count, block : int
        A single block never touches the pool.
    workers : int, optional
        How many threads take part, this one included. Default: `workers_here`.

    Raises
    ------
    BaseException
        Whatever `work` raises first; blocks that have not begun by then are left out, and none is
        running any more.
    """
    if count <= block:
        if count > 0:
            work(0, count)
        return
    limit = workers_here() if workers is None else workers
    helpers = min(limit, -(-count // block)) - 1
    starts = deque(range(0, count, block))
    # Emptied at the end: helpers that never began stay in the pool's queue until a thread is free.
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

    futures = _submit(take_blocks, helpers)
    try:
        take_blocks()
    finally:
        running = [future for future in futures if not future.cancel()]
        wait(running)
        held.clear()
    for future in running:
        future.result()


def check_workers(workers: int | None) -> int | None:
    """Return the number of threads that a caller asks for; raise where it is no usable number."""
    if workers is None:
        return None
    if isinstance(workers, bool) or not hasattr(workers, "__index__"):
        raise TypeError(
            f"workers must be an integer number of threads or None, got {type(workers).__name__}"
        )
    if workers.__index__() < 1:
        raise ValueError(f"workers={workers} is too few; at least 1 thread has to work")
    return workers.__index__()


def using(workers: int | None) -> AbstractContextManager[None]:
    """Let no more threads than these work within, this one included; None changes nothing."""
    torch = sys.modules.get("torch")
    # What is traced is computed later.
    if workers is None or (torch is not None and torch.compiler.is_compiling()):
        return _AS_IT_IS
    return _using(workers)


@contextmanager
def _using(workers: int) -> Iterator[None]:
    token = _wanted.set(workers)
    try:
        yield
    finally:
        _wanted.reset(token)


def wanted() -> int | None:
    """Return how many threads `using` allows here, None if it says nothing."""
    return _wanted.get()


def workers_here() -> int:
    """Return how many threads may work for this one, itself included."""
    return _wanted.get() or num_workers()


@cache
def num_workers() -> int:
    """Return how many threads the process may keep busy."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limits = [float(available or 1), *_cgroup_quotas()]
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked.isdecimal():
        limits.append(float(asked))
    return max(1, math.ceil(min(limits)))


def _cgroup_quotas() -> Iterator[float]:
    """Yield the CPUs' worth of time that control groups of this process grant, if they limit it."""
    try:
        memberships = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        folder = PurePosixPath("/", path.lstrip("/"))
        # In a container the path may be that of the host: the root is tried in any case.
        for group in {folder, *folder.parents, PurePosixPath("/")}:
            own = str(group).lstrip("/")
            if not controllers:
                found = _read(Path("/sys/fs/cgroup", own, "cpu.max"))
            elif "cpu" in controllers.split(","):
                base = Path("/sys/fs/cgroup/cpu", own)
                found = _read(base / "cpu.cfs_quota_us") + _read(base / "cpu.cfs_period_us")
            else:
                continue
            # "max" or -1 is no limit.
            if len(found) == 2 and all(word.isdecimal() for word in found):
                yield int(found[0]) / max(int(found[1]), 1)


def _read(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _submit(task: Callable[[], None], helpers: int) -> list[Future[None]]:
    """Have threads of the pool run a task: as many as are wanted, or none where none can come."""
    global _pool, _pool_size
    if helpers < 1 or getattr(_thread, "is_helper", False):
        return []
    with _lock:
        try:
            if _pool is None or _pool_size < helpers:
                if _pool is not None:
                    _pool.shutdown(wait=False)
                _pool_size = max(helpers, num_workers() - 1)
                _pool = ThreadPoolExecutor(_pool_size, "arraylogchain", _become_helper)
            # NumPy's error state is a part of the context; a context is for one thread at a time.
            return [_pool.submit(contextvars.copy_context().run, task) for _ in range(helpers)]
        except RuntimeError:  # the interpreter is about to exit, or no thread can be started
            return []


def _become_helper() -> None:
    _thread.is_helper = True


def _after_fork() -> None:
    """Forget the pool: a forked process has none of its threads."""
    global _lock, _pool, _pool_size
    _lock = threading.Lock()
    _pool, _pool_size = None, 0
    _thread.is_helper = False
    num_workers.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
