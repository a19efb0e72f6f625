"""The backward pass of whole chains: marginals, counts and gradients of a block of rows.

Steps go backward in chunks; the marginals of a chunk are added before the next one. Every
normalizer has to be well within the range of numbers; see `_chains.marginals`.
"""

from __future__ import annotations

import math

from arraylogchain._backends.compiled.linear_space import FAILED, LINEAR, Segment, num_active
from arraylogchain._backends.compiled.recursion import advance_linear
from arraylogchain._backends.compiled.row_blocks import MAX_NORMALIZER, MIN_NORMALIZER
from arraylogchain._core.precision import DOUBLE
from arraylogchain._numba.compiling import inner
from arraylogchain._numba.intrinsics import view

MIN_COTANGENT, MAX_COTANGENT = DOUBLE.cotangents


@inner
def run_backward(chains, block, prepared, cotangents, gradients, work):
    """Run backward through all steps, write gradients, and mark uncertified rows as FAILED.

    A row may fail after its pair marginals of later steps were added to the sums over rows. The
    whole pass is then repeated without failed rows, until no further row fails.
    """
    forward, backward, T = block.forward, block.backward, block.lengths[0]
    width, K = forward.weights.shape
    for r in range(width):
        size = abs(cotangents[block.first + r])
        if size != 0.0 and not MIN_COTANGENT <= size <= MAX_COTANGENT:
            forward.forms[r] = FAILED
    num_failed = 1
    while num_failed > 0:
        num_failed, num_linear = 0, 0
        for r in range(width):
            num_linear += forward.forms[r] == LINEAR
            backward.forms[r] = forward.forms[r]
            backward.shifts[r], backward.exponents[r] = 0.0, 0.0
            for k in range(K):
                backward.weights[r, k] = work.boundary[1, r, k]
        work.pairs[:] = 0.0
        stop = T if num_linear > 0 else 0
        while stop > 0:
            start = max(stop - len(block.stored.predicted), 0)
            # T - T is 0 and T > 0 is True, but not literals; see `recursion.enter_linear_space`.
            segment = Segment(block.x, block.lengths, T - T, start, stop, T > 0, T - T)
            advance_linear(segment, backward, prepared, block.stored, block.scratch)
            for r in range(width):
                if backward.forms[r] != LINEAR and forward.forms[r] == LINEAR:
                    forward.forms[r] = FAILED
                    num_failed += 1
            num_failed += _add_chunk(block, segment, cotangents, gradients, work)
            stop = start
        if num_linear > 0:
            num_failed += _write_boundary(chains, block, cotangents, gradients, work)
        # Only pair marginals are summed over rows; `write_zeros` clears other gradients of failed
        # rows.
        if len(gradients.transitions) == 0:
            return


@inner
def _add_chunk(block, segment, cotangents, gradients, work):
    """Add the marginals of a chunk of steps; return how many rows are now marked as FAILED."""
    num_failed, width, factors = 0, len(block.lengths), work.normalizers
    with_pairs, with_states = len(gradients.transitions) > 0, len(gradients.potentials) > 0
    for t in range(segment.start, segment.stop):
        alpha, i = block.alpha[t + 1, 0], t - segment.start
        beta, beta_x = block.stored.predicted[i, 0], block.stored.updated[i + 1, 0]
        active = num_active(block.lengths, t)
        num_failed += _divide_cotangents(alpha, beta, block, cotangents, factors, active)
        if with_states:
            for r in range(active):
                out = gradients.potentials[block.first + r, t]
                for k in range(len(out)):
                    out[k] = (alpha[k * width + r] * beta[k * width + r]) * factors[r]
        # Rows that have a next step, and so pair marginals at t.
        moved = num_active(block.lengths, t + 1)
        if with_pairs and moved > 0:
            pairs = work.pairs[t if len(work.pairs) > 1 else 0]
            if width == 1:
                _add_pairs_of_row(alpha, beta_x, factors[0], pairs)
            else:
                _add_pairs(alpha, beta_x, factors, width, moved, work.factors, pairs)
    return num_failed


@inner
def _divide_cotangents(alpha, beta, block, cotangents, factors, active):
    """Write cotangents over normalizers, 0 for failed rows; return how many rows now failed."""
    width, num_failed, forms = len(block.lengths), 0, block.forward.forms
    if width == 1:
        factors[0] = _product(alpha, beta)  # in a register: a sum in memory waits for each term
    else:
        for r in range(active):
            factors[r] = 0.0
        for start in range(0, len(alpha), width):
            a, b = view(alpha, start, (active,)), view(beta, start, (active,))
            for r in range(active):
                factors[r] += a[r] * b[r]
    for r in range(active):
        is_certified = MIN_NORMALIZER <= factors[r] <= MAX_NORMALIZER
        if forms[r] == LINEAR and not is_certified:
            forms[r] = FAILED
            num_failed += 1
        factors[r] = cotangents[block.first + r] / factors[r] if forms[r] == LINEAR else 0.0
    return num_failed


