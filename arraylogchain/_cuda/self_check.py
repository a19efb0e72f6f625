"""Kernels prove themselves on the device they meet, before their first results are handed out.

When an operation has launched a kernel for the first time, small hard cases of the operation that
launch it are computed by kernels and, on the host, by the array implementation in float64. Passed:
that is remembered on disk, for the model of the device, its driver, CuPy and the kernel's source.
Failed: a warning, and another implementation computes from then on.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import array_api_compat.numpy
import numpy as np

from arraylogchain import _arrays, _dispatch
from arraylogchain._context import SINGLE, Array, Context
from arraylogchain._cuda import records
from arraylogchain._cuda.device import Device
from arraylogchain._cuda.first_use import Probe, load
from arraylogchain._cuda.launch import Kernel
from arraylogchain._fold import fold
from arraylogchain._inputs.chain import PARTS, Chain

# Makes arrays of a context, calls an implementation with them, and returns its results.
Case = Callable[[Callable[..., Any], Context], list[Array]]

# Rows, terms and columns, and workspace: products for each of the kernels for small ones, for thin
# ones, and of tiles, those for few rows and the largest among them; the first of these in parts of
# its terms by several blocks, the last by several launches.
_PRODUCTS = (
    *(((n - 1, n, n - 3), 1 << 22) for n in (8, 16, 32)),
    *(((rows, 70, 45), 1 << 22) for rows in (1, 2, 3)),
    ((60, 37, 61), 1 << 22),
    ((15, 1100, 120), 1 << 22),
    ((250, 120, 250), 1 << 24),
    ((40, 200, 50), 30_000),
)
# Rows and states, likewise.
_CHAINS = (
    *((5, states) for states in (3, 7, 13, 30)),
    *((rows, 37) for rows in (1, 3, 9, 17)),
)
_STEPS, _WORKSPACE = 6, 1 << 24

_LOGS = (
    *("logmatmulexp", "maxplus_matmul", "log_partition", "forward_messages", "backward_messages"),
    *("viterbi", "log_weight"),
)
_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
# The largest G of an entry that is proved: the logarithm of eps over the smallest normal number.
_LARGEST_GAP = {"float32": 72, "float64": 673}

# On which model of device which operation failed by which kernels.
_failed: set[tuple[str, str, str]] = set()


class Finding(NamedTuple):
    """The largest error of some cases, as a multiple of what is allowed, and what is wrong."""

    error: float
    problem: str | None


def has_failed(device: Device, operation: str, backend: str = "cuda") -> bool:
    """Tell whether an operation's kernels have failed their check on this model of device."""
    return (device.identity, operation, backend) in _failed


