"""What is measured on a CUDA device, the most telling first: a run may be cut off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import cuda_lineups as lineups
from benchmarks import gradient_references, references
from benchmarks import inputs as make
from benchmarks.definitions import Case, Contestant

# Bytes of terms that a definition in blocks goes through in about a second.
_MOST_BYTES = 3e11
# What the forum's user had.
_FORUM_MEMORY = int(10.75 * 2**30)


def _shapes(batch: tuple[int, ...], m: int, k: int, n: int, **options: Any) -> dict[str, Any]:
    return {"a": (*batch, m, k), "b": (*batch, k, n), **options}


def _too_slow(batch: int, m: int, k: int, n: int, dtype: str) -> dict[str, str]:
    """Leave out the definition where it takes seconds, and what compiles it."""
    terms = batch * m * k * n
    if terms * (8 if dtype == "float64" else 4) < _MOST_BYTES:
        return {}
    return dict.fromkeys((lineups.BLOCKED, lineups.COMPILED), f"{terms:.1e} terms take seconds")


def _missing(contestants: tuple[Contestant, ...], dtype: str) -> dict[str, str]:
    """Leave out what CuPy has no type for."""
    if dtype != "bfloat16":
        return {}
    return {each.label: "CuPy has no bfloat16" for each in contestants if each.library == "cupy"}


def _square(n: int, dtype: str, sd: float = 1.0) -> Case:
    wide = f"-sd{sd:g}" if sd != 1 else ""
    contestants = (
        (*lineups.SQUARE_LOG_PRODUCT, lineups.TORCH_MATMUL)
        if dtype.endswith("16")
        else lineups.SQUARE_LOG_PRODUCT
    )
    return Case(
        name=f"logmatmulexp-{dtype}-{n}{wide}",
        title=f"logmatmulexp {n}³, {dtype}{f', sd {sd:g}' if wide else ''}",
        make=make.drawn_pair,
        sizes=_shapes((), n, n, n, dtype=dtype, sd=sd),
        quick_sizes=_shapes((), *[min(64, max(8, n // 64))] * 3, dtype=dtype, sd=sd),
        contestants=contestants,
        reference=references.log_product,
        not_run=_too_slow(1, n, n, n, dtype) | _missing(contestants, dtype),
    )


def _batched(batch: int, m: int) -> Case:
    return Case(
        name=f"logmatmulexp-batch{batch}-{m}",
        title=f"logmatmulexp {batch} × [{m}, {m}] @ [{m}, 256], float32",
        make=make.drawn_pair,
        sizes=_shapes((batch,), m, m, 256),
        quick_sizes=_shapes((3,), m // 16, m // 16, 16),
        contestants=lineups.LOG_PRODUCT,
        reference=references.log_product,
        not_run=_too_slow(batch, m, m, 256, "float32"),
    )


def _thin(m: int, n: int, *, maxplus: bool = False) -> Case:
    name = "maxplus" if maxplus else "logmatmulexp"
    return Case(
        name=f"{name}-thin-{m}-{n}",
        title=f"{'maxplus_matmul' if maxplus else name} [{m}, {n}] @ [{n}, {n}], float32",
        make=make.drawn_pair,
        sizes=_shapes((), m, n, n),
        quick_sizes=_shapes((), 64, min(n, 16), min(n, 16)),
        contestants=lineups.SMALL_MAXPLUS if maxplus else lineups.SMALL_LOG_PRODUCT,
        reference=references.maxplus_product if maxplus else references.log_product,
    )


def _maxplus(n: int) -> Case:
    return Case(
        name=f"maxplus-{n}",
        title=f"maxplus_matmul {n}³, float32",
        make=make.drawn_pair,
        sizes=_shapes((), n, n, n),
        quick_sizes=_shapes((), n // 64, n // 64, n // 64),
        contestants=lineups.MAXPLUS,
        reference=references.maxplus_product,
    )


def _forum(n: int, v: int, c: int, *, gradients: bool, compiled: bool = False) -> Case:
    chain = lineups.forum_gradients if gradients else lineups.forum_chain
    size = {"n": n, "t": 1, "v": v, "c": c}
    return Case(
        name=f"{'gradients-' if gradients else ''}forum-{n}-1-{v}-{c}",
        title=f"forum's case n, t, v, c = {n}, 1, {v}, {c}{', with gradients' * gradients}",
        make=make.forum_and_ones if gradients else make.forum,
        sizes=size,
        quick_sizes={"n": 9, "t": 1, "v": 5, "c": 12},
        contestants=chain(compiled=compiled),
        reference=gradient_references.forum if gradients else references.forum,
        has_gradients=gradients,
    )


def _square_gradients(n: int, dtype: str = "float32") -> Case:
    def sizes(n: int) -> dict[str, Any]:
        return _shapes((), n, n, n, dtype=dtype)

    return Case(
        name=f"gradients-logmatmulexp-{dtype}-{n}",
        title=f"logmatmulexp {n}³, {dtype}, with gradients",
        make=make.pair_and_ones,
        sizes=sizes(n),
        quick_sizes=sizes(n // 64),
        contestants=lineups.LOG_PRODUCT_GRADIENTS,
        reference=gradient_references.log_product,
        has_gradients=True,
    )


def _problem_b(
    name: str,
    subscripts: str,
    sizes: Mapping[str, Any],
    quick_sizes: Mapping[str, Any],
    note: str = "",
) -> Case:
    a, b = (list(sizes[operand]) for operand in "ab")
    dtype = sizes.get("dtype", "float32")
    contestants = lineups.broadcast(subscripts)
    return Case(
        name=f"matmul-{name}",
        title=f"matmul {a} @ {b}, {dtype}{note}",
        make=make.drawn_pair,
        sizes=sizes,
        quick_sizes=quick_sizes,
        contestants=contestants,
        reference=references.product,
        not_run=_missing(contestants, dtype),
    )


_WEIGHTS = {"a": (8192, 8, 1, 64), "b": (8, 64, 64)}
_FEW_WEIGHTS = {"a": (32, 8, 1, 16), "b": (8, 16, 16)}

CASES = (
    _forum(500, 40, 200, gradients=False, compiled=True),
    _forum(500, 40, 200, gradients=True, compiled=True),
    _square(4096, "float32"),
    _square(4096, "float64"),
    Case(
        name="logmatmulexp-many-16",
        title="logmatmulexp 100,000 × 16³, float32",
        make=make.drawn_pair,
        sizes=_shapes((100_000,), 16, 16, 16),
        quick_sizes=_shapes((50,), 16, 16, 16),
        contestants=lineups.SMALL_LOG_PRODUCT,
        reference=references.log_product,
    ),
    Case(
        name="gradients-logmatmulexp-many-16",
        title="logmatmulexp 100,000 × 16³, float32, with gradients",
        make=make.pairs_and_cotangents,
        sizes=_shapes((100_000,), 16, 16, 16),
        quick_sizes=_shapes((50,), 16, 16, 16),
        contestants=lineups.SMALL_LOG_PRODUCT_GRADIENTS,
        reference=gradient_references.log_products,
        has_gradients=True,
    ),
    *(_square(n, "float32") for n in (256, 1024, 2048, 8192)),
    *(_square(n, "float64") for n in (256, 1024, 2048)),
    Case(
        name="capacity-forum",
        title="largest n in 10.75 GiB, t, v, c = 1, 40, 200, with gradients",
        make=make.forum_and_ones,
        sizes={"n": 100, "t": 1, "v": 40, "c": 200, "limit": _FORUM_MEMORY},
        quick_sizes={"n": 10, "t": 1, "v": 5, "c": 12, "limit": 100_000},
        contestants=tuple(
            contestant
            for contestant in lineups.forum_gradients(compiled=False)
            if not contestant.is_yardstick
        ),
        reference=gradient_references.forum,
        has_gradients=True,
        has_capacity=True,
    ),
    *(_maxplus(n) for n in (1024, 4096)),
    _square(2048, "float16"),
    _square(2048, "bfloat16"),
    *(_square(512, "float32", sd) for sd in (20, 1000)),
    _square_gradients(2048),
    *(_thin(m, n) for m, n in ((2048, 128), (131_072, 16), (2_097_152, 4))),
    *(_batched(batch, m) for m in (64, 256) for batch in (64, 384)),
    _batched(64, 1024),
    _problem_b("broadcast", "abxi,bij->abxj", _WEIGHTS, _FEW_WEIGHTS),
    Case(
        name="gradients-matmul-broadcast",
        title="matmul [8192, 8, 1, 64] @ [8, 64, 64], float32, with gradients",
        make=make.pair_and_cotangent,
        sizes=_WEIGHTS,
        quick_sizes=_FEW_WEIGHTS,
        contestants=lineups.broadcast_gradients("abxi,bij->abxj"),
        reference=gradient_references.product("abxi,bij->abxj"),
        has_gradients=True,
    ),
    _problem_b(
        "pytorch-18862",
        "mk,akx->amx",
        {"a": (4096, 4096), "b": (192, 4096, 1)},
        {"a": (32, 32), "b": (6, 32, 1)},
        " (pytorch #18862)",
    ),
    _problem_b(
        "pytorch-154128",
        "abxi,bij->abxj",
        {"a": (4096, 256, 1, 100), "b": (256, 100, 100)},
        {"a": (4, 16, 1, 10), "b": (16, 10, 10)},
        " (pytorch #154128)",
    ),
    _problem_b(
        "pytorch-149302",
        "abxi,zbij->abxj",
        {"a": (8192, 32, 1, 1024), "b": (1, 32, 1024, 128), "dtype": "bfloat16"},
        {"a": (4, 4, 1, 32), "b": (1, 4, 32, 16), "dtype": "bfloat16"},
        " (pytorch #149302)",
    ),
    *(
        _forum(n, v, c, gradients=gradients)
        for n, v, c in (
            (16, 40, 200),
            (2000, 40, 200),
            (500, 8, 200),
            (500, 160, 200),
            (500, 40, 50),
            (500, 40, 512),
        )
        for gradients in (False, True)
    ),
    *(_square(n, "float32") for n in (128, 512)),
    _square(512, "float64"),
    _maxplus(2048),
    *(_thin(m, n, maxplus=True) for m, n in ((2048, 128), (2_097_152, 4))),
    *(_square_gradients(n) for n in (512, 1024)),
    _batched(384, 1024),
)
