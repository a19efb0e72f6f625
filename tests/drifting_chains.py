"""Random chains whose weights wander over hundreds of powers of ten: uncertified results fail.

A path may be negligible in both directions and decide in between; a weight may come down to the
least numbers and rise again. Rows are ragged, transitions sparse and tiny.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.chain_checks import check_chain
from tests.conftest import Backend


def short(rng: np.random.Generator, largest: float) -> dict[str, Any]:
    """Return up to 8 steps, with weights, zeros and closed states of every size."""
    T, K, rows = rng.integers(1, 9), rng.integers(1, 6), rng.integers(1, 12)
    x = rng.normal(size=(rows, T, K)) * 10.0 ** rng.uniform(-2, 3.5, (rows, 1, 1))
    x[rng.random(x.shape) < rng.choice([0, 0.3])] = -np.inf
    P = signed_powers(rng, (rng.choice([1, max(T - 1, 1)]), K, K), (1, 20, largest / 2, largest))
    P[rng.random(P.shape) < rng.choice([0, 0.5])] = 0
    boundaries = [signed_powers(rng, K, sizes) for sizes in ((1, largest), (0, 1, largest))]
    return {"x": x, "transitions": P, "initial": boundaries[0], "final": boundaries[1]}


def long(rng: np.random.Generator, largest: float) -> dict[str, Any]:
    """Return up to 120 steps, whose states wander away from each other and come back."""
    T, K, rows = rng.integers(20, 120), rng.integers(1, 6), rng.integers(1, 12)
    x = rng.normal(size=(rows, T, K)) * rng.choice([1, 30, 130, 400])
    walk = np.cumsum(rng.normal(size=(rows, T, K)) * rng.choice([0, 20, 60]), axis=1)
    x = x + walk * rng.choice([0, 1])
    P = 10.0 ** (
        rng.uniform(-1, 0, (rng.choice([1, T - 1]), K, K)) * rng.choice([1, 20, largest / 3])
    )
    P[rng.random(P.shape) < rng.choice([0, 0.5, 0.8])] = 0
    k = np.arange(K)
    P[:, k, k] = np.maximum(P[:, k, k], 0.3)
    lengths = rng.integers(1, T + 1, rows) if rng.random() < 0.3 else None
    return {"x": x, "transitions": P, "lengths": lengths}


def crossing(rng: np.random.Generator, largest: float) -> dict[str, Any]:
    """Return groups of states without a way between, that lead by turns, each by hundreds of nats.

    Whichever decides has been far below the others early, seen from the front, and late, seen from
    the back.
    """
    T, K, rows = rng.integers(20, 60), rng.integers(2, 5), rng.integers(1, 9)
    cuts = np.sort(rng.integers(1, T, (rows, 2)), axis=1)
    inside = (np.arange(T) >= cuts[:, :1]) & (np.arange(T) < cuts[:, 1:])
    x = rng.normal(size=(rows, T, K))
    depth = rng.choice([50, 130, 450], (rows, 1))
    x[..., 0] -= np.where(inside, depth / 3, 0)
    x[..., -1] -= np.where(inside, 0, depth)
    P = np.eye(K) + rng.choice([0, 1e-30, 10.0**-largest]) * rng.random((K, K))
    return {"x": x, "transitions": P}


def signed_powers(rng: np.random.Generator, shape: Any, sizes: tuple[float, ...]) -> np.ndarray:
    """Return numbers within 10**-size and 10**size, size being one of some."""
    return 10.0 ** (rng.uniform(-1, 1, shape) * rng.choice(sizes))


KINDS = {"short": (short, 12), "long": (long, 4), "crossing": (crossing, 4)}


def check(backend: Backend, dtype: str, kind: str, block: int) -> None:
    """Check every operation of a block of random chains, each with several rows.

    Other libraries than NumPy run the same array operations: a chain of every fifth block will do.
    """
    make, count = KINDS[kind]
    seeds = range(count * block, count * (block + 1))
    if backend.library != "numpy":
        if block % 5:
            pytest.skip("NumPy has all blocks, other libraries every fifth")
        seeds = seeds[block // 5 % count :][:1]
    for seed in seeds:
        options = make(np.random.default_rng(seed), 37 if dtype == "float32" else 300)
        if seed % 3 == 2:
            with np.errstate(divide="ignore"):
                weights = ("transitions", "initial", "final")
                logs = {f"log_{n}": np.log(options.pop(n)) for n in weights if n in options}
            options |= logs
        try:
            check_chain(backend, dtype, **options)
        except AssertionError as error:
            error.add_note(f"{kind} chain of seed {seed}")
            raise