@inner
def _add_pairs_of_row(alpha, beta_x, factor, pairs):
    K = len(alpha)
    for k in range(K if factor != 0.0 else 0):
        weight, out = alpha[k] * factor, pairs[k]
        for j in range(K):
            out[j] += weight * beta_x[j]


@inner
def _add_pairs(alpha, beta_x, factors, width, moved, weights, pairs):
    """Add the sums over rows of alpha_k beta_x_j times factors, which are 0 for failed rows."""
    K = len(pairs)
    for k in range(K):
        a = view(alpha, k * width, (moved,))
        for r in range(moved):
            weights[r] = a[r] * factors[r]
        j = 0
        while j + 4 <= K:
            out = view(pairs, k * K + j, (4,))
            _add_four_products(weights, beta_x, j * width, width, moved, out)
            j += 4
        while j < K:
            pairs[k, j] += _product(view(weights, 0, (moved,)), view(beta_x, j * width, (moved,)))
            j += 1


def _scalar_product(a, b):
    total = 0.0
    for r in range(len(a)):
        total += a[r] * b[r]
    return total


def _four_scalar_products(a, b, start, width, count, out):
    b0, b1 = view(b, start, (count,)), view(b, start + width, (count,))
    start += 2 * width
    b2, b3 = view(b, start, (count,)), view(b, start + width, (count,))
    s0 = s1 = s2 = s3 = 0.0
    for r in range(count):
        s0 += a[r] * b0[r]
        s1 += a[r] * b1[r]
        s2 += a[r] * b2[r]
        s3 += a[r] * b3[r]
    out[0] += s0
    out[1] += s1
    out[2] += s2
    out[3] += s3


# Terms may be added in any order: errors are bounded relative to the sum of their magnitudes.
_product = inner(_scalar_product, fastmath={"contract", "reassoc"})


_add_four_products = inner(_four_scalar_products, fastmath={"contract", "reassoc"})


@inner
def _write_boundary(chains, block, cotangents, gradients, work):
    """Write gradients with respect to initial and final weights, or to their logarithms.

    Return how many rows are now marked as FAILED.
    """
    num_failed, (width, K) = 0, block.forward.weights.shape
    last_messages = block.stored.updated[0, 0], block.alpha[block.lengths[0], 0]
    for r in range(width if gradients.boundary.shape[1] > 0 else 0):
        for side in range(2):
            other = last_messages[side][r::width]
            weights, out, total = work.boundary[side, r], gradients.boundary[side], 0.0
            for k in range(K):
                total += weights[k] * other[k]
            is_certified = MIN_NORMALIZER <= total <= MAX_NORMALIZER
            if block.forward.forms[r] == LINEAR and not is_certified:
                block.forward.forms[r] = FAILED
                num_failed += 1
            factor = cotangents[block.first + r] / total
            for k in range(K):
                gradient = other[k] * factor
                if chains.boundary_is_log[side]:
                    gradient *= weights[k]
                else:
                    gradient = math.ldexp(gradient, -int(weights[K]))
                out[block.first + r, k] = gradient
    return num_failed


@inner
def write_zeros(block, gradients):
    """Write 0 for gradients of declined rows, and past the ends of the others."""
    for r in range(len(block.lengths)):
        is_declined = block.forward.forms[r] != LINEAR
        if len(gradients.potentials) > 0:
            gradients.potentials[block.first + r, 0 if is_declined else block.lengths[r] :] = 0.0
        if gradients.boundary.shape[1] > 0 and is_declined:
            gradients.boundary[:, block.first + r] = 0.0


@inner
def add_sums(total, pairs):
    """Add the pair marginals of a block to the sums of its group."""
    for n in range(len(pairs)):
        for k in range(pairs.shape[1]):
            for j in range(pairs.shape[1]):
                total[n, k, j] += pairs[n, k, j]


@inner
def scale_pairs(pairs, matrices, by_logs):
    """Multiply pairs by the weights of their transitions, or undo the scales of these."""
    flat, size = view(pairs, 0, (pairs.size,)), pairs.shape[1] * pairs.shape[2]
    for i in range(len(flat)):
        if not by_logs:
            flat[i] = math.ldexp(flat[i], -int(matrices.scales[1, i // size]))
        # Weights of matrices that no row uses are undefined, and 0 * inf is 0 here.
        elif flat[i] != 0.0:
            flat[i] *= matrices.weights[i]
