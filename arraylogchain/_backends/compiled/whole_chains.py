"""log Z, marginals, counts and gradients of whole chains, in one call.

Groups of rows are taken in blocks: forward through all steps, and backward in chunks. A row that is
not certified is declined.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from arraylogchain._backends.compiled.linear_space import FAILED, LINEAR
from arraylogchain._backends.compiled.matrices import SparseColumns
from arraylogchain._backends.compiled.row_blocks import (
    MAX_COTANGENT,
    MIN_COTANGENT,
    Chains,
    Gradients,
    Sizes,
    block_of_rows,
    cut_memory,
    enter_block,
    load_last_messages,
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
from arraylogchain._numba.compiling import compiled, inner


class WholeChainInputs(NamedTuple):
    """Arguments of `whole_chains` for one set of chains, whether or not gradients are computed."""

    chains: tuple[Any, ...]  # the fields of `Chains`
    columns: tuple[Any, ...]  # of the matrix, the fields of `SparseColumns`
    sizes: tuple[int, ...]  # the first fields of `Sizes`
    memory: Any
    forms: Any


@compiled
def whole_chains(chains, columns, sizes, scratch, cotangents, gradients, results):
    """Write log Z and gradients of whole chains, and which rows are declined.

    There are N rows in all groups, T steps and K states; up to L rows are computed side by side. A
    call without gradients is compiled by itself.

    Parameters
    ----------
    chains, sizes : tuple
        The fields of `Chains` and `Sizes`. If `sizes.is_stored`, messages and results are those of
        an earlier call: there is no forward pass, log Z is kept, and rows that were declined still
        are.
    columns : (tuple, tuple)
        The fields of `SparseColumns`, of the matrix and transposed. Their weights are overwritten.
    scratch : (memory, alpha, forms)
        Memory of `block_sizes` numbers, and int8 [2, L]. If `sizes.row_size` is not 0, `alpha`
        receives the initial message and the T updated forward messages of every row. Else it is
        memory for these messages of L rows, or for two messages without gradients.
    cotangents : array [N] or None
        Rows are declined whose cotangent is neither 0 nor of a magnitude from MIN_COTANGENT to
        MAX_COTANGENT.
    gradients : tuple or None
        The fields of `Gradients`. Transitions are 0 on entry; declined rows add nothing.
    results : (array [N], bool array [N])
        log Z, undefined for declined rows; and True for rows that are not certified.
    """
    chains, sizes, (memory, alpha, forms) = Chains(*chains), Sizes(*sizes), scratch
    (log_z, declined), R = results, len(chains.x) // len(chains.transitions)
    work = cut_memory(chains, sizes, memory)
    for g in range(len(chains.transitions)):
        prepared = prepare_matrices(chains, g, SparseColumns(*columns[0]), work)
        if gradients is not None:
            back_prepared = transpose_matrices(prepared, SparseColumns(*columns[1]), work)
        for start in range(g * R, (g + 1) * R, sizes.rows):
            width = min(sizes.rows, (g + 1) * R - start)
            block = block_of_rows(chains, start, width, work, alpha, sizes, forms)
            enter_block(chains, block, prepared, work)
            if gradients is not None:
                _mark_rows(block, cotangents, sizes.is_stored, declined)
            if sizes.is_stored:
                load_last_messages(block)
            else:
                run_forward(block, prepared, work, log_z)
            if gradients is not None:
                outputs = Gradients(*gradients)
                run_backward(chains, block, back_prepared, cotangents, outputs, work, sizes.chunk)
                if len(outputs.transitions) > 0:
                    add_sums(outputs.transitions[g], work.pairs)
                write_zeros(block, outputs)
            for r in range(width):
                declined[start + r] = block.forward.forms[r] != LINEAR
        if gradients is not None:
            outputs = Gradients(*gradients)
            if len(outputs.transitions) > 0:
                scale_pairs(outputs.transitions[g], prepared.matrices, outputs.by_logs)


@inner
def _mark_rows(block, cotangents, is_stored, declined):
    """Mark rows as FAILED whose cotangent is out of range, or that were declined before."""
    for n in range(block.first, block.first + len(block.x)):
        size = abs(cotangents[n])
        in_range = size == 0.0 or MIN_COTANGENT <= size <= MAX_COTANGENT
        if not in_range or (is_stored and declined[n]):
            block.forward.forms[n - block.first] = FAILED
