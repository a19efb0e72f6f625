"""The error model: the only place where tolerances come from.

The library promises, for every entry of a product and however wide the range of its inputs,

    abs(out - exact) <= eps * (2 * abs(exact) + G + c),

with eps the distance from 1 to the next number of the dtype that is computed in (float32 for the
half precisions, whose results are then rounded once more). An absolute error in log space is a
relative error in linear space, so c counts the roundings of the sum itself, and G pays for the
shifts: ``a - r`` is rounded to eps * abs(a - r), and log(S) to eps * abs(log(S)).
"""

from __future__ import annotations

import math

import numpy as np

from tests.gradient_reference import Gradient, finite, finite_max
from tests.reference import wide

EPS = {"float32": 2.0**-23, "float64": 2.0**-52}
SMALLEST_NORMAL = {"float32": 2.0**-126, "float64": 2.0**-1022}
# Precision p of the half formats (a result is rounded to 2**-p of it) and their smallest subnormal.
HALVES = {"float16": (11, 2.0**-24), "bfloat16": (8, 2.0**-133)}

# The error of the reference itself. It matters only where long double is no wider than double.
REFERENCE_EPS = float(np.finfo(np.longdouble).eps)


def compute_dtype(dtype: str) -> str:
    """Return the dtype that results of `dtype` are computed in."""
    return "float32" if dtype in HALVES else dtype


def eps_of(dtype: str) -> float:
    return EPS[compute_dtype(dtype)] + REFERENCE_EPS


def roundings(K: int) -> float:
    """Return c, the roundings that a sum of K nonnegative terms may show, in eps.

    4 covers exp, log, the shift and the result, each good to an ulp or two. A sum of K terms errs
    by K/2 eps at worst, when every addition rounds the same way; matrix multiplies add in several
    partial sums and round both ways, which makes it about sqrt(K)/2. 2 * sqrt(K) is four times the
    typical error, lies above the worst case for K <= 16, and below any real loss: an entry that has
    lost one term of the size of eps * K is noticed.
    """
    return 4.0 + 2.0 * math.sqrt(K)


def certificate(dtype: str) -> float:
    """Return the largest G of an entry that a shifted product certifies.

    Entries whose sums lie below smallest_normal / eps are recomputed, each with its own maximum,
    and have a G of 0.
    """
    dtype = compute_dtype(dtype)
    return math.log(EPS[dtype] / SMALLEST_NORMAL[dtype])


def half_ulp(exact: np.ndarray, dtype: str) -> np.ndarray | float:
    """Return the largest error of rounding to a half precision; 0 for other dtypes."""
    if dtype not in HALVES:
        return 0.0
    precision, subnormal = HALVES[dtype]
    finite = np.where(np.isfinite(exact), exact, 0)
    _, exponent = np.frexp(finite)
    # A result just below a power of two may be computed as just above it, hence the factor.
    half = np.where(finite == 0, 0, np.ldexp(1.0, exponent - precision - 1))
    return np.maximum(half, subnormal / 2) * 1.001


def product_bound(
    a: np.ndarray, b: np.ndarray, exact: np.ndarray, dtype: str, count: float | None = None
) -> np.ndarray:
    """Return the bound for the entries of ``log(exp(a) @ exp(b))``; c is `count` if given."""
    a = np.asarray(a, np.longdouble)
    b = np.asarray(b, np.longdouble)
    r = finite_max(a[None] if a.ndim == 1 else a, axes=-1)
    c = finite_max(b[:, None] if b.ndim == 1 else b, axes=-2)
    total = r + c
    total = total[..., 0, :] if a.ndim == 1 else total
    total = total[..., 0] if b.ndim == 1 else total
    magnitude = _finite(exact)
    gap = np.maximum(total - magnitude, 0)
    gap = np.where(gap > certificate(dtype), 0, gap)
    count = roundings(a.shape[-1]) if count is None else count
    return eps_of(dtype) * (2 * np.abs(magnitude) + gap + count) + half_ulp(exact, dtype)


