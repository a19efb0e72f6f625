"""The cases of log-einsum: equations of two, three and eight operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import arraylogchain as alc
from benchmarks import references
from benchmarks.definitions import OURS, SEMIRING, WITH_SEMIRING, Case, Contestant
from benchmarks.inputs import Inputs

PLAIN_EINSUM = "exp, einsum, log in NumPy"
SEMIRING_BLOCKS = f"{SEMIRING}, AutomaticBlockSize()"


def _normal_operands(rng: np.random.Generator, **shapes: tuple[int, ...]) -> Inputs:
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def _plain(equation: str) -> Callable[..., Any]:
    def call(*operands: Any) -> Any:
        return np.log(np.einsum(equation, *map(np.exp, operands), optimize=True))

    return call


def _semiring(equation: str) -> Callable[..., Any]:
    def call(*operands: Any) -> Any:
        from torch_semiring_einsum import AutomaticBlockSize, compile_equation, log_einsum

        return log_einsum(compile_equation(equation), *operands, block_size=AutomaticBlockSize())

    return call


def _exact(equation: str) -> Callable[[Inputs], references.Reference]:
    """Return the reference: normal entries are far from where long double under- or overflows."""

    def reference(inputs: Inputs) -> references.Reference:
        operands = [x.astype(np.longdouble) for x in inputs.values()]
        return references.Reference(np.s_[...], _plain(equation)(*operands))

    return reference


def _contestants(equation: str, takes: tuple[str, ...]) -> tuple[Contestant, ...]:
    def ours(*operands: Any) -> Any:
        return alc.logeinsumexp(equation, *operands)

    return (
        Contestant(OURS, ours, takes, requires=("opt_einsum",) if len(takes) > 2 else ()),
        Contestant(PLAIN_EINSUM, _plain(equation), takes),
        Contestant(SEMIRING_BLOCKS, _semiring(equation), takes, **WITH_SEMIRING),
    )


def _chain_of_matrices(name: str, equation: str, size: int, batch: tuple[int, ...] = ()) -> Case:
    takes = tuple(f"x{i}" for i in range(equation.count(",") + 1))
    title = " × ".join(map(str, (*batch, len(takes)))) + f" matrices of {size}²"
    return Case(
        name=name,
        title=f"logeinsumexp {equation}, {title}, float32",
        make=_normal_operands,
        sizes=dict.fromkeys(takes, (*batch, size, size)),
        quick_sizes=dict.fromkeys(takes, (*batch, 3, 3)),
        contestants=_contestants(equation, takes),
        reference=_exact(equation),
    )


EINSUM_CASES = (
    Case(
        name="einsum-product-1024",
        title="logeinsumexp ik,kj->ij, 1024³, float32",
        make=_normal_operands,
        sizes={"a": (1024, 1024), "b": (1024, 1024)},
        quick_sizes={"a": (16, 16), "b": (16, 16)},
        contestants=(
            *_contestants("ik,kj->ij", ("a", "b")),
            Contestant("arraylogchain.logmatmulexp", alc.logmatmulexp, ("a", "b"), is_ours=True),
        ),
        reference=references.log_product,
    ),
    _chain_of_matrices("einsum-3-64", "bik,bkj,bjl->bil", 64, batch=(4,)),
    _chain_of_matrices("einsum-8-8", "ab,bc,cd,de,ef,fg,gh,hi->ai", 8),
)
