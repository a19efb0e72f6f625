"""Paths of chains on a CUDA device: the best ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraylogchain._context import Array
from arraylogchain._cuda.chains.arrays import DTYPES, THREADS, ChainArrays
from arraylogchain._cuda.chains.backward_pass import ForwardPass, forward_pass
from arraylogchain._cuda.chains.recursion import ChainRun
from arraylogchain._cuda.launch import ceil_div, pack, struct

# struct Paths of paths.cuh.
PATHS = struct(
    (np.int32, "size count first last dtype form start_form end_form"),
    (np.int64, "rows paths matrix_stride row_stride column_stride"),
    (np.int64, "potentials_time_stride potentials_stride start_stride end_stride"),
    (np.int64, "history_time time_stride"),
)
WARP = 32


def form_of(weights: Array | None, in_logs: bool) -> int:
    """Return the form of weights, a StartForm of entries.cuh."""
    return 0 if weights is None else 2 if in_logs else 1


def best_paths(run: ChainRun) -> Array:
    """Return the states of paths of largest weight, [*batch, T]."""
    device, chain = run.device, run.chain
    _, kept = forward_pass(run, keep=False)
    states = device.empty((*chain.batch, chain.num_steps), "int64")
    possible = device.empty((run.all_rows,), "int32")
    for first, last in kept.blocks:
        low, high = chain.num_steps - last, chain.num_steps - first
        history = kept.states(low, high)
        paths = fields(run, run.all_rows, first=low, last=high, history_time=history.first)
        paths["time_stride"] = device.strides(states)[-1]
        launch(
            run,
            "trace",
            run.all_rows,
            paths,
            run.axes(run.order, (states, 1), (chain.final, 1)),
            run.axes(chain.group_axes, (chain.transitions, 3)),
            history.states,
            chain.transitions,
            chain.final,
            run.lengths,
            possible,
            states,
        )
    return states


def fields(arrays: ChainArrays, paths: int, **more: int) -> np.ndarray:
    """Return the struct Paths."""
    chain, strides = arrays.chain, arrays.device.strides
    found = {"size": chain.num_states, "count": chain.num_steps, "paths": paths}
    found |= {"rows": arrays.rows, "dtype": DTYPES.index(arrays.dtype)}
    if chain.transitions is not None:
        step, found["row_stride"], found["column_stride"] = strides(chain.transitions)[-3:]
        found |= {"matrix_stride": 0 if arrays.is_one_matrix else step}
        found |= {"form": form_of(chain.transitions, chain.transitions_in_logs)}
    return pack(
        PATHS,
        start_form=form_of(chain.initial, chain.initial_in_logs),
        end_form=form_of(chain.final, chain.final_in_logs),
        start_stride=0 if chain.initial is None else strides(chain.initial)[-1],
        end_stride=0 if chain.final is None else strides(chain.final)[-1],
        potentials_time_stride=strides(chain.potentials)[-2],
        potentials_stride=strides(chain.potentials)[-1],
        **found,
        **more,
    )


def launch(arrays: ChainArrays, kernel: str, paths: int, *arguments: Any) -> None:
    """Launch a kernel that has a warp for each path."""
    arrays.launch(f"chains/{kernel}.cu", kernel, ceil_div(paths * WARP, THREADS), *arguments)
