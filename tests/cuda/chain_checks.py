"""Chains run by the CUDA kernels' source on the CPU, against the references and their bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from arraylogchain._cuda.chains import backward_pass
from arraylogchain._cuda.chains.geometry import LANES, Geometry, SmallGeometry
from arraylogchain._cuda.chains.recursion import ChainRun
from arraylogchain._inputs.chain import Chain
from tests import error_model, gradient_reference, reference
from tests.cuda.cpu_device import CpuDevice, bfloat16, from_bfloat16
from tests.error_model import assert_within
from tests.gradient_checks import assert_gradient, cotangent
from tests.gradient_reference import Gradient

# Four rows a block, and two parts of every sum: for K up to 32. Each geometry is compiled once.
SMALL = Geometry(rows=4, columns=1, column_warps=1, parts=2)
AnyGeometry = Geometry | SmallGeometry
WORKSPACE = 1 << 20
NAMES = ("transitions", "log_transitions", "initial", "log_initial")
TRAILING = {"x": 2, "transitions": 3, "log_transitions": 3, "initial": 1, "log_initial": 1}


def both(size: int) -> tuple[AnyGeometry, ...]:
    """Return a geometry of each of the two kernels that there are for few states."""
    return SMALL, SmallGeometry(next(n for n in LANES if n >= size), 2)


Layout = Callable[[np.ndarray], np.ndarray]
# log_partition, forward and backward messages.
Results = tuple[np.ndarray, np.ndarray, np.ndarray]


def as_given(x: Any, dtype: str) -> np.ndarray:
    """Return an array as the device has it: bfloat16 in the bits of uint16."""
    with np.errstate(over="ignore"):
        return bfloat16(x) if dtype == "bfloat16" else np.array(x, dtype)


def as_numbers(x: np.ndarray) -> np.ndarray:
    return from_bfloat16(x) if x.dtype == np.uint16 else x


@dataclass
class Case:
    """A chain on the device, and the numbers that its arrays hold."""

    chain: Chain
    held: dict[str, np.ndarray]
    dtype: str
    lengths: np.ndarray | None

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.chain.batch

    def references(self) -> list[Any]:
        """Return x, log transitions and log initial weights, as references take them."""
        held = self.held
        with np.errstate(divide="ignore", invalid="ignore"):
            edges = held.get("log_transitions")
            if "transitions" in held:
                edges = np.log(reference.wide(held["transitions"]))
            start = held.get("log_initial")
            if "initial" in held:
                start = np.log(reference.wide(held["initial"]))
        return [held["x"], edges, start]

    @property
    def options(self) -> dict[str, bool]:
        return {
            "edges_in_logs": "log_transitions" in self.held,
            "initial_in_logs": "log_initial" in self.held,
        }

    def rows(self) -> list[tuple[tuple[int, ...], int, Case]]:
        """Return every row's index and length, and its own chain cut to that length."""
        out = []
        for index in np.ndindex(self.chain.batch):
            count = self.chain.num_steps
            lengths = self.lengths
            length = (
                count if lengths is None else int(np.broadcast_to(lengths, self.chain.batch)[index])
            )
            held = {}
            for name, x in self.held.items():
                trailing = TRAILING[name]
                own = np.broadcast_to(x, (*self.chain.batch, *x.shape[x.ndim - trailing :]))[index]
                if name == "x":
                    own = own[:length]
                if trailing == 3 and own.shape[0] > 1:
                    own = own[: max(length - 1, 1)]
                if not (trailing == 3 and length == 1):
                    held[name] = own
            out.append((index, length, Case(self.chain, held, self.dtype, None)))
        return out


def make(
    dtype: str,
    x: Any,
    *,
    lengths: Any = None,
    layout: Layout = lambda x: x,
    **options: Any,
) -> Case:
    """Return a chain of arrays in the given dtype, each with a memory layout of its own."""
    given = {"x": x, **{name: v for name, v in options.items() if v is not None}}
    arrays = {name: as_given(v, dtype) for name, v in given.items()}
    held = {name: as_numbers(v).copy() for name, v in arrays.items()}
    arrays = {name: layout(v) for name, v in arrays.items()}
    batch = np.broadcast_shapes(*(v.shape[: v.ndim - TRAILING[n]] for n, v in arrays.items()))
    if lengths is not None:
        lengths = np.asarray(lengths, np.int64)
    chain = Chain(
        batch=batch,
        num_steps=arrays["x"].shape[-2],
        num_states=arrays["x"].shape[-1],
        potentials=arrays["x"],
        transitions=arrays.get("transitions", arrays.get("log_transitions")),
        initial=arrays.get("initial", arrays.get("log_initial")),
        transitions_in_logs="log_transitions" in arrays,
        initial_in_logs="log_initial" in arrays,
        lengths=lengths,
    )
    return Case(chain, held, dtype, lengths)


def check(
    device: CpuDevice,
    dtype: str,
    x: Any,
    *,
    geometry: Geometry | None = None,
    workspace: int = WORKSPACE,
    has_backward_reference: bool = True,
    **given: Any,
) -> Results:
    """Compare log_partition and messages of both directions with the references; return them.

    They are computed by `both` kernels, the reference once; or in the given geometry.
    """
    case = make(dtype, x, **given)
    device.flush_to_zero = dtype != "float64"  # as CuPy compiles kernels
    found = []
    for own in both(case.chain.num_states) if geometry is None else (geometry,):
        run = ChainRun(device, case.chain, workspace, own)
        partition = as_numbers(run.log_partition())
        forward = as_numbers(run.messages(backward=False))
        backward = as_numbers(run.messages(backward=True))
        found.append((partition, forward, backward))
    if case.lengths is None:
        assert_right(case, found, has_backward_reference)
        return found[0]
    for index, length, row in case.rows():
        own_results = [(z[index], a[index][:length], b[index][:length]) for z, a, b in found]
        assert_right(row, own_results)
        for _, *messages in found:
            assert all(np.all(np.isneginf(m[index][length:])) for m in messages)
    return found[0]


