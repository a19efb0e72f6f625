"""log Z, marginals, counts and gradients of whole chains, in one call.

Groups of rows are taken in blocks: forward through all steps, and backward in chunks. A row that is
not certified is declined.
"""

from __future__ import annotations

from arraylogchain._backends.compiled.linear_space import LINEAR
from arraylogchain._backends.compiled.matrices import SparseColumns
from arraylogchain._backends.compiled.row_blocks import (
    Chains,
    Gradients,
    Sizes,
    block_of_rows,
    cut_memory,
    enter_block,
    prepare_matrices,
    run_forward,
    transpose_matrices,
)
from arraylogchain._backends.compiled.whole_marginals import (
    add_sums,
    run_backward,
    scale_pairs,
    write_zeros,
)
from arraylogchain._numba.compiling import compiled


@compiled
def whole_chains(chains, columns, sizes, scratch, cotangents, gradients, results):
    """Write log Z and gradients of whole chains, and which rows are declined.

    Return how many rows left linear space forward.

    There are N rows in all groups, T steps and K states; up to L rows are computed side by side. A
    call without gradients is compiled by itself.

    Parameters
    ----------
    chains, sizes : tuple
        The fields of `Chains` and `Sizes`.
    columns : (tuple,) or (tuple, tuple)
        The fields of `SparseColumns`, of the matrix and, with gradients, of its transpose. Their
        weights are overwritten.
    scratch : (memory, alpha, forms)
        Memory of `block_sizes` numbers, and int8 [2, L]. If `sizes.row_size` is not 0, it is
        (T + 1) K, and `alpha` holds the initial message and the T updated forward messages of all
        rows, block after block. A call without gradients runs forward, and writes them and log Z; a
        call with gradients reads them instead, and leaves log Z as it is. If `sizes.row_size` is 0,
        either call runs forward, and `alpha` is scratch for one block: T + 1 messages of L rows, or
        two without gradients.
    cotangents : array [N] or None
        Rows are declined whose cotangent is neither 0 nor of a magnitude from MIN_COTANGENT to
        MAX_COTANGENT.
    gradients : tuple or None
        The fields of `Gradients`. Transitions have to be 0 on entry; declined rows add nothing.
    results : (array [N], bool array [N])
        log Z, undefined for declined rows; and True for rows that are not certified. Rows that are
        True on entry are declined.
    """
    chains, sizes, (memory, alpha, forms) = Chains(*chains), Sizes(*sizes), scratch
    (log_z, declined), R = results, len(chains.x) // len(chains.transitions)
    work, num_failed = cut_memory(chains, sizes, memory), 0
    for g in range(len(chains.transitions)):
        prepared = prepare_matrices(chains, g, SparseColumns(*columns[0]), work)
        if gradients is not None:
            outputs = Gradients(*gradients)
            back_prepared = transpose_matrices(prepared, SparseColumns(*columns[1]), work)
        for start in range(g * R, (g + 1) * R, sizes.rows):
            width = min(sizes.rows, (g + 1) * R - start)
            block = block_of_rows(chains, start, width, work, alpha, sizes, forms)
            enter_block(chains, block, prepared, declined, work)
            if gradients is None or sizes.row_size == 0:
                num_failed += run_forward(block, prepared, work, log_z)
            if gradients is not None:
                run_backward(chains, block, back_prepared, cotangents, outputs, work)
                if len(outputs.transitions) > 0:
                    add_sums(outputs.transitions[g], work.pairs)
                write_zeros(block, outputs)
            for r in range(width):
                declined[start + r] = block.forward.forms[r] != LINEAR
        if gradients is not None and len(outputs.transitions) > 0:
            scale_pairs(outputs.transitions[g], prepared.matrices, outputs.by_logs)
    return num_failed
