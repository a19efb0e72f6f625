"""Every kernel that the package can launch, by source file; CpuDevice refuses all others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from arraylogchain._cuda.chains import geometry
from arraylogchain._cuda.chains.row_lengths import KERNEL
from arraylogchain._cuda.dtypes import C_TYPES, compute_type
from arraylogchain._cuda.products import gradients, log_product, maxplus, small
from arraylogchain._cuda.products.tiles import PRODUCT_TILES, TileShape

ALL = list(C_TYPES.values())
FULL = ["float", "double"]
BOOLEANS = ("true", "false")

# Kernels whose loops must not spill registers.
HOT = frozenset(
    {
        "chain",
        "chain_small",
        "entropy",
        "factors",
        "logmatmulexp",
        "maxima",
        "maxplus",
        "posterior_sums",
        "posterior_weights",
        "small",
        "small_gradients",
        "thin",
        "viterbi",
    }
)


def _of(name: str, *parameters: Any) -> list[str]:
    """Return a kernel with all combinations of its template parameters."""
    listed = (p if isinstance(p, (list, tuple)) else [p] for p in parameters)
    return [f"{name}<{', '.join(map(str, values))}>" for values in itertools.product(*listed)]


def _tiled(name: str, *tables: dict[str, tuple[TileShape, ...]]) -> list[str]:
    """Return a kernel for every dtype, with the tiles for what that is computed in."""
    found = []
    for dtype, c in C_TYPES.items():
        tiles = [tile for table in tables for tile in table[compute_type(dtype)]]
        found += _of(name, c, list(dict.fromkeys(tiles)))
    return found


def _small(name: str, warps: Callable[[str, int], int]) -> list[str]:
    sides = itertools.product(C_TYPES.items(), small.SIDES)
    return [f"{name}<{c}, {side}, {warps(dtype, side)}>" for (dtype, c), side in sides]


def _chain(name: str, tiles: dict[int, tuple[tuple[int, int], ...]]) -> list[str]:
    kinds = zip(FULL, tiles.values(), strict=True)
    return [k for c, sizes in kinds for size in sizes for k in _of(name, c, *size)]


def _posterior_sums() -> list[str]:
    tiles = zip(FULL, gradients.TILES.values(), strict=True)
    return [kernel for c, own in tiles for kernel in _of("posterior_sums", c, own, BOOLEANS)]


_KERNELS = {
    "chains/chain.cu": _chain("chain", geometry.TILES),
    "chains/entropy.cu": ["entropy"],
    "chains/factors.cu": [*_of("chain_factors", FULL), *_of("chain_start", FULL)],
    "chains/filtered.cu": _of("filtered", FULL),
    "chains/lengths.cu": [KERNEL],
    "chains/log_weight.cu": _of("log_weight", FULL),
    "chains/pairs.cu": _of("chain_pairs", FULL),
    "chains/prepare.cu": _of("chain_prepare", FULL),
    "chains/sample.cu": _of("sample", FULL),
    "chains/small.cu": _of("chain_small", FULL, geometry.LANES),
    "chains/trace.cu": _of("trace", FULL),
    "chains/viterbi.cu": _chain("viterbi", geometry.BEST_TILES),
    "products/exact.cu": _of("exact", ALL),
    "products/exact_posterior.cu": _of("exact_posterior", ALL),
    "products/exact_posterior_sums.cu": _of("exact_posterior_sums", ALL, BOOLEANS),
    "products/factors.cu": _of("factors", ALL, BOOLEANS),
    "products/logmatmulexp.cu": _tiled("logmatmulexp", PRODUCT_TILES, log_product.TENSOR_TILES),
    "products/maxima.cu": _of("maxima", ALL),
    "products/maxplus.cu": _tiled("maxplus", maxplus.TILES),
    "products/maxplus_gradients.cu": _of("maxplus_gradients", ALL),
    "products/posterior_sums.cu": _posterior_sums(),
    "products/posterior_weights.cu": _of("posterior_weights", ALL),
    "products/rounded.cu": _of("rounded", ["__half", "__nv_bfloat16"]),
    "products/settle.cu": _of("settle", ALL),
    "products/small.cu": _small("small", small.warps),
    "products/small_gradients.cu": _small("small_gradients", small.gradient_warps),
    "products/thin.cu": _of("thin", ALL, log_product.THIN_ROWS),
}
INSTANTIATIONS = {source: tuple(kernels) for source, kernels in _KERNELS.items()}