def linear_bound(a: np.ndarray, b: np.ndarray, exact: np.ndarray, dtype: str) -> np.ndarray:
    """Return the bound for the entries of ``a @ b``: terms may cancel, so it scales with theirs."""
    with np.errstate(invalid="ignore"):
        terms = np.abs(np.asarray(a, np.longdouble)) @ np.abs(np.asarray(b, np.longdouble))
    count = roundings(np.shape(a)[-1])
    lost = np.shape(a)[-1] * SMALLEST_NORMAL[compute_dtype(dtype)]
    return eps_of(dtype) * count * _finite(terms) + lost + half_ulp(exact, dtype)


def chain_bound(
    exact: np.ndarray, gap: np.ndarray, steps: int | np.ndarray, K: int, dtype: str
) -> np.ndarray:
    """Return the bound for log weights summed over all paths of a chain.

    Each step adds its c and its G. G counts how far the potentials on the deciding path lie below
    the largest of their step, and likewise other log weights. It also counts, as in a product, how
    far the message of their state lies below the shifts. For a predicted message, the shifts are
    the row's largest weight times the largest of the matrix, or the largest predicted message if
    that is more: both logs and the log of the sum are rounded relative to them. An updated message
    is rounded once more, by half its distance from the largest one. Initial and final weights count
    as log weights do, because their logs are added.

    Terms of several rows in one count or derivative form a product over rows, with common shifts.
    The reference computes `gap`, the sum along a path, averaged over the paths by their weight: to
    first order the error of a log of a sum is the average of the errors of its terms. The result is
    rounded once, so 2 * abs(exact) is not summed.
    """
    magnitude = np.abs(_finite(exact))
    error = eps_of(dtype) * (2 * magnitude + _finite(gap) + steps * roundings(K))
    return error + half_ulp(exact, dtype)


def contraction_bound(
    operands: list[np.ndarray], exact: np.ndarray, dtype: str, K: int | None = None
) -> np.ndarray:
    """Return the bound for ``logchainexp``; for ``logeinsumexp`` if its sums have up to K terms.

    The products are made in any order; the rounding of the result is added to theirs.
    """
    steps, _, each = _contraction(operands, K, dtype)
    return eps_of(dtype) * (2 * np.abs(_finite(exact)) + steps * each) + half_ulp(exact, dtype)


def _contraction(operands: list[np.ndarray], K: int | None, dtype: str) -> tuple[int, int, float]:
    """Return the number of products, the most terms of a sum, and the error of each, in eps.

    Operands of ``logeinsumexp`` are summed one by one, too. Every product rounds entries of its
    own: on the deciding paths these lie, on average over the paths, within the sum of the factors'
    magnitudes and the entropy of the inner paths. Their G is below the certificate, and below the
    spread of the entries.
    """
    steps = len(operands) - 1 if K is None else 2 * len(operands) - 1
    K = max(max(m.shape[-2:]) for m in operands) if K is None else K
    finite = [m[np.isfinite(m)].astype(np.longdouble) for m in operands]
    largest = sum(np.max(np.abs(m), initial=0) for m in finite)
    width = sum(np.ptp(m) for m in finite if m.size)
    entropy = steps * math.log(max(K, 1))
    gap = min(certificate(dtype), float(2 * width + entropy))
    return steps, K, 2 * (largest + entropy) + gap + roundings(K)


# Gradients are sums of cotangents times probabilities p = exp(term - log of the sum), and take part
# in sums with others: the error of a probability counts, not that of its logarithm. So a small
# relative error e of exp(term) and of the sum costs p * e; and wherever it takes more work to prove
# a small p right, it may be off by a fixed number of eps instead. An absolute error in logarithms
# (c and G, as above) is the relative error e.
#
# The references sum `mass`, the cotangents' sizes times p; `gap`, the same products times
# p * G; `scale`, the sizes times the unit of p, which is 1 for a probability. The derivative to a
# linear weight is p / weight, and has one over the largest weight of its row as its unit.


