"""How many bytes a call holds at its worst moment, inputs not counted.

Counted is what the library's allocator hands out: by tracemalloc for NumPy, and by torch's profiler
for torch. Both are exact and need no estimate from the resident set; what a BLAS library keeps for
itself is in neither. A contestant that takes tensors may use both allocators, as this library does
on a CPU: there the two peaks are added, which is the most that both can hold together. A program of
jax holds what its compiler has laid out.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Keeps torch's profiler from reporting its own start and stop; read when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def peak_of_numpy(call: Callable[[], Any]) -> tuple[int, Any]:
    """Run a call; return its peak in bytes and its result."""
    gc.collect(1)  # all generations would take longer than most calls
    tracemalloc.start()
    try:
        result = call()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def peak_of_torch(call: Callable[[], Any]) -> tuple[int, Any]:
    """Run a call; return its peak in bytes, NumPy's added to torch's, and its result."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        of_numpy, result = peak_of_numpy(call)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]"]
    in_use = peak = 0
    for event in sorted(memory, key=lambda event: event["ts"]):
        in_use += event["args"]["Bytes"]
        peak = max(peak, in_use)
    return of_numpy + peak, result


def temporaries_of_jax(compiled: Any) -> int:
    """Return the bytes that a compiled program of jax holds beyond inputs and output."""
    return int(compiled.memory_analysis().temp_size_in_bytes)
