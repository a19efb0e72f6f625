"""What is measured: a table of cases, and for each the contestants that take part.

The cases here are of values; those of log-einsum are in `einsum_cases`, of gradients in
`gradient_cases`, of what else is inferred about paths in `path_cases`, and of chains of all sizes
in `chain_cases`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import arraylogchain as alc
from benchmarks import contestants as run
from benchmarks import inputs as make
from benchmarks import references
from benchmarks.chain_cases import CHAIN_CASES, LOG_Z
from benchmarks.definitions import (
    FORUM,
    NUMPY_LSE,
    OURS,
    PLAIN,
    SCIPY_LSE,
    SEMIRING,
    TORCH,
    WITH_SEMIRING,
    Case,
    Contestant,
    in_one_thread,
)
from benchmarks.einsum_cases import EINSUM_CASES
from benchmarks.gradient_cases import GRADIENT_CASES
from benchmarks.path_cases import PATH_CASES
from benchmarks.range_cases import RANGE_CASES

AB = ("a", "b")

# --- contestants ----------------------------------------------------------------------------------

LOG_PRODUCT = (
    Contestant(OURS, alc.logmatmulexp, AB),
    Contestant("np.matmul, same shape", np.matmul, AB, is_yardstick=True),
    Contestant(PLAIN, run.exp_matmul_log, AB),
    Contestant(NUMPY_LSE, run.numpy_logsumexp, AB),
    Contestant(SCIPY_LSE, run.blocked_scipy_logsumexp, AB, requires=("scipy",)),
    Contestant(SEMIRING, run.semiring_product, AB, **WITH_SEMIRING),
)
BANDED = (
    *LOG_PRODUCT,
    Contestant("arraylogchain, dense operand", alc.logmatmulexp, ("a", "dense"), is_yardstick=True),
)
WITH_THREADS = (*LOG_PRODUCT, in_one_thread(alc.logmatmulexp, AB))
MAXPLUS = (
    Contestant(OURS, run.maxplus_values, AB),
    Contestant("maximum in NumPy, blocks", run.numpy_maxplus, AB),
    Contestant(SEMIRING, run.semiring_maxplus, AB, **WITH_SEMIRING),
)
FORUM_CHAIN = (
    Contestant(OURS, run.chain, ("x", "bulk", "p0")),
    Contestant("v - 1 bare np.matmul", run.bare_products, ("x", "bulk"), is_yardstick=True),
    Contestant("vector recursion in NumPy", run.numpy_recursion_of_sets, ("x", "bulk", "p0")),
    Contestant("vector recursion in torch", run.torch_recursion, ("x", "bulk", "p0"), **TORCH),
    Contestant(FORUM, run.torch_pairs, ("x", "bulk", "p0"), **TORCH),
)
MATRIX_CHAIN = (
    Contestant(OURS, alc.logchainexp, ("matrices",)),
    Contestant("one by one in NumPy", run.fold_matrices, ("matrices",)),
    Contestant("in pairs in NumPy", run.pair_matrices, ("matrices",)),
)


def broadcast_product(subscripts: str) -> tuple[Contestant, ...]:
    """Return the contestants of a product with broadcast weights, which einsum writes as given."""
    return (
        Contestant(OURS, alc.matmul, AB),
        Contestant("np.matmul", np.matmul, AB),
        Contestant("np.einsum", run.einsum(subscripts), AB),
        Contestant("np.einsum, optimize", run.einsum(subscripts, optimize=True), AB),
        Contestant("torch.matmul", run.torch_matmul, AB, **TORCH),
        Contestant("torch.einsum", run.torch_einsum(subscripts), AB, **TORCH),
    )


# --- cases ----------------------------------------------------------------------------------------


def _square(n: int, **options: Any) -> dict[str, Any]:
    return {"a": (n, n), "b": (n, n), **options}


def _too_slow(terms: int) -> dict[str, str]:
    return {SCIPY_LSE: f"{terms:.1e} terms take minutes"} if terms > 2e9 else {}


def _square_case(n: int, dtype: str) -> Case:
    return Case(
        name=f"logmatmulexp-{dtype}-{n}",
        title=f"logmatmulexp {n}³, {dtype}",
        make=make.normal_pair,
        sizes=_square(n, dtype=dtype),
        quick_sizes=_square(n // 16, dtype=dtype),
        contestants=LOG_PRODUCT,
        reference=references.log_product,
        not_run=_too_slow(n**3),
    )


def _wide_case(sd: int, dtype: str) -> Case:
    return Case(
        name=f"logmatmulexp-{dtype}-512-sd{sd}",
        title=f"logmatmulexp 512³, {dtype}, sd {sd}",
        make=make.normal_pair,
        sizes=_square(512, dtype=dtype, sd=sd),
        quick_sizes=_square(32, dtype=dtype, sd=sd),
        contestants=LOG_PRODUCT,
        reference=references.log_product,
    )


def _batched_case(batch: int, m: int) -> Case:
    def shapes(batch: int, m: int, n: int) -> dict[str, Any]:
        return {"a": (batch, m, m), "b": (batch, m, n)}

    return Case(
        name=f"logmatmulexp-batch{batch}-{m}",
        title=f"logmatmulexp {batch} × [{m}, {m}] @ [{m}, 256], float32",
        make=make.normal_pair,
        sizes=shapes(batch, m, 256),
        quick_sizes=shapes(4, m // 8, 32),
        contestants=LOG_PRODUCT,
        reference=references.log_product,
        not_run=_too_slow(batch * m * m * 256),
    )


def _forum_case(
    size: tuple[int, int, int, int],
    quick: tuple[int, int, int, int],
    not_run: Mapping[str, str] | None = None,
) -> Case:
    return Case(
        name=f"forum-{'-'.join(map(str, size))}",
        title=f"forum's case n, t, v, c = {', '.join(map(str, size))}",
        make=make.forum,
        sizes=dict(zip("ntvc", size, strict=True)),
        quick_sizes=dict(zip("ntvc", quick, strict=True)),
        contestants=FORUM_CHAIN,
        reference=references.forum,
        not_run=not_run or {},
    )


def _elementwise_case(name: str, operands: tuple[str, ...]) -> Case:
    takes = (*operands, "out")
    ours = run.elementwise(getattr(np, name))
    in_torch = run.torch_elementwise(name)
    return Case(
        name=f"elementwise-{name}",
        title=f"np.{name} of 16 million numbers, float32, as within the library, and one thread",
        make=make.normal_arrays,
        sizes={"size": 1 << 24},
        quick_sizes={"size": 1 << 12},
        contestants=(
            Contestant(OURS, ours, takes),
            in_one_thread(ours, takes),
            Contestant(f"np.{name}", run.numpy_elementwise(name), takes),
            Contestant(f"torch.{name}", in_torch, takes, **TORCH),
        ),
        reference=references.elementwise(getattr(np, name), *operands),
    )


VALUE_CASES = (
    *(_square_case(n, dtype) for dtype in ("float32", "float64") for n in (256, 1024, 2048)),
    Case(
        name="logmatmulexp-banded-1024",
        title="logmatmulexp 1024³, float32, right operand 90 % -inf in a band",
        make=make.banded_pair,
        sizes={"n": 1024, "zeros": 0.9},
        quick_sizes={"n": 64, "zeros": 0.9},
        contestants=BANDED,
        reference=references.log_product,
    ),
    *(_wide_case(sd, dtype) for dtype in ("float32", "float64") for sd in (20, 1000)),
    *(_batched_case(batch, m) for m in (64, 256) for batch in (64, 384)),
    Case(
        name="logmatmulexp-thin",
        title="logmatmulexp [262144, 4] @ [4, 4], float32",
        make=make.normal_pair,
        sizes={"a": (262144, 4), "b": (4, 4)},
        quick_sizes={"a": (1024, 4), "b": (4, 4)},
        contestants=LOG_PRODUCT,
        reference=references.log_product,
    ),
    Case(
        name="logmatmulexp-thin-8",
        title="logmatmulexp [1000000, 8] @ [8, 8], float32, and one thread",
        make=make.normal_pair,
        sizes={"a": (1_000_000, 8), "b": (8, 8)},
        quick_sizes={"a": (1024, 8), "b": (8, 8)},
        contestants=WITH_THREADS,
        reference=references.log_product,
    ),
    _elementwise_case("exp", ("a",)),
    _elementwise_case("multiply", AB),
    Case(
        name="logmatmulexp-8",
        title="logmatmulexp 8³, float32: cost of a call",
        make=make.normal_pair,
        sizes=_square(8),
        quick_sizes=_square(8),
        contestants=LOG_PRODUCT,
        reference=references.log_product,
    ),
    Case(
        name="maxplus-1024",
        title="maxplus_matmul 1024³, float32",
        make=make.normal_pair,
        sizes=_square(1024),
        quick_sizes=_square(64),
        contestants=MAXPLUS,
        reference=references.maxplus_product,
    ),
    Case(
        name="maxplus-thin",
        title="maxplus_matmul [262144, 4] @ [4, 4], float32",
        make=make.normal_pair,
        sizes={"a": (262144, 4), "b": (4, 4)},
        quick_sizes={"a": (1024, 4), "b": (4, 4)},
        contestants=MAXPLUS,
        reference=references.maxplus_product,
    ),
    _forum_case(
        (500, 1, 40, 200), (8, 1, 5, 20), {FORUM: "needs 14.3 GB (179 arrays of [500, 200, 200])"}
    ),
    _forum_case((6, 1, 40, 200), (2, 1, 5, 20)),
    _forum_case((10, 1, 6, 40), (10, 1, 6, 40)),
    Case(
        name="chain-batch",
        title="200 chains, T = 50, K = 50, float32",
        make=make.hidden_markov,
        sizes={"batch": (200,), "steps": 50, "states": 50, "dtype": "float32"},
        quick_sizes={"batch": (8,), "steps": 5, "states": 5, "dtype": "float32"},
        contestants=LOG_Z,
        reference=references.chain,
    ),
    *(
        Case(
            name=f"logchainexp-{d}",
            title=f"logchainexp of 1000 matrices {d} × {d}, float64",
            make=make.normal_stack,
            sizes={"count": 1000, "d": d},
            quick_sizes={"count": 11, "d": d},
            contestants=MATRIX_CHAIN,
            reference=references.matrix_chain,
        )
        for d in (8, 64)
    ),
    Case(
        name="matmul-broadcast",
        title="matmul [8192, 8, 1, 64] @ [8, 64, 64], float32",
        make=make.normal_pair,
        sizes={"a": (8192, 8, 1, 64), "b": (8, 64, 64)},
        quick_sizes={"a": (64, 8, 1, 16), "b": (8, 16, 16)},
        contestants=broadcast_product("abxi,bij->abxj"),
        reference=references.product,
    ),
    Case(
        name="matmul-pytorch-154128",
        title="matmul [64, 256, 1, 100] @ [256, 100, 100], float32 (pytorch #154128, 1/64)",
        make=make.normal_pair,
        sizes={"a": (64, 256, 1, 100), "b": (256, 100, 100)},
        quick_sizes={"a": (4, 16, 1, 10), "b": (16, 10, 10)},
        contestants=broadcast_product("abxi,bij->abxj"),
        reference=references.product,
    ),
    Case(
        name="matmul-pytorch-149302",
        title="matmul [128, 32, 1, 1024] @ [1, 32, 1024, 128], float32 (pytorch #149302, 1/64)",
        make=make.normal_pair,
        sizes={"a": (128, 32, 1, 1024), "b": (1, 32, 1024, 128)},
        quick_sizes={"a": (4, 4, 1, 32), "b": (1, 4, 32, 16)},
        contestants=broadcast_product("abxi,zbij->abxj"),
        reference=references.product,
    ),
    Case(
        name="matmul-pytorch-18862",
        title="matmul [1024, 1024] @ [96, 1024, 1], float32 (pytorch #18862, 1/32)",
        make=make.normal_pair,
        sizes={"a": (1024, 1024), "b": (96, 1024, 1)},
        quick_sizes={"a": (32, 32), "b": (6, 32, 1)},
        contestants=broadcast_product("mk,akx->amx"),
        reference=references.product,
    ),
)

CASES = (
    *VALUE_CASES,
    *EINSUM_CASES,
    *CHAIN_CASES,
    *GRADIENT_CASES,
    *PATH_CASES,
    *RANGE_CASES,
)
