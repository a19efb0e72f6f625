"""Entropies of chains on a CUDA device, from forward states and marginals, block by block."""

from __future__ import annotations

import numpy as np

from arraylogchain._context import Array
from arraylogchain._cuda.chains.arrays import THREADS, History
from arraylogchain._cuda.chains.backward_pass import forward_pass
from arraylogchain._cuda.chains.matrices import prepare, steps_at_once
from arraylogchain._cuda.chains.recursion import RECURSION, ChainRun, Sweep, cut_steps
from arraylogchain._cuda.chains.reductions import total
from arraylogchain._cuda.launch import Launch, ceil_div, pack


def entropies(run: ChainRun) -> Array:
    """Return the entropies of the posterior over paths, [*batch], of a run in float64."""
    device, chain = run.device, run.chain
    _, kept = forward_pass(run, keep=False)
    splits = ceil_div(2 * device.multiprocessors, run.all_rows)
    parts = device.empty((splits, run.all_rows), run.compute)
    state: History | None = None
    for first, last in kept.blocks:
        low, high = chain.num_steps - last, chain.num_steps - first
        marginals = device.empty((run.all_rows, last - first, chain.num_states), run.compute)
        sweep = Sweep(
            backward=True,
            total=kept.total,
            forward=kept.states(low, high),
            marginals=marginals,
            by_number=True,
            out_time=low,
        )
        state = run.advance(first, last, sweep, state, run.workspace // 4)
        for at, stop in cut_steps(low, high, steps_at_once(run, run.workspace // 8, as_logs=True)):
            is_first = first == 0 and at == low
            _add(run, at, stop, sweep, kept.total, parts, goes_on=not is_first)
        del sweep, marginals  # before those of the next block are made
    return run.of_batch(total(parts, (0,)))


def _add(
    run: ChainRun, at: int, stop: int, sweep: Sweep, total: Array, parts: Array, *, goes_on: bool
) -> None:
    """Launch the kernel `entropy` for some steps."""
    size = run.chain.num_states
    ready = prepare(run, at, stop, backward=False)
    logs = prepare(run, at, stop, backward=False, as_logs=True).arguments[0]
    matrix, line = ready.arguments[:2]
    assert sweep.forward is not None
    fields = run.fields | ready.fields | sweep.fields(run.device) | {"first": at, "last": stop}
    fields["history_time"] = sweep.forward.first
    arguments = (
        pack(RECURSION, **fields),
        ready.axes,
        matrix,
        line,
        logs,
        sweep.forward.states,
        sweep.marginals,
        np.int64(run.device.strides(sweep.marginals)[0]),
        total,
        run.lengths,
        np.int32(goes_on),
        parts,
    )
    threads, blocks = min(THREADS, 32 * ceil_div(size, 32)), int(np.prod(parts.shape))
    run.device.run(
        Launch("chains/entropy.cu", "entropy", blocks, threads, arguments, 2 * size * run.itemsize)
    )
