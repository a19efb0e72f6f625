"""The formulation that ran out of memory, beside the library.

A model computes ``p0 · D_0 · P_1 · D_1 · … · P_{v-1} · x_{v-1}`` in log space for each of n rows:
``x`` [n, t, v, c] holds log weights, D_i is the diagonal matrix of exp(x_i), ``bulk``
[1, t, v-1, c, c] holds the matrices P_i, and ``p0`` [1, t, c] the initial weights. The forum's user
expanded matrices to [n, t, v-1, c, c] and multiplied neighbours until one was left. That takes
gigabytes, and it is right only where v - 1 is a power of two.

    python examples/forum_formulation.py --size 10,1,40,200
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

import arraylogchain as alc

# Exponentials below this one were replaced by it, to keep the logarithm finite.
CLAMP = 1e-10


def random_problem(n: int, t: int, v: int, c: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw x, bulk and p0 from the distributions that the forum used."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, t, v, c), dtype=np.float32) - np.float32(2)
    bulk = rng.random((1, t, v - 1, c, c), dtype=np.float32)
    return x, bulk, rng.random((1, t, c), dtype=np.float32)


def with_library(x: np.ndarray, bulk: np.ndarray, p0: np.ndarray) -> np.ndarray:
    """Return log Z, [n, t]."""
    return alc.LogChain(x, transitions=bulk, initial=p0).log_partition()


def multiply_in_pairs(x: np.ndarray, bulk: np.ndarray, p0: np.ndarray) -> np.ndarray:
    """Return what should be log Z, [n, t].

    Kept with what is wrong in it: small exponentials are clamped, and an odd number of matrices is
    filled up with a matrix of zeros, which in log space is all ones and not the identity.
    """
    stack = x[..., :-1, :, None] + np.log(bulk)
    while stack.shape[-3] > 1:
        stack = multiply_neighbours(stack)
    tail = logsumexp(stack[..., 0, :, :] + x[..., -1, None, :])
    return logsumexp(np.log(p0) + tail)


def multiply_neighbours(stack: np.ndarray) -> np.ndarray:
    """Return half as many matrices; each step makes a new array, as the forum's code did."""
    if stack.shape[-3] % 2:
        filling = np.zeros_like(stack[..., :1, :, :])
        stack = np.concatenate([stack, filling], axis=-3)
    left, right = stack[..., 0::2, :, :], stack[..., 1::2, :, :]
    left_max = left.max(axis=-1, keepdims=True)
    right_max = right.max(axis=-2, keepdims=True)
    left = np.exp(left - left_max)
    left = np.maximum(left, CLAMP)
    right = np.exp(right - right_max)
    right = np.maximum(right, CLAMP)
    product = left @ right
    shift = left_max + right_max
    product = np.log(product)
    return shift + product


def logsumexp(terms: np.ndarray) -> np.ndarray:
    """Return the logs of the sums of exponentials over the last axis."""
    shift = terms.max(axis=-1, keepdims=True)
    return np.log(np.sum(np.exp(terms - shift), axis=-1)) + shift[..., 0]


def measure(call: Callable[[], np.ndarray]) -> tuple[np.ndarray, float, int]:
    """Return a result, the seconds that it took, and the most bytes that it held."""
    call()
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, seconds, peak


def main(sizes: Sequence[tuple[int, int, int, int]]) -> dict[str, list[float]]:
    """Print time, memory and error of both for each size; return the errors."""
    errors: dict[str, list[float]] = {"library": [], "pairs": []}
    print(f"{'n, t, v, c':>16}  {'':7}  {'time':>9}  {'memory':>9}  largest error in nats")
    for size in sizes:
        problem = random_problem(*size)
        exact = with_library(*(array.astype(np.float64) for array in problem))
        for name, solve in (("library", with_library), ("pairs", multiply_in_pairs)):
            result, seconds, peak = measure(partial(solve, *problem))
            errors[name].append(float(np.max(np.abs(result - exact))))
            print(
                f"{', '.join(map(str, size)):>16}  {name:7}  {seconds * 1e3:6.1f} ms  "
                f"{peak / 1e6:6.1f} MB  {errors[name][-1]:.1e}"
            )
    return errors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="10,1,6,40", metavar="n,t,v,c")
    given = tuple(int(part) for part in parser.parse_args().size.split(","))
    main([(10, 1, 5, 40), given])