def product_gradient_bound(gradient: Gradient, K: int, dtype: str) -> np.ndarray:
    """Return the bound for the gradients of ``logmatmulexp`` with K terms in a sum.

    The exponentials of a - r and b - c, the sum, its division into the cotangent: each is good to
    a few ulp, 32 in all, in addition to the roundings of the sum and of the sum of products with
    cotangents. G covers the roundings of a - r, of b - c and of log(S), wherever an entry is
    computed from those, and likewise those relative to an entry's own maximum. Absolute: one eps
    for the underflow of terms in a certified sum, and one for a p that is left out.
    """
    count = roundings(K) + roundings(gradient.terms) + 32
    return _gradient_bound(gradient, count, absolute=2, inner=K, dtype=dtype)


def contraction_gradient_bound(
    operands: list[np.ndarray], gradient: Gradient, dtype: str, K: int | None = None
) -> np.ndarray:
    """Return the bound for the gradients of ``logchainexp``, or of ``logeinsumexp`` as above.

    A probability is an entry of a product of all operands, one of them with a single entry left,
    over the entry of the full product: it has the errors of two such products.
    """
    num_sums = len(operands) if K is None else 2 * len(operands) - 1
    steps, K, each = _contraction(operands, K, dtype)
    count = 2 * (steps + 1) * each + roundings(gradient.terms) + 32
    absolute = 2 * num_sums * roundings(K)
    return _gradient_bound(gradient, count, absolute=absolute, inner=K, dtype=dtype)


def posterior_bound(gradient: Gradient, steps: int, K: int, dtype: str) -> np.ndarray:
    """Return the bound for marginals, expected transitions and gradients of a chain.

    A probability is a forward times a backward message over Z. By `chain_bound`, each has an error
    of its steps times c and its G: forward and backward together take all steps, and Z
    does once more. The sum over a step's states, and that over rows and steps which share a
    weight, round as sums do. Absolute: c eps, the error of a sum of K terms.
    """
    count = 2 * steps * roundings(K) + roundings(gradient.terms)
    return _gradient_bound(gradient, count, absolute=roundings(K), inner=K, dtype=dtype)


# Derivatives by linear weights have no upper bound: opening an edge can multiply Z by any number.
# Up to these they are held to the bound; beyond, they are large numbers or infinite, but no NaN.
LARGEST_DERIVATIVE = {"float32": 2.0**60, "float64": 2.0**900}


def summation_bound(gradient: Gradient, dtype: str) -> np.ndarray:
    """Return the bound for gradients of linear products, which are plain sums of products."""
    count = roundings(gradient.terms)
    return _gradient_bound(gradient, count, absolute=0, inner=1, dtype=dtype)


def _gradient_bound(
    gradient: Gradient, count: float, *, absolute: float, inner: int, dtype: str
) -> np.ndarray:
    """Return eps * (mass * count + gap + absolute * scale), plus the loss by underflow."""
    error = gradient.mass * count + gradient.gap + absolute * gradient.scale
    lost = gradient.terms * inner * SMALLEST_NORMAL[compute_dtype(dtype)]
    tiny = lost * np.maximum(gradient.scale, 1)
    return eps_of(dtype) * _finite(error) + _finite(tiny) + half_ulp(gradient.exact, dtype)


def label(operation: str, backend: str, dtype: str) -> str:
    """Return the first part of the message of a comparison that fails."""
    return f"{operation} on {backend}, {dtype}"


def assert_within(
    out: np.ndarray, exact: np.ndarray, bound: np.ndarray | float, label: str = "result"
) -> None:
    """Fail unless finite entries lie within `bound` and all others agree exactly, with their sign.

    Shapes must agree as well. Exact values beyond the dtype of `out` are expected as infinity.
    The message begins with the label and shows the worst entry, its error and its bound.
    """
    out, exact = np.asarray(out), np.asarray(exact)
    exact = np.where(np.abs(exact) > np.finfo(out.dtype).max, np.copysign(np.inf, exact), exact)
    assert out.shape == exact.shape, f"{label}: shape {out.shape}, exact {exact.shape}"
    special = ~(np.isfinite(out) & np.isfinite(exact))
    same = (out == exact) | (np.isnan(out) & np.isnan(exact))
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.abs(out.astype(np.longdouble) - exact)
        wrong = np.where(special, ~same, ~(error <= bound))
        excess = np.where(wrong, np.where(special, np.inf, error / bound), 0)
    if not np.any(wrong):
        return
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    allowed = np.broadcast_to(bound, exact.shape)[worst]
    raise AssertionError(
        f"{label}: entry {tuple(map(int, worst))} is {out[worst]}, exact {exact[worst]}, "
        f"error {float(error[worst]):.3g}, bound {float(allowed):.3g}; "
        f"{np.count_nonzero(wrong)} of {out.size} entries out of bound"
    )


