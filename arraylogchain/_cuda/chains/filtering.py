"""Messages normalised at every step on a CUDA device, from forward states, block by block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from arraylogchain._context import Array
from arraylogchain._cuda.chains.arrays import DTYPES, THREADS, WARP, History
from arraylogchain._cuda.chains.recursion import ChainRun, Sweep, cut_steps, pointers
from arraylogchain._cuda.launch import ceil_div


def normalised(run: ChainRun) -> tuple[Array, Array]:
    """Return probabilities [*batch, T, K] and the logs of what normalises them, [*batch, T]."""
    chain, num_steps = run.chain, run.chain.num_steps
    probabilities = run.new_per_state()
    normalizers = run.device.empty((*chain.batch, num_steps), run.dtype)
    rows = run.axes(run.order, (probabilities, 2), (normalizers, 1))
    before: History | None = None
    for first, last in cut_steps(0, num_steps, max(1, run.workspace // 2 // run.state_bytes)):
        history = replace(run.new_history(last - first), first=first)
        after = run.advance(first, last, Sweep(history=history), before, run.workspace // 4)
        run.launch(
            "chains/filtered.cu",
            "filtered",
            ceil_div((last - first) * run.all_rows * WARP, THREADS),
            *map(np.int32, (chain.num_states, first, last - first)),
            np.int64(run.all_rows),
            np.int32(DTYPES.index(run.dtype)),
            rows,
            *pointers(history),
            *pointers(before),
            run.lengths,
            probabilities,
            normalizers,
        )
        before = after
        del history  # before that of the next block is made
    return probabilities, normalizers
