"""The one choice among backends: from shapes, from where arrays are, and from zeros of a matrix.

Array operations run everywhere and define what is right. Compiled loops compute with NumPy arrays,
kernels on CUDA devices. This module imports none of them: `_chains.passes` imports the recursion
that a route names when it is first taken, and `_products.certified` its kernels and loops.
"""

from __future__ import annotations

import math

import numpy as np

from arraylogchain import _numba
from arraylogchain._core.context import Context
from arraylogchain._inputs.chain import Chain

# Whether compiled loops may be selected; tests of the array implementation switch them off.
COMPILED: bool = True
# Whether whole chains may be computed in one call; tests of segments switch it off.
FUSED: bool = True

# A nonzero entry of a sparse matrix takes as long as this many entries of a full one.
SPARSE_COST = 8
# What has no matrix multiply in it.
MAX_PRODUCT_OPERATIONS = frozenset({"viterbi", "best_message", "best_paths"})
# Bytes that loops and kernels take for an entry of a matrix in float64. Loops: as given, converted,
# in each direction as weights and as logarithms, and in two steps on the way there. Kernels:
# converted, as weights and as logarithms, and for sums over pairs on the way to the result.
BYTES_PER_MATRIX_ENTRY = 64
# States up to which a kernel has a thread for each.
KERNEL_STATES = 1024


def route(operation: str, ctx: Context, chain: Chain, workspace: int) -> tuple[str, str]:
    """Return the route for an operation on a chain, and why it is taken.

    Where a multiply of full matrices would pay, the nonzero entries of one shared matrix are
    counted; everything else follows from shapes.
    """
    size, (_, rows) = chain.num_states, chain.sizes
    if operation == "log_weight":
        return "arrays", "entries of paths are gathered"
    if ctx.kernels is not None and size > KERNEL_STATES:
        return "arrays", f"kernels take up to {KERNEL_STATES} states"
    if ctx.kernels is None and not has_loops(ctx):
        return "arrays", "there are no compiled loops or kernels for these arrays"
    if BYTES_PER_MATRIX_ENTRY * size * size > workspace:
        return "arrays", "what loops or kernels hold of a matrix would not fit the workspace"
    if ctx.kernels is not None:
        return "kernels", "the arrays are on a CUDA device"
    if operation in MAX_PRODUCT_OPERATIONS:
        return "loops", "there is no matrix multiply in it"
    if not _multiply_pays(rows, size, size * size):
        return "loops", "few states or few rows"
    if not _multiply_pays(rows, size, min(size * size, SPARSE_COST * _num_nonzero(chain))):
        return "loops", "few entries of the matrix are nonzero"
    return "arrays", "matrix multiplies pay for many states and rows"


def _multiply_pays(rows: int, states: int, entries: int) -> bool:
    """Return whether array operations are faster than compiled loops, for one step of a group.

    `rows` share a matrix, of which loops visit `entries`. Costs are in picoseconds. Loops take 140
    for each entry and row. Array operations take 80 for each entry of the full matrix, 25 for each
    of its entries and row, 3000 for each state and row, and 10 us for calls.
    """
    array_cost = (80 + 25 * rows) * states**2 + 3000 * rows * states + 10_000_000
    return 140 * rows * entries > array_cost


def _num_nonzero(chain: Chain) -> int:
    """Return the number of nonzero entries of the one matrix of a chain; K * K if it has more."""
    matrix = chain.parts.get("transitions")
    if matrix is None or math.prod(matrix.shape[:-2]) != 1:
        return chain.num_states**2
    return int(np.count_nonzero(matrix != (-math.inf if "transitions" in chain.logs else 0.0)))


def has_loops(ctx: Context) -> bool:
    """Return whether compiled loops can compute with arrays of a context."""
    return ctx.is_numpy and COMPILED and _numba.why_not() is None
