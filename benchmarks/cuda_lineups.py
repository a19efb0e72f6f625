"""Who takes part in the cases on a CUDA device: contestants in CuPy and in torch."""

from __future__ import annotations

from typing import Any

import arraylogchain as alc
from benchmarks import contestants as run
from benchmarks import cuda_contestants as cuda
from benchmarks import gradient_contestants as grad
from benchmarks.definitions import FORUM, IN_TORCH, OURS, Contestant

AB = ("a", "b")
ABG = ("a", "b", "g")
XP = ("x", "bulk", "p0")
XPG = ("x", "bulk", "p0", "g")
CUPY: dict[str, Any] = {"requires": ("cupy",)}
TORCH: dict[str, Any] = {"requires": ("torch",)}

IN_CUPY = f"{OURS}, CuPy"
BLOCKED = "logsumexp in CuPy, blocks"
COMPILED = "logsumexp in torch, compiled"


def _both(function: Any, takes: tuple[str, ...]) -> tuple[Contestant, Contestant]:
    """Return this library on CuPy and on torch."""
    return (
        Contestant(IN_CUPY, function, takes, **CUPY),
        Contestant(IN_TORCH, function, takes, is_ours=True, **TORCH),
    )


def _both_with_gradients(
    pullback: Any, function: Any, takes: tuple[str, ...]
) -> tuple[Contestant, Contestant]:
    return (
        Contestant(IN_CUPY, grad.by_pullback(pullback), takes, **CUPY),
        Contestant(IN_TORCH, grad.by_autograd(function), takes, is_ours=True, **TORCH),
    )


MATMUL = Contestant("cupy.matmul, same shape", cuda.matmul, AB, is_yardstick=True, **CUPY)
TORCH_MATMUL = Contestant("torch.matmul, same shape", cuda.matmul, AB, is_yardstick=True, **TORCH)
COPY = Contestant("copy of as many bytes", cuda.copy, ("moved",), is_yardstick=True, **CUPY)
LOG_PRODUCT = (
    *_both(alc.logmatmulexp, AB),
    MATMUL,
    Contestant("exp, matmul, log in CuPy", cuda.exp_matmul_log, AB, **CUPY),
    Contestant(BLOCKED, cuda.logsumexp_in_blocks, AB, **CUPY),
    Contestant(COMPILED, cuda.compiled(cuda.torch_logsumexp), AB, **TORCH),
)
TENSOR_CORES = Contestant(
    f"{IN_TORCH}, tensor cores", cuda.over_tensor_cores, AB, is_ours=True, **TORCH
)
SQUARE_LOG_PRODUCT = (*LOG_PRODUCT[:2], TENSOR_CORES, *LOG_PRODUCT[2:])
# Where bytes and not operations are the limit, the first yardstick is a copy.
SMALL_LOG_PRODUCT = (*LOG_PRODUCT[:2], COPY, *LOG_PRODUCT[2:])
MAXPLUS = (
    *_both(run.maxplus_values, AB),
    MATMUL,
    Contestant("maximum in CuPy, blocks", cuda.maximum_in_blocks, AB, **CUPY),
    Contestant(
        "maximum in torch, compiled, no places", cuda.compiled(cuda.torch_maximum), AB, **TORCH
    ),
)
SMALL_MAXPLUS = (*MAXPLUS[:2], COPY, *MAXPLUS[2:])
LOG_PRODUCT_GRADIENTS = (
    *_both_with_gradients(alc.vjp.logmatmulexp, alc.logmatmulexp, ABG),
    Contestant(
        "3 bare cupy.matmul, same shapes", cuda.three_products, ABG, is_yardstick=True, **CUPY
    ),
    Contestant(
        "exp, matmul, log in torch", grad.by_autograd(grad.torch_exp_matmul_log), ABG, **TORCH
    ),
    Contestant(COMPILED, grad.by_autograd(cuda.compiled(cuda.torch_logsumexp)), ABG, **TORCH),
)
SMALL_LOG_PRODUCT_GRADIENTS = (*LOG_PRODUCT_GRADIENTS[:2], COPY, *LOG_PRODUCT_GRADIENTS[2:])

_BARE = "v - 1 bare cupy.matmul"
_EAGER = "vector recursion in torch"
_MODES = {f"{_EAGER}, compiled": "default", f"{_EAGER}, compiled, graphs": "reduce-overhead"}


def forum_chain(*, compiled: bool) -> tuple[Contestant, ...]:
    """Compiling a chain takes a minute: not at each size."""
    modes = _MODES if compiled else {}
    return (
        *_both(run.chain, XP),
        Contestant(_BARE, cuda.bare_products, XP, is_yardstick=True, **CUPY),
        Contestant(_EAGER, run.torch_recursion, XP, **TORCH),
        *(
            Contestant(label, cuda.compiled(run.torch_recursion, mode), XP, **TORCH)
            for label, mode in modes.items()
        ),
        Contestant(FORUM, run.torch_pairs, XP, **TORCH),
    )


def forum_gradients(*, compiled: bool) -> tuple[Contestant, ...]:
    modes = _MODES if compiled else {}
    return (
        *_both_with_gradients(grad.chain, run.chain, XPG),
        Contestant(_BARE, cuda.bare_products, XPG, is_yardstick=True, **CUPY),
        Contestant(_EAGER, grad.by_autograd(run.torch_recursion), XPG, **TORCH),
        *(
            Contestant(
                label, grad.by_autograd(cuda.compiled(run.torch_recursion, mode)), XPG, **TORCH
            )
            for label, mode in modes.items()
        ),
        Contestant(FORUM, grad.by_autograd(run.torch_pairs), XPG, **TORCH),
    )


def broadcast(subscripts: str) -> tuple[Contestant, ...]:
    return (
        *_both(alc.matmul, AB),
        Contestant("cupy.matmul", cuda.matmul, AB, **CUPY),
        Contestant("torch.matmul", cuda.matmul, AB, **TORCH),
        Contestant("cupy.einsum", cuda.einsum(subscripts), AB, **CUPY),
        Contestant("torch.einsum", run.torch_einsum(subscripts), AB, **TORCH),
    )


def broadcast_gradients(subscripts: str) -> tuple[Contestant, ...]:
    return (
        *_both_with_gradients(alc.vjp.matmul, alc.matmul, ABG),
        Contestant("torch.matmul", grad.by_autograd(cuda.matmul), ABG, **TORCH),
        Contestant("torch.einsum", grad.by_autograd(run.torch_einsum(subscripts)), ABG, **TORCH),
    )
