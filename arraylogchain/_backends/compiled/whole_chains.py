"""log Z, marginals, counts and gradients of whole chains, in one call.

Groups of rows are taken in lanes: forward through all steps, and backward in chunks. A row that is
not certified is declined.
"""

from __future__ import annotations

from arraylogchain._backends.compiled.lanes import (
    MAX_COTANGENT,
    MIN_COTANGENT,
    Chains,
    Gradients,
    Sizes,
    cut_memory,
    enter_lanes,
    load_last_messages,
    make_lanes,
    prepare_matrices,
    run_forward,
    transpose_matrices,
)
from arraylogchain._backends.compiled.linear_space import FAILED, LINEAR
from arraylogchain._backends.compiled.matrices import SparseColumns
from arraylogchain._backends.compiled.whole_marginals import (
    add_sums,
    run_backward,
    scale_pairs,
    write_zeros,
)
from arraylogchain._numba.compiling import compiled, inner


@compiled
def log_partition(chains, columns, sizes, memory, alpha, forms, log_z, declined):
    """Write log Z of whole chains, and which rows are declined.

    There are N rows in all groups, T steps and K states; up to L rows are computed side by side.

    Parameters
    ----------
    chains, columns, sizes : tuple
        The fields of `Chains`, `SparseColumns` and `Sizes`. The weights of columns are overwritten.
    memory : array
        Scratch of `memory_size` numbers.
    alpha : array
        If `sizes.row_size` is not 0, receives the initial message and the T updated forward
        messages of every row. Else it is scratch for two messages of L rows.
    forms : int8 array [2, L]
        Scratch.
    log_z : array [N]
        Undefined for declined rows.
    declined : bool array [N]
        Receives True for rows that are not certified.
    """
    chains, columns, sizes = Chains(*chains), SparseColumns(*columns), Sizes(*sizes)
    R = len(chains.x) // len(chains.transitions)
    work = cut_memory(chains, sizes, memory)
    for g in range(len(chains.transitions)):
        prepared = prepare_matrices(chains, g, columns, work)
        for start in range(g * R, (g + 1) * R, sizes.lanes):
            width = min(sizes.lanes, (g + 1) * R - start)
            lanes = make_lanes(chains, start, width, work, alpha, sizes, forms)
            enter_lanes(lanes, prepared, work)
            run_forward(lanes, prepared, work, log_z)
            _write_declined(lanes, declined)


@compiled
def posterior(
    chains,
    columns,
    back_columns,
    sizes,
    memory,
    alpha,
    forms,
    cotangents,
    gradients,
    log_z,
    declined,
):
    """Write log Z and gradients of whole chains, and which rows are declined.

    If `sizes.is_stored`, `alpha`, `log_z` and `declined` are results of an earlier
    `log_partition`: there is no forward pass, log Z is kept, and rows that were declined still are.

    Parameters
    ----------
    back_columns : tuple
        As `columns`, of the transposed matrix.
    cotangents : array [N]
        Rows are declined whose cotangent is neither 0 nor of a magnitude from MIN_COTANGENT to
        MAX_COTANGENT.
    gradients : tuple
        The fields of `Gradients`. Transitions are 0 on entry; declined rows add nothing.
    others
        See `log_partition`.
    """
    chains, sizes, gradients = Chains(*chains), Sizes(*sizes), Gradients(*gradients)
    columns, back_columns = SparseColumns(*columns), SparseColumns(*back_columns)
    R = len(chains.x) // len(chains.transitions)
    work = cut_memory(chains, sizes, memory)
    for g in range(len(chains.transitions)):
        prepared = prepare_matrices(chains, g, columns, work)
        back_prepared = transpose_matrices(prepared, back_columns, work)
        for start in range(g * R, (g + 1) * R, sizes.lanes):
            width = min(sizes.lanes, (g + 1) * R - start)
            lanes = make_lanes(chains, start, width, work, alpha, sizes, forms)
            for r in range(len(lanes.x)):
                size = abs(cotangents[start + r])
                in_range = size == 0.0 or MIN_COTANGENT <= size <= MAX_COTANGENT
                if not in_range or (sizes.is_stored and declined[start + r]):
                    lanes.forward.forms[r] = FAILED
            enter_lanes(lanes, prepared, work)
            if sizes.is_stored:
                load_last_messages(lanes)
            else:
                run_forward(lanes, prepared, work, log_z)
            run_backward(chains, lanes, back_prepared, cotangents, gradients, work, sizes.chunk)
            if len(gradients.transitions) > 0:
                add_sums(gradients.transitions[g], work.pairs)
            write_zeros(lanes, gradients)
            _write_declined(lanes, declined)
        if len(gradients.transitions) > 0:
            scale_pairs(gradients.transitions[g], prepared.matrices, gradients.by_logs)


@inner
def _write_declined(lanes, declined):
    """Write True for the rows of lanes that are not certified, False for the others."""
    for r in range(len(lanes.lengths)):
        declined[lanes.first + r] = lanes.forward.forms[r] != LINEAR