def is_trusted(ctx: Context, operation: str, backend: str = "cuda") -> bool:
    """Tell whether what an operation's kernels have computed can be handed out."""
    device = ctx.kernels
    if isinstance(device, Probe):
        return True  # this is the check
    if has_failed(device, operation, backend):
        return False
    remembered = device.remembered
    count = len(remembered.launched)
    if remembered.checked.get((operation, backend)) == count:
        return True  # no kernel is new
    # While a graph is captured nothing can be read; the call before it has checked.
    if os.environ.get("ARRAYLOGCHAIN_SELF_CHECK") == "0" or device.is_capturing():
        return True
    subjects = {
        kernel: (device.identity, f"{operation} by {kernel.name}", kernel.source)
        for kernel in remembered.launched.copy()
    }
    new = {kernel for kernel, subject in subjects.items() if records.read(*subject) is None}
    problem = check(ctx, operation, new, backend).problem if new else None
    if problem is not None:
        _failed.add((device.identity, operation, backend))
        warnings.warn(
            f"the CUDA kernels of {operation} failed their check on {device.identity}: {problem}; "
            f"others, or array operations, take over from now on. Please report this, with what "
            f"python -m arraylogchain --device cuda --check prints",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    for kernel in new:
        records.write(*subjects[kernel])
    remembered.checked[operation, backend] = count
    return True


def check(
    ctx: Context, operation: str, kernels: set[Kernel] | None = None, backend: str = "cuda"
) -> Finding:
    """Compare results of an operation's cases, those alone that some kernels take part in."""
    cuda, array = (_dispatch.implementation(operation, name) for name in (backend, "array"))
    device, host, largest = ctx.kernels, _host(), 0.0
    try:
        chosen = []
        for case, reach in _cases(ctx, operation):
            # Cases choose the same launches wherever they run.
            probe = Probe(device, multiprocessors=2)
            case(cuda, replace(ctx, kernels=probe))
            if kernels is None or probe.remembered.launched & kernels:
                chosen.append((case, reach, probe))
        load(device, {kernel for *_, probe in chosen for kernel in probe.remembered.launched})
        for case, reach, probe in chosen:
            probe.runs = True
            found = case(cuda, replace(ctx, kernels=probe))
            error, ratio = _largest_error(ctx, operation, reach, found, case(array, host))
            largest = max(largest, ratio)
            if ratio > 1:
                names = ", ".join(sorted(kernel.name for kernel in probe.remembered.launched))
                return Finding(largest, f"{names} err by {error:.3g}")
    except Exception as failure:  # a launch that the driver refuses, ...
        return Finding(np.inf, f"{type(failure).__name__}: {failure}")
    return Finding(largest, None)


def _largest_error(
    ctx: Context, operation: str, reach: float, found: list[Array], exact: list[np.ndarray]
) -> tuple[float, float]:
    """Return the error that is the largest multiple of what is allowed, and that multiple."""
    worst, eps = (0.0, 0.0), _EPS[ctx.precision.name]
    # What lies beyond the dtype's range comes out as an infinity.
    limit = np.finfo("float16" if ctx.result_name == "float16" else ctx.precision.name).max
    for x, y in zip(found, exact, strict=True):
        if "int" not in str(x.dtype):
            x = ctx.xp.astype(x, ctx.dtype(ctx.precision), copy=False)
        z, y = (
            np.clip(np.asarray(of_one, np.float64), -limit, limit)
            for of_one in (_arrays.on_host("result", x), y)
        )
        error, size = np.abs(z - y), np.abs(y)
        # An absolute error in logarithms is a relative error of a posterior weight.
        units = 1.0 if operation in _LOGS else np.maximum(size, 1)
        ratio = error / (2 * _EPS[ctx.result_name] * size + eps * reach * units)
        right = (z == y) | (np.isnan(z) & np.isnan(y))
        error, ratio = (np.where(right, 0, np.nan_to_num(n, nan=np.inf)) for n in (error, ratio))
        if ratio.size and ratio.max() > worst[1]:
            worst = float(error.flat[ratio.argmax()]), float(ratio.max())
    return worst


def _host() -> Context:
    """Return the context of the reference: without compiled loops, which take a second to load."""
    namespace = SimpleNamespace(**vars(array_api_compat.numpy))
    return replace(_arrays._numpy_context("float64"), xp=namespace, kernels=None)


def _cases(ctx: Context, operation: str) -> Iterator[tuple[Case, float]]:
    """Yield cases, and how large their errors may be: what a log may err by, in eps."""
    gap = _LARGEST_GAP[ctx.precision.name]
    if operation in _dispatch.PRODUCTS:
        for sizes, workspace in _PRODUCTS:
            operands = _operands(ctx, *sizes)
            yield partial(_product, operation, operands, workspace), 3 * gap + 4 * sizes[1]
    else:
        for rows, states in _CHAINS:
            for in_logs in (False, True):
                weights = _weights(ctx, rows, states, in_logs)
                reach = _STEPS * (3 * gap + 4 * states) + 4 * rows
                for segments in (1, 2) if operation == "log_partition" else (1,):
                    yield partial(_chain, operation, weights, in_logs, segments), reach


def _entries(rng: np.random.Generator, ctx: Context, sd: float, *shape: int) -> np.ndarray:
    """Return normal entries that every dtype represents exactly."""
    unit = 1 if ctx.result_name in ("float16", "bfloat16") else 8
    return np.rint(rng.normal(0, sd * unit, shape)) / unit


def _depth(ctx: Context) -> int:
    """Return how far below the others weights lie that only exact sums do not lose."""
    return 110 if ctx.precision is SINGLE else 800


def _operands(ctx: Context, rows: int, terms: int, columns: int) -> tuple[np.ndarray, ...]:
    """Return operands, and cotangents: maxima that do not meet, wide ranges, zeros."""
    rng = np.random.default_rng(rows)
    a, b = _entries(rng, ctx, 3, rows, terms), _entries(rng, ctx, 3, terms, columns)
    a[5::6, 1:] -= _depth(ctx)
    b[:-1, ::5] -= _depth(ctx)
    a[3::8] *= 20
    a[4::9, 3:] = a[2::5, terms // 2] = b[terms // 3, 1::4] = -np.inf
    return a, b, _entries(rng, ctx, 4, rows, columns)


def _product(
    operation: str,
    operands: tuple[np.ndarray, ...],
    workspace: int,
    function: Callable[..., Any],
    ctx: Context,
) -> list[Array]:
    a, b, g = operands
    layout = fold(a.shape, b.shape)
    # Of some operands terms are neighbours in memory, of others rows or columns.
    left, right = _array(ctx, a), _array(ctx, b)
    if len(a) % 2:
        right = ctx.xp.permute_dims(_array(ctx, b.T), (1, 0))
    else:
        left = ctx.xp.permute_dims(_array(ctx, a.T), (1, 0))
    arguments: tuple[Any, ...] = (left, right)
    if operation.endswith("gradients"):
        host = _host()
        value = _dispatch.implementation("logmatmulexp", "array")(host, layout, a, b, _WORKSPACE)
        arguments = (left, right, _array(ctx, value), _array(ctx, g))
    if operation == "maxplus_gradients":
        best = _dispatch.implementation("maxplus_matmul", "array")
        values, indices = best(host, layout, a, b, _WORKSPACE)
        indices = ctx.xp.asarray(indices, device=ctx.device)
        arguments = ((a.shape, b.shape), indices, _array(ctx, g), _array(ctx, values))
    found = function(ctx, layout, *arguments, workspace if ctx.kernels else _WORKSPACE)
    return list(found) if isinstance(found, tuple) else [found]


def _weights(ctx: Context, rows: int, states: int, in_logs: bool) -> dict[str, np.ndarray]:
    """Return a chain's weights over wide ranges.

    As logs, one matrix in which even and odd states never meet: in some rows the even ones fall far
    behind, and decide at last. Linear ones without zeros, whose derivatives could be infinite.
    """
    rng = np.random.default_rng(states)
    ends = np.rint(rng.uniform(0, 8, (2, rows, states))) / 8
    potentials = _entries(rng, ctx, 5, rows, _STEPS, states)
    potentials[1::2] *= 5
    potentials[:, 4, 1] = -np.inf
    transitions = np.rint(rng.uniform(1, 8, (_STEPS - 1, states, states))) / 8
    if in_logs:
        transitions, ends = -40 * transitions[:1], -40 * ends
        transitions[:, ::2, 1::2] = transitions[:, 1::2, ::2] = -np.inf
        potentials[::2, 2:4, ::2] -= _depth(ctx)
        potentials[::2, 4, 1::2] -= 2 * _depth(ctx)
    initial, final = ends
    return dict(zip(PARTS, (potentials, transitions, initial, final), strict=True))


def _chain(
    operation: str,
    weights: dict[str, np.ndarray],
    in_logs: bool,
    segments: int,
    function: Callable[..., Any],
    ctx: Context,
) -> list[Array]:
    rows, steps, states = weights["potentials"].shape
    arrays = {name: _array(ctx, x) for name, x in weights.items()}
    lengths = None if segments > 1 else steps - np.arange(rows) % steps
    logs = {f"{name}_in_logs": in_logs for name in PARTS[1:]}
    chain = Chain((rows,), steps, states, **arrays, **logs, lengths=lengths)
    if ctx.kernels is not None:
        chain = replace(chain, segments=segments)
    if operation in ("viterbi", "sample", "log_weight"):
        return _paths(operation, chain, weights, function, ctx)
    if operation != "value_and_pullback":
        results = function(ctx, chain, _WORKSPACE)
        return list(results) if isinstance(results, tuple) else [results]
    value, pullback = function(ctx, chain, _WORKSPACE, True)
    found = pullback(_array(ctx, np.ones(rows)), frozenset(arrays))
    return [value, *(found[name] for name in arrays)]


def _paths(
    operation: str,
    chain: Chain,
    weights: dict[str, Any],
    function: Callable[..., Any],
    ctx: Context,
) -> list[Array]:
    """Return samples, the log weights of given paths, or those of best paths."""
    rng = np.random.default_rng(1)
    shape = (3, *chain.batch, chain.num_steps)
    if operation == "sample":
        out = ctx.empty(shape, ctx.index_dtype)
        function(ctx, chain, _WORKSPACE, out, ctx.xp.asarray(rng.random(shape), device=ctx.device))
        return [out]
    if operation == "log_weight":
        given = rng.integers(0, chain.num_states, shape)
        states = ctx.xp.asarray(given, device=ctx.device)
        return [function(ctx, chain, _WORKSPACE, states)]
    # Several paths may be best but for roundings.
    path, weight = function(ctx, chain, _WORKSPACE)
    found = _arrays.on_host("states", path)
    states = np.clip(found, 0, chain.num_states - 1)
    weigh = _dispatch.implementation("log_weight", "array")
    best = weigh(_host(), replace(chain, **weights), _WORKSPACE, states)
    return [ctx.xp.asarray(best + (found < 0).sum(-1), device=ctx.device), weight]


def _array(ctx: Context, x: np.ndarray) -> Array:
    """Return numbers in the dtype of the result, every second of what is in memory."""
    return ctx.to_result(ctx.xp.asarray(np.repeat(x, 2, axis=0), device=ctx.device))[::2]
