"""The one choice among backends, from shapes and from where arrays are.

Array operations run everywhere and define what is right. Compiled loops compute with NumPy arrays,
kernels on CUDA devices. This module imports none of them: `_chains.passes` imports the recursion
that a route names when it is first taken, and `_products.certified` its kernels and loops.
"""

from __future__ import annotations

from arraylogchain import _numba
from arraylogchain._core.context import Context
from arraylogchain._inputs.chain import Chain

# Whether compiled loops may be selected; tests of the array implementation switch them off.
COMPILED: bool = True

# Rows that share matrices, times K * K, from which on a matrix multiply over all of them is taken
# to be faster than loops over each: 64 rows of 64 states, or 8 of 182.
MIN_BLAS_WORK = 1 << 18
# What has no matrix multiply in it.
MAX_PRODUCT_OPERATIONS = frozenset({"viterbi", "best_message"})
# Bytes that loops and kernels take for an entry of a matrix: as given, converted, in each direction
# as weights and as logarithms, and in two steps on the way there.
BYTES_PER_MATRIX_ENTRY = 64
# States up to which a kernel has a thread for each.
KERNEL_STATES = 1024


def route(operation: str, ctx: Context, chain: Chain, workspace: int) -> tuple[str, str]:
    """Return the route for an operation on a chain, and why it is taken; from shapes alone."""
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
    if rows * size * size >= MIN_BLAS_WORK:
        return "arrays", "matrix multiplies pay for many states and rows"
    return "loops", "few states or few rows"


def has_loops(ctx: Context) -> bool:
    """Tell whether compiled loops can compute with these arrays."""
    return ctx.is_numpy and COMPILED and _numba.why_not() is None