def assert_gradient(
    result: np.ndarray,
    expected: Gradient,
    bound: np.ndarray,
    limit: float = np.inf,
    label: str = "gradient",
) -> None:
    """Fail unless gradients lie within `bound`, and are exactly 0 where they have no terms.

    Sums of terms beyond `limit`, or near the largest number, may overflow, but never to NaN.
    """
    exact, shape = expected.exact, expected.exact.shape
    assert result.shape == shape, f"{label}: shape {result.shape}, exact {shape}"
    may_overflow = expected.mass > min(limit, float(np.finfo(result.dtype).max) / 2**10)
    is_accepted = may_overflow & ~np.isnan(result)
    result, exact = (np.where(is_accepted, 0, x).astype(x.dtype) for x in (result, exact))
    assert_within(result, exact, np.where(expected.mass == 0, 0, bound), label)


def _finite(x: np.ndarray) -> np.ndarray:
    return finite(wide(x))


def filtered_bounds(
    probabilities: np.ndarray,
    log_normalizers: np.ndarray,
    gaps: np.ndarray,
    steps: int | np.ndarray,
    K: int,
    dtype: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds for state probabilities given the steps so far, and for log normalizers.

    A probability is a forward message over the sum of all of its step: its relative
    error is that of both, `chain_bound` without the rounding of a logarithm. Errors that all
    messages of a step have in common cancel, and so `steps` may be the number of steps that the
    chain has not forgotten. A normalizer is the sum of one step over that of the step before.
    """
    count = 2 * np.asarray(steps) * roundings(K)
    sum_gaps = np.sum(_finite(probabilities) * gaps, axis=-1)
    errors = probabilities * (gaps + (sum_gaps + count)[..., None])
    before = np.concatenate([0 * sum_gaps[..., :1], sum_gaps[..., :-1]], -1)
    logs = 2 * np.abs(_finite(log_normalizers)) + sum_gaps + before
    tiny = SMALLEST_NORMAL[compute_dtype(dtype)]
    bounds = (eps_of(dtype) * _finite(errors) + tiny, eps_of(dtype) * (logs + count))
    halves = (half_ulp(x, dtype) for x in (probabilities, log_normalizers))
    first, second = (bound + half for bound, half in zip(bounds, halves, strict=True))
    return first, second


def entropy_bound(
    exact: np.ndarray,
    gap: np.ndarray,
    depth: np.ndarray,
    steps: int | np.ndarray,
    K: int,
    dtype: str,
) -> np.ndarray:
    """Return the bound for entropies of a posterior over paths.

    The entropy H is that of the last state, and the sum over the other steps of h, the entropy of a
    state given the next one, averaged with the next one's posterior p. With q log q for every q, a
    relative error e of each changes h by at most e * sum(q * abs(log q + h)): a factor
    that all q have in common cancels, and an error of p changes the average by e * h. The reference
    sums the part of G in `gap`. Absolute: probabilities are rounded to eps, or left out where they
    are smaller, which costs (1 + log K) c at each step. Sums of w log w round at the size of the
    logs: `depth` sums, over steps, how far forward weights and matrix entries on the paths lie
    below the largest, whose own log is 7 at most.
    """
    size = np.abs(_finite(exact))
    absolute = roundings(K) * (steps * (8 + math.log(max(K, 1))) + _finite(depth))
    return eps_of(dtype) * (2 * size + _finite(gap) + absolute) + half_ulp(exact, dtype)
