"""The cases of gradients: a value and all its gradients in one call."""

from __future__ import annotations

from collections.abc import Mapping

import arraylogchain as alc
from benchmarks import contestants as run
from benchmarks import gradient_contestants as grad
from benchmarks import gradient_references as references
from benchmarks import inputs as make
from benchmarks.definitions import (
    FORUM,
    HMMLEARN,
    IN_TORCH,
    OURS,
    SEMIRING,
    TORCH,
    WITH_SEMIRING,
    Case,
    Contestant,
    Sizes,
)

ABG = ("a", "b", "g")
XPG = ("x", "bulk", "p0", "g")
XP = ("x", "P", "p0")

# --- contestants ----------------------------------------------------------------------------------

FORUM_CHAIN = (
    Contestant(OURS, grad.by_pullback(grad.chain), XPG),
    Contestant(IN_TORCH, grad.by_autograd(run.chain), XPG, is_ours=True, **TORCH),
    Contestant("v - 1 bare np.matmul", grad.bare_forward_products, XPG, is_yardstick=True),
    Contestant("vector recursion in torch", grad.by_autograd(run.torch_recursion), XPG, **TORCH),
    Contestant(FORUM, grad.by_autograd(run.torch_pairs), XPG, **TORCH),
)
LONG_CHAIN = (
    Contestant(OURS, grad.marginals, XP),
    Contestant(IN_TORCH, grad.marginals, XP, is_ours=True, **TORCH),
    Contestant("hmmlearn, log", grad.hmmlearn_posteriors_log, XP, **HMMLEARN),
    Contestant("hmmlearn, scaling", grad.hmmlearn_posteriors_scaling, XP, **HMMLEARN),
)
LOG_PRODUCT = (
    Contestant(OURS, grad.by_pullback(alc.vjp.logmatmulexp), ABG),
    Contestant(IN_TORCH, grad.by_autograd(alc.logmatmulexp), ABG, is_ours=True, **TORCH),
    Contestant("3 bare np.matmul, same shapes", grad.three_products, ABG, is_yardstick=True),
    Contestant(
        "exp, matmul, log in torch", grad.by_autograd(grad.torch_exp_matmul_log), ABG, **TORCH
    ),
)
SMALL_LOG_PRODUCT = (
    *LOG_PRODUCT,
    Contestant("logsumexp in torch", grad.by_autograd(grad.torch_logsumexp), ABG, **TORCH),
    Contestant(SEMIRING, grad.by_autograd(run.semiring_product), ABG, **WITH_SEMIRING),
)


def broadcast_product(subscripts: str) -> tuple[Contestant, ...]:
    """Return the contestants of a product with broadcast weights, which einsum writes as given."""
    einsum = run.torch_einsum(subscripts)
    return (
        Contestant(OURS, grad.by_pullback(alc.vjp.matmul), ABG),
        Contestant(IN_TORCH, grad.by_autograd(alc.matmul), ABG, is_ours=True, **TORCH),
        Contestant("torch.matmul", grad.by_autograd(run.torch_matmul), ABG, **TORCH),
        Contestant("torch.einsum", grad.by_autograd(einsum), ABG, **TORCH),
    )


# --- cases ----------------------------------------------------------------------------------------


def _forum_case(
    size: tuple[int, int, int, int],
    quick: tuple[int, int, int, int],
    not_run: Mapping[str, str] | None = None,
) -> Case:
    return Case(
        name=f"gradients-forum-{'-'.join(map(str, size))}",
        title=f"forum's case n, t, v, c = {', '.join(map(str, size))}, with gradients",
        make=make.forum_and_ones,
        sizes=dict(zip("ntvc", size, strict=True)),
        quick_sizes=dict(zip("ntvc", quick, strict=True)),
        contestants=FORUM_CHAIN,
        reference=references.forum,
        not_run=not_run or {},
        has_gradients=True,
    )


def _square_case(
    n: int, dtype: str, contestants: tuple[Contestant, ...], sd: float | None = None
) -> Case:
    def sizes(n: int) -> Sizes:
        spread = {} if sd is None else {"sd": sd}
        return {"a": (n, n), "b": (n, n), "dtype": dtype, **spread}

    return Case(
        name=f"gradients-logmatmulexp-{dtype}-{n}" + (f"-sd{sd:g}" if sd else ""),
        title=f"logmatmulexp {n}³, {dtype}{f', sd {sd:g}' if sd else ''}, with gradients",
        make=make.pair_and_ones,
        sizes=sizes(n),
        quick_sizes=sizes(n // 16),
        contestants=contestants,
        reference=references.log_product,
        has_gradients=True,
    )


def _broadcast_case(
    name: str, subscripts: str, sizes: Sizes, quick_sizes: Sizes, note: str = ""
) -> Case:
    a, b = (list(sizes[operand]) for operand in "ab")
    return Case(
        name=f"gradients-matmul-{name}",
        title=f"matmul {a} @ {b}, float32, with gradients{note}",
        make=make.pair_and_cotangent,
        sizes=sizes,
        quick_sizes=quick_sizes,
        contestants=broadcast_product(subscripts),
        reference=references.product(subscripts),
        has_gradients=True,
    )


GRADIENT_CASES = (
    _forum_case(
        (500, 1, 40, 200), (8, 1, 5, 20), {FORUM: "needs 14.3 GB for the value alone, and a tape"}
    ),
    _forum_case((50, 1, 40, 64), (5, 1, 5, 8)),
    _forum_case((10, 1, 6, 40), (10, 1, 6, 40)),
    Case(
        name="gradients-chain-20000-8",
        title="marginals of one chain, T = 20,000, K = 8, float64",
        make=make.hidden_markov,
        sizes={"steps": 20_000, "states": 8},
        quick_sizes={"steps": 200, "states": 8},
        contestants=LONG_CHAIN,
        reference=references.marginals,
        has_gradients=True,
    ),
    _square_case(1024, "float32", LOG_PRODUCT),
    _square_case(1024, "float64", LOG_PRODUCT),
    _square_case(256, "float32", SMALL_LOG_PRODUCT),
    _square_case(512, "float32", SMALL_LOG_PRODUCT, sd=1000),
    _broadcast_case(
        "broadcast",
        "abxi,bij->abxj",
        sizes={"a": (8192, 8, 1, 64), "b": (8, 64, 64)},
        quick_sizes={"a": (64, 8, 1, 16), "b": (8, 16, 16)},
    ),
    _broadcast_case(
        "pytorch-154128",
        "abxi,bij->abxj",
        sizes={"a": (64, 256, 1, 100), "b": (256, 100, 100)},
        quick_sizes={"a": (4, 16, 1, 10), "b": (16, 10, 10)},
        note=" (pytorch #154128, 1/64)",
    ),
    _broadcast_case(
        "pytorch-149302",
        "abxi,zbij->abxj",
        sizes={"a": (128, 32, 1, 1024), "b": (1, 32, 1024, 128)},
        quick_sizes={"a": (4, 4, 1, 32), "b": (1, 4, 32, 16)},
        note=" (pytorch #149302, 1/64)",
    ),
    _broadcast_case(
        "pytorch-18862",
        "mk,akx->amx",
        sizes={"a": (1024, 1024), "b": (96, 1024, 1)},
        quick_sizes={"a": (32, 32), "b": (6, 32, 1)},
        note=" (pytorch #18862, 1/32)",
    ),
)
