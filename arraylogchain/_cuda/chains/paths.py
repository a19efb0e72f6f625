"""Paths of chains on a CUDA device: the best ones, samples, and the weights of given ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from arraylogchain._context import Array
from arraylogchain._cuda.chains.arrays import C_TYPES, DTYPES, THREADS, WARP, ChainArrays, History
from arraylogchain._cuda.chains.backward_pass import ForwardPass, forward_pass
from arraylogchain._cuda.chains.recursion import ChainRun
from arraylogchain._cuda.chains.row_lengths import sent
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.launch import Kernel, ceil_div, pack, struct
from arraylogchain._inputs.chain import Chain

# struct Paths of paths.cuh.
PATHS = struct(
    (np.int32, "size count first last dtype form start_form end_form"),
    (np.int64, "rows groups paths matrix_stride row_stride column_stride"),
    (np.int64, "potentials_time_stride potentials_stride start_stride end_stride history_time"),
    (np.int64, "time_stride sample_stride uniform_time_stride uniform_sample_stride"),
)


def best_paths(run: ChainRun) -> Array:
    """Return the states of paths of largest weight, [*batch, T]."""
    device, chain = run.device, run.chain
    _, kept = forward_pass(run, keep=False)
    states = device.empty((*chain.batch, chain.num_steps), "int64")
    possible = device.empty((run.all_rows,), "int32")
    for history, steps in _backward(kept):
        _launch(
            run,
            "trace",
            run.all_rows,
            steps | {"time_stride": device.strides(states)[-1]},
            run.axes(run.order, (states, 1), (chain.final, 1)),
            run.axes(chain.group_axes, (chain.transitions, 3)),
            history.states,
            chain.transitions,
            chain.final,
            run.lengths,
            possible,
            states,
        )
        del history
    return states


def draw_paths(
    run: ChainRun, states: Array, uniforms: Array, is_trusted: Callable[[], bool]
) -> None:
    """Write samples into states [num_samples, *batch, T], from numbers that may lie there.

    Nothing is written if kernels are not trusted: array operations will need the numbers.
    """
    device, chain = run.device, run.chain
    _, kept = forward_pass(run, keep=False)
    device.remembered.launched.add(Kernel("chains/sample.cu", f"sample<{C_TYPES[run.compute]}>"))
    if not is_trusted():
        return
    strides, of_uniforms = device.strides(states), device.strides(uniforms)
    fields = {"sample_stride": strides[0], "time_stride": strides[-1]}
    fields["uniform_sample_stride"] = of_uniforms[0]
    fields["uniform_time_stride"] = of_uniforms[-1]
    for history, steps in _backward(kept):
        _launch(
            run,
            "sample",
            int(states.shape[0]) * run.all_rows,
            steps | fields,
            run.axes(run.order, (states, 1), (uniforms, 1), (chain.final, 1)),
            run.axes(chain.group_axes, (chain.transitions, 3)),
            history.states,
            kept.total,
            chain.transitions,
            chain.final,
            run.lengths,
            uniforms,
            states,
        )
        del history


def weights_of_paths(device: Device, chain: Chain, states: Array) -> Array:
    """Return the log weights of paths, int64 states [..., T]."""
    shape = np.broadcast_shapes(tuple(states.shape[:-1]), chain.batch)
    # Lengths have axes of their own, which broadcast like those of the other arrays.
    lengths = chain.lengths
    if lengths is not None:
        numbers = np.ascontiguousarray(lengths, np.int64)
        lengths = sent(device, numbers.reshape(1, -1)).reshape(numbers.shape)
    arrays = ChainArrays(device, replace(chain, batch=shape, lengths=None))
    out, axes = device.empty(shape, arrays.dtype), range(len(shape))
    _launch(
        arrays,
        "log_weight",
        int(np.prod(shape)),
        {"time_stride": device.strides(states)[-1]},
        arrays.axes(axes, (states, 1), (chain.potentials, 2), (chain.transitions, 3)),
        arrays.axes(axes, (chain.initial, 1), (chain.final, 1), (lengths, 0)),
        states,
        chain.potentials,
        chain.transitions,
        chain.initial,
        chain.final,
        lengths,
        out,
    )
    return out


def _backward(kept: ForwardPass) -> Iterator[tuple[History, dict[str, int]]]:
    """Yield the states of blocks of steps, from the last, and what struct Paths says of them."""
    num_steps = kept.run.chain.num_steps
    for first, last in kept.blocks:
        low, high = num_steps - last, num_steps - first
        history = kept.states(low, high)
        yield history, {"first": low, "last": high, "history_time": history.first}
        del history  # before that of the next block is made


def _launch(
    arrays: ChainArrays, kernel: str, paths: int, fields: dict[str, int], *arguments: Any
) -> None:
    """Launch a kernel that has a warp for each path."""
    chain, strides = arrays.chain, arrays.device.strides
    fields = {"size": chain.num_states, "count": chain.num_steps, "paths": paths, **fields}
    fields |= {"rows": arrays.rows, "groups": arrays.groups, "dtype": DTYPES.index(arrays.dtype)}
    fields["potentials_time_stride"], fields["potentials_stride"] = strides(chain.potentials)[-2:]
    if chain.transitions is not None:
        step, fields["row_stride"], fields["column_stride"] = strides(chain.transitions)[-3:]
        fields["matrix_stride"] = 0 if arrays.is_one_matrix else step
        fields["form"] = 2 if chain.transitions_in_logs else 1
    fields["start_form"], fields["start_stride"], _ = arrays.end_weights("initial")
    fields["end_form"], fields["end_stride"], _ = arrays.end_weights("final")
    blocks = ceil_div(paths * WARP, THREADS)
    arrays.launch(f"chains/{kernel}.cu", kernel, blocks, pack(PATHS, **fields), *arguments)