def assert_right(case: Case, found: list[Results], has_backward_reference: bool = True) -> None:
    """Compare with the references, whose G has no part for states that are kept as logs."""
    x, edges, start = case.references()
    dtype, (T, K) = case.dtype, x.shape[-2:]
    exact = reference.chain(x, edges, start, **case.options)
    bound = error_model.chain_bound(exact.log_partition, exact.partition_gap, T, K, dtype)
    for partition, _, _ in found:
        assert_within(partition, rounded(exact.log_partition, dtype), bound)
    steps = np.arange(1, T + 1)[:, None]
    bound = error_model.chain_bound(exact.messages, exact.message_gaps, steps, K, dtype)
    for _, forward, _ in found:
        assert_within(forward, rounded(exact.messages, dtype), bound)
    if not has_backward_reference:
        return
    back = gradient_reference.chain(x, edges, start, **case.options)
    bound = error_model.chain_bound(back.backward, back.backward_gaps, steps[::-1], K, dtype)
    for _, _, backward in found:
        assert_within(backward, rounded(back.backward, dtype), bound)


def rounded(exact: np.ndarray, dtype: str) -> np.ndarray:
    """Return what is too large for bfloat16 as infinity; float32, which holds it, is wider."""
    if dtype != "bfloat16":
        return exact
    return np.where(np.abs(exact) > 3.3961776e38, np.copysign(np.inf, exact), exact)


def check_gradients(
    device: CpuDevice,
    dtype: str,
    x: Any,
    g: Any = "normal",
    *,
    geometry: Geometry | None = None,
    workspace: int = WORKSPACE,
    keep: bool = True,
    **given: Any,
) -> dict[str, np.ndarray]:
    """Compare marginals, counts and gradients of log_partition with the reference; return them.

    They are computed by `both` kernels, the reference once; or in the given geometry.
    """
    case = make(dtype, x, **given)
    device.flush_to_zero = dtype != "float64"  # as CuPy compiles kernels
    chain = case.chain
    g = as_given(cotangent(g, chain.batch, dtype) if isinstance(g, str) else g, dtype)
    wanted = {"potentials", "transitions", "initial"}
    wanted -= {"transitions"} if chain.transitions is None else set()
    wanted -= {"initial"} if chain.initial is None else set()

    results = []
    for own in both(chain.num_states) if geometry is None else (geometry,):
        run = ChainRun(device, chain, workspace, own)
        _, kept = backward_pass.forward_pass(run, keep=keep)
        found = backward_pass.gradients(kept, g, wanted)
        found["marginals"] = backward_pass.state_marginals(run)
        if chain.transitions is not None:
            found["counts"] = backward_pass.transition_counts(run)
        results.append({name: as_numbers(value) for name, value in found.items()})
    exact = exact_gradients(case, as_numbers(g))
    T, K = chain.num_steps, chain.num_states
    largest = error_model.LARGEST_DERIVATIVE[error_model.compute_dtype(dtype)]
    size = float(np.max(np.abs(as_numbers(g)), initial=0))
    for name, ours in ((name, ours) for found in results for name, ours in found.items()):
        expected = exact[name]
        bound = error_model.posterior_bound(expected, T, K, dtype)
        linear = {"transitions": "transitions", "initial": "initial"}.get(name) in case.held
        assert_gradient(ours, expected, bound, largest * size if linear else np.inf)
    return results[0]


def exact_gradients(case: Case, g: np.ndarray) -> dict[str, Gradient]:
    """Return what the reference says, row by row where rows have lengths of their own."""
    if case.lengths is None:
        posterior = gradient_reference.chain(*case.references(), g, **case.options)
        return {
            "marginals": posterior.marginals,
            "counts": posterior.counts,
            "potentials": posterior.log_potentials,
            "transitions": posterior.transitions,
            "initial": posterior.initial,
        }
    shapes = {"potentials": case.held["x"].shape}
    shapes["marginals"] = (*case.chain.batch, *shapes["potentials"][-2:])
    for name, key in (("transitions", "transitions"), ("initial", "initial")):
        own = case.held.get(key, case.held.get(f"log_{key}"))
        shapes[name] = None if own is None else own.shape
    shapes["counts"] = shapes["transitions"]
    trailing = {"potentials": 2, "marginals": 2, "transitions": 3, "counts": 3, "initial": 1}
    parts = ("exact", "mass", "gap", "scale")
    sums = {
        name: {part: np.zeros(shape, np.longdouble) for part in parts}
        for name, shape in shapes.items()
        if shape is not None
    }
    for index, _, row in case.rows():
        own = exact_gradients(row, g[index] if g.ndim else g)
        for name, whole in sums.items():
            if own[name] is None:
                continue
            shape, n = shapes[name], trailing[name]
            skipped = len(case.chain.batch) + n - len(shape)
            at = tuple(
                0 if extent == 1 else i
                for i, extent in zip(index[skipped:], shape[: len(shape) - n], strict=True)
            )
            for part in parts:
                value = getattr(own[name], part)
                if n == 1:
                    whole[part][at] += value
                else:
                    whole[part][at][: len(value)] += value
    terms = int(np.prod(case.chain.batch)) * case.chain.num_steps
    return {name: Gradient(**whole, terms=terms) for name, whole in sums.items()}
